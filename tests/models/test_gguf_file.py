"""The GGUF reader: equal to an independent one on good files, and an error with a name on every kind of bad one."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf_writer import ARRAY, BOOL, STRING, UINT32, Writer, tiny_llama

from shoal.errors import ModelError, ModelFileError, ModelNotFoundError, ShoalError, UnsupportedModelError
from shoal.models.gguf_file import GGUFFile

TINY = Path(__file__).parent.parent / "golden" / "data" / "tiny"
FILES = sorted(path.relative_to(TINY).as_posix() for path in TINY.glob("*-gguf/*.gguf"))


def write(tmp_path: Path, content: bytes | Writer) -> Path:
    path = tmp_path / "file.gguf"
    path.write_bytes(content if isinstance(content, bytes) else content.build())
    return path


@pytest.mark.parametrize("name", FILES)
def test_equals_the_independent_reader(name: str) -> None:
    ours = GGUFFile.open(TINY / name)
    theirs = gguf.GGUFReader(TINY / name)
    expected = {key: item.contents() for key, item in theirs.fields.items() if not key.startswith("GGUF.")}
    assert set(ours.metadata) == set(expected)
    for key, value in expected.items():
        found = ours.metadata[key]
        assert (found.tolist() if isinstance(found, np.ndarray) else found) == value
    assert list(ours.tensors) == [item.name for item in theirs.tensors]
    for item in theirs.tensors:
        tensor = ours.tensors[item.name]
        assert tensor.type_name == item.tensor_type.name
        assert tensor.shape == tuple(reversed(item.shape.tolist()))
        np.testing.assert_array_equal(tensor.data.reshape(-1), item.data.view(np.uint8).reshape(-1))


def test_values_of_every_kind(tmp_path: Path) -> None:
    writer = Writer()
    values = {
        "a": 5,
        "b": -5,
        "c": 0.5,
        "d": True,
        "e": "ü",
        "f": 2**40,
        "g": [1, 2],
        "h": ["x", ""],
        "i": [True, False],
    }
    for name, value in values.items():
        writer.key(name, value)
    file = GGUFFile.open(write(tmp_path, writer))
    found = {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in file.metadata.items()}
    assert found == values


def test_tensors_outlive_the_file_object(tmp_path: Path) -> None:
    with GGUFFile.open(write(tmp_path, tiny_llama())) as file:
        tensor = file.tensors["token_embd.weight"]
    assert not file.tensors
    assert np.isfinite(tensor.data.view(np.float32)).all()


def test_every_truncation_is_an_error(tmp_path: Path) -> None:
    whole = tiny_llama().build()
    for length in range(len(whole)):
        with pytest.raises(ModelFileError):
            GGUFFile.open(write(tmp_path, whole[:length]))


def raw_key(name: str, kind: int, value: bytes) -> Writer:
    writer = Writer()
    writer.keys.append((name, kind, value))
    return writer


def with_tensor(**changes: Any) -> Writer:
    writer = Writer().tensor("t", np.zeros((2, 8)))
    for name, value in changes.items():
        setattr(writer.tensors[0], name, value)
    return writer


def two_tensors(offset: int) -> Writer:
    return Writer().tensor("one", np.zeros((2, 8))).tensor("two", np.zeros((2, 8)), offset=offset)


HUGE = 2**60
PREAMBLE = Writer(key_count=1).build()[:24]  # announces one key and ends
BAD: list[tuple[str, Callable[[], Writer | bytes], type[Exception], str]] = [
    ("empty", lambda: b"", ModelFileError, "magic"),
    ("magic", lambda: Writer(magic=b"GGML"), ModelFileError, "magic: expected b'GGUF'"),
    ("version 1", lambda: Writer(version=1), UnsupportedModelError, "version 1"),
    ("big endian", lambda: Writer(version=3 << 24), UnsupportedModelError, "big endian"),
    ("key count", lambda: Writer(key_count=HUGE), ModelFileError, "header: claims"),
    ("tensor count", lambda: Writer(tensor_count=HUGE), ModelFileError, "header: claims"),
    ("one key too many", lambda: Writer(key_count=2).key("k", 1).build()[:41], ModelFileError, "key"),
    ("name length", lambda: PREAMBLE + struct.pack("<Q", HUGE) + b"x" * 40, ModelFileError, "key 0"),
    ("value type", lambda: raw_key("k", 77, b""), ModelFileError, "k: has unknown value type 77"),
    ("boolean", lambda: raw_key("k", BOOL, 2), ModelFileError, "k: a boolean"),  # type: ignore[arg-type]
    ("utf-8", lambda: Writer().key("k", "x").build().replace(b"\x01" + b"\0" * 7 + b"x", b"\x01" + b"\0" * 7 + b"\xff"),
     ModelFileError, "k: is not UTF-8"),
    ("duplicate key", lambda: Writer().key("k", 1).key("k", 2), ModelFileError, "k: the key stands twice"),
    ("alignment", lambda: Writer().key("general.alignment", 24), ModelFileError, "general.alignment: must be a power"),
    ("alignment type", lambda: Writer().key("general.alignment", "x"), ModelFileError, "general.alignment: must be an"),
    ("dimensions", lambda: with_tensor(dimensions=[1] * 5), ModelFileError, "tensor t: must have 1 to 4 dimensions"),
    ("no dimensions", lambda: with_tensor(dimensions=[]), ModelFileError, "tensor t: must have 1 to 4 dimensions"),
    ("zero dimension", lambda: with_tensor(dimensions=[8, 0]), ModelFileError, "tensor t: has a dimension of 0"),
    ("overflow", lambda: with_tensor(dimensions=[2**62, 2**62]), ModelFileError, "tensor t: data"),
    ("unknown type", lambda: with_tensor(type_number=999), UnsupportedModelError, "tensor t: unknown tensor type 999"),
    ("unsupported type", lambda: with_tensor(type_number=10), UnsupportedModelError, "tensor t: type Q2_K"),
    ("block size", lambda: with_tensor(type_number=2), ModelFileError, "not whole Q4_0 blocks"),
    ("misaligned", lambda: with_tensor(offset=4), ModelFileError, "not a multiple of the alignment"),
    ("out of range", lambda: with_tensor(offset=2**40), ModelFileError, "lies outside"),
    ("duplicate", lambda: Writer().tensor("t", np.zeros(8)).tensor("t", np.zeros(8)), ModelFileError, "stands twice"),
    ("overlap", lambda: two_tensors(32), ModelFileError, "tensor two: overlaps tensor one"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "error", "message"), [case[1:] for case in BAD], ids=[case[0] for case in BAD])
def test_bad_files(tmp_path: Path, make: Callable[[], Writer | bytes], error: type[Exception], message: str) -> None:
    path = write(tmp_path, make())
    with pytest.raises(error, match=message) as raised:
        GGUFFile.open(path)
    assert str(path) in str(raised.value)


@pytest.mark.parametrize("inner", [STRING, ARRAY, UINT32, BOOL])
def test_absurd_arrays_cost_nothing(tmp_path: Path, inner: int) -> None:
    array = struct.pack("<IQ", inner, HUGE)
    content = PREAMBLE + struct.pack("<Q", 1) + b"k" + struct.pack("<I", ARRAY) + array + b"\0" * 64
    with pytest.raises(ModelFileError, match="k: "):
        GGUFFile.open(write(tmp_path, content))


def test_nested_arrays_are_bounded(tmp_path: Path) -> None:
    array = b"".join(struct.pack("<IQ", ARRAY, 1) for _ in range(50)) + struct.pack("<IQ", UINT32, 0)
    content = PREAMBLE + struct.pack("<Q", 1) + b"k" + struct.pack("<I", ARRAY) + array
    with pytest.raises(ModelFileError, match="nested"):
        GGUFFile.open(write(tmp_path, content))


def test_what_is_not_a_file(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing.gguf"):
        with pytest.raises(ModelNotFoundError) as raised:
            GGUFFile.open(path)
        assert str(path) in str(raised.value)
    assert issubclass(ModelNotFoundError, ModelError)
    assert issubclass(ModelError, ShoalError)
