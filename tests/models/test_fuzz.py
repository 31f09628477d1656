"""Damaged files: an error of ours, or a model all of whose tensors lie inside the file. Never anything else."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
from gguf_writer import tiny_llama
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shoal.errors import ShoalError
from shoal.models import GGUFFile, describe
from shoal.text.tokenizer import Tokenizer, TokenizerSpec

GOLDEN = Path(__file__).parent.parent / "golden" / "data" / "tiny" / "llama-gguf" / "tiny-llama.Q4_0.gguf"
SEEDS = {"made": tiny_llama().build(), "golden": GOLDEN.read_bytes()}
NUMBERS = st.sampled_from([0, 1, 2, 255, 2**16, 2**31, 2**32 - 1, 2**40, 2**62, 2**63, 2**64 - 1])
FLIP = st.tuples(st.just("flip"), st.floats(0, 1), st.integers(0, 255))
NUMBER = st.tuples(st.just("number"), st.floats(0, 1), NUMBERS)
CUT = st.tuples(st.just("cut"), st.floats(0, 1), st.just(0))
DOUBLE = st.tuples(st.just("double"), st.floats(0, 1), st.integers(1, 64))


def damage(content: bytes, changes: list[tuple[str, float, int]], reach: float) -> bytes:
    data = bytearray(content)
    for kind, where, value in changes:
        # Most of the damage goes to the front, where the structure is.
        place = int(where * min(len(data) - 1, reach))
        if kind == "flip":
            data[place] = value
        elif kind == "number":
            data[place : place + 8] = value.to_bytes(8, "little")[: len(data) - place]
        elif kind == "double":
            data[place:place] = data[place : place + value]
        elif len(data) > 8:
            del data[max(8, place) :]
    return bytes(data)


@settings(max_examples=600, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from(sorted(SEEDS)),
    st.lists(FLIP | NUMBER | DOUBLE | CUT, min_size=1, max_size=4),
    st.sampled_from([40.0, 1500.0, 40000.0]),
)
def test_damaged_files(tmp_path: Path, seed: str, changes: list[tuple[str, float, int]], reach: float) -> None:
    path = tmp_path / "damaged.gguf"
    content = damage(SEEDS[seed], changes, reach)
    path.write_bytes(content)
    begin = time.monotonic()
    try:
        file = GGUFFile.open(path)
        model = describe(file)
        Tokenizer(TokenizerSpec.from_gguf(file.metadata, path=str(path)), path=str(path))
    except ShoalError:
        pass
    else:
        whole = np.frombuffer(content, np.uint8)
        assert sum(tensor.data.size for tensor in file.tensors.values()) <= whole.size
        for tensor in file.tensors.values():
            assert int(tensor.data.sum(dtype=np.int64)) >= 0  # every byte can be read
        assert model.description.num_layers == len(model.weights.layers)
    assert time.monotonic() - begin < 5
