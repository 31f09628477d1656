"""Reading GGUF files: a header, typed metadata, a table of tensors, then their data, which stays in the mapped file.

The reader trusts nothing. Every count and length is compared with the bytes that are left before anything is
allocated or looped over, so a malformed file costs no more time or memory than a well-formed one of its size, and ends
in a ModelFileError that names the key, the tensor or the part of the header. Versions 2 and 3, little endian.

Specification: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, NamedTuple, Self

import numpy as np

from shoal.errors import ModelFileError, ModelNotFoundError, UnsupportedModelError
from shoal.kernels.ops import WeightTensor
from shoal.models.dequantize import BLOCKS

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_DIMENSIONS = 4
MAX_NAME_BYTES = 65535
MAX_ARRAY_DEPTH = 2

# ggml's numbers of tensor types: those we run, and those we know by name only.
TENSOR_TYPES: Mapping[int, str] = MappingProxyType(
    {
        0: "F32",
        1: "F16",
        2: "Q4_0",
        3: "Q4_1",
        6: "Q5_0",
        7: "Q5_1",
        8: "Q8_0",
        9: "Q8_1",
        10: "Q2_K",
        11: "Q3_K",
        12: "Q4_K",
        13: "Q5_K",
        14: "Q6_K",
        15: "Q8_K",
        16: "IQ2_XXS",
        17: "IQ2_XS",
        18: "IQ3_XXS",
        19: "IQ1_S",
        20: "IQ4_NL",
        21: "IQ3_S",
        22: "IQ2_S",
        23: "IQ4_XS",
        24: "I8",
        25: "I16",
        26: "I32",
        27: "I64",
        28: "F64",
        29: "IQ1_M",
        30: "BF16",
        34: "TQ1_0",
        35: "TQ2_0",
        39: "MXFP4",
    }
)

_UINT8, _INT8, _UINT16, _INT16, _UINT32, _INT32, _FLOAT32, _BOOL, _STRING, _ARRAY, _UINT64, _INT64, _FLOAT64 = range(13)
_SCALARS: Mapping[int, np.dtype[Any]] = {
    _UINT8: np.dtype("<u1"),
    _INT8: np.dtype("<i1"),
    _UINT16: np.dtype("<u2"),
    _INT16: np.dtype("<i2"),
    _UINT32: np.dtype("<u4"),
    _INT32: np.dtype("<i4"),
    _FLOAT32: np.dtype("<f4"),
    _UINT64: np.dtype("<u8"),
    _INT64: np.dtype("<i8"),
    _FLOAT64: np.dtype("<f8"),
}


class _TensorInfo(NamedTuple):
    name: str
    dimensions: tuple[int, ...]
    type_name: str
    offset: int


class GGUFFile:
    """An open file. Tensors are views of its mapping and keep it alive after ``close`` until they are gone.

    metadata: plain Python values; arrays of numbers are NumPy arrays, arrays of strings are lists.
    """

    def __init__(
        self, path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, WeightTensor], mapping: mmap.mmap | None
    ) -> None:
        self.path = path
        self.metadata = metadata
        self.tensors = tensors
        self._mapping = mapping

    @classmethod
    def open(cls, path: str | Path) -> GGUFFile:
        """Map and check a file. ModelNotFoundError, ModelFileError, UnsupportedModelError."""
        path = Path(path)
        if path.exists() and not path.is_file():
            raise ModelNotFoundError(f"{path} is not a file")
        try:
            with path.open("rb") as stream:
                size = stream.seek(0, 2)
                if size < len(MAGIC):
                    raise ModelFileError(str(path), "magic", f"expected a GGUF file, found {size} bytes")
                mapping = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError:
            raise ModelNotFoundError(f"no such file: {path}") from None
        except OSError as error:
            raise ModelNotFoundError(f"cannot read {path}: {error.strerror}") from error
        view = memoryview(mapping)
        metadata, infos, end = _read_header(str(path), view)
        tensors = _place_tensors(str(path), view, metadata, infos, end)
        return cls(path, MappingProxyType(metadata), MappingProxyType(tensors), mapping)

    def close(self) -> None:
        """Let the mapping go as soon as no tensor refers to it; idempotent."""
        self.metadata = MappingProxyType({})
        self.tensors = MappingProxyType({})
        self._mapping = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class _Reader:
    """A cursor over the header. Every read is checked against the end."""

    def __init__(self, path: str, view: memoryview) -> None:
        self.path = path
        self.view = view
        self.position = 0

    def error(self, where: str, message: str) -> ModelFileError:
        return ModelFileError(self.path, where, message)

    def take(self, count: int, where: str) -> memoryview:
        left = len(self.view) - self.position
        if count > left:
            raise self.error(where, f"needs {count} bytes at offset {self.position}, but only {left} are left")
        piece = self.view[self.position : self.position + count]
        self.position += count
        return piece

    def uint32(self, where: str) -> int:
        return int.from_bytes(self.take(4, where), "little")

    def uint64(self, where: str) -> int:
        return int.from_bytes(self.take(8, where), "little")

    def string(self, where: str) -> str:
        length = self.uint64(where)
        try:
            return str(self.take(length, where), "utf-8")
        except UnicodeDecodeError as error:
            raise self.error(where, f"is not UTF-8: byte {error.start} is {error.reason}") from None

    def name(self, where: str) -> str:
        length = self.uint64(where)
        if length > MAX_NAME_BYTES:
            raise self.error(where, f"a name has at most {MAX_NAME_BYTES} bytes, this one claims {length}")
        self.position -= 8
        return self.string(where)

    def value(self, kind: int, where: str, depth: int = 0) -> Any:
        if kind in _SCALARS:
            dtype = _SCALARS[kind]
            return np.frombuffer(self.take(dtype.itemsize, where), dtype)[0].item()
        if kind == _BOOL:
            return self.boolean(where)
        if kind == _STRING:
            return self.string(where)
        if kind == _ARRAY:
            return self.array(where, depth)
        raise self.error(where, f"has unknown value type {kind}")

    def boolean(self, where: str) -> bool:
        byte = self.take(1, where)[0]
        if byte > 1:
            raise self.error(where, f"a boolean must be 0 or 1, found {byte}")
        return byte == 1

    def array(self, where: str, depth: int) -> Any:
        if depth >= MAX_ARRAY_DEPTH:
            raise self.error(where, f"arrays are nested more than {MAX_ARRAY_DEPTH} deep")
        kind, count = self.uint32(where), self.uint64(where)
        if kind in _SCALARS or kind == _BOOL:
            dtype = _SCALARS.get(kind, np.dtype("u1"))
            values = np.frombuffer(self.take(count * dtype.itemsize, where), dtype)
            if kind != _BOOL:
                return values
            if values.size and values.max() > 1:
                raise self.error(where, f"a boolean must be 0 or 1, found {values.max()}")
            return values.astype(np.bool_)
        # A string takes at least its length's 8 bytes, an array its type and count.
        if count * 8 > len(self.view) - self.position:
            raise self.error(where, f"claims {count} elements, more than the rest of the file could hold")
        if kind == _STRING:
            return self.strings(count, where)
        return [self.value(kind, where, depth + 1) for _ in range(count)]

    def strings(self, count: int, where: str) -> list[str]:
        """Many strings in one loop: vocabularies hold a hundred thousand."""
        view, position, end = self.view, self.position, len(self.view)
        unpack = struct.Struct("<Q").unpack_from
        found = []
        for index in range(count):
            if position + 8 > end:
                raise self.error(where, f"element {index} of {count} lies past the end of the file")
            (length,) = unpack(view, position)
            position += 8
            if length > end - position:
                raise self.error(where, f"element {index} claims {length} bytes, but only {end - position} are left")
            try:
                found.append(str(view[position : position + length], "utf-8"))
            except UnicodeDecodeError as error:
                raise self.error(where, f"element {index} is not UTF-8: byte {error.start} is {error.reason}") from None
            position += length
        self.position = position
        return found


def _read_header(path: str, view: memoryview) -> tuple[dict[str, Any], list[_TensorInfo], int]:
    reader = _Reader(path, view)
    magic = bytes(reader.take(4, "magic"))
    if magic != MAGIC:
        raise reader.error("magic", f"expected {MAGIC!r}, found {magic!r}: not a GGUF file")
    version = reader.uint32("version")
    if version not in VERSIONS:
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        if swapped in VERSIONS:
            raise UnsupportedModelError(f"{path}: the file is big endian, which Shoal cannot read")
        raise UnsupportedModelError(f"{path}: GGUF version {version}; Shoal reads versions 2 and 3")
    tensor_count, key_count = reader.uint64("tensor count"), reader.uint64("key count")
    left = len(view) - reader.position
    # The least a key takes: name length, value type, one byte. A tensor: name length, dimensions, type, offset.
    if key_count * 13 > left or tensor_count * 24 > left:
        raise reader.error(
            "header", f"claims {key_count} keys and {tensor_count} tensors, more than {left} bytes could hold"
        )
    metadata: dict[str, Any] = {}
    for index in range(key_count):
        key = reader.name(f"key {index}")
        if key in metadata:
            raise reader.error(key, "the key stands twice in the file")
        metadata[key] = reader.value(reader.uint32(key), key)
    infos = [_read_info(reader, index) for index in range(tensor_count)]
    return metadata, infos, reader.position


def _read_info(reader: _Reader, index: int) -> _TensorInfo:
    name = reader.name(f"tensor {index}")
    where = f"tensor {name}"
    count = reader.uint32(where)
    if not 1 <= count <= MAX_DIMENSIONS:
        raise reader.error(where, f"must have 1 to {MAX_DIMENSIONS} dimensions, claims {count}")
    dimensions = tuple(reader.uint64(where) for _ in range(count))
    number, offset = reader.uint32(where), reader.uint64(where)
    type_name = TENSOR_TYPES.get(number)
    if type_name is None:
        raise UnsupportedModelError(f"{reader.path}: {where}: unknown tensor type {number}; {_supported()}")
    if type_name not in BLOCKS:
        raise UnsupportedModelError(f"{reader.path}: {where}: type {type_name} is not supported; {_supported()}")
    return _TensorInfo(name, dimensions, type_name, offset)


def _supported() -> str:
    return f"supported are {', '.join(BLOCKS)}"


def _place_tensors(
    path: str, view: memoryview, metadata: Mapping[str, Any], infos: list[_TensorInfo], end: int
) -> dict[str, WeightTensor]:
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if isinstance(alignment, bool) or not isinstance(alignment, int) or not 1 <= alignment <= 2**20:
        raise ModelFileError(path, "general.alignment", f"must be an integer up to {2**20}, found {alignment!r}")
    if alignment & (alignment - 1):
        raise ModelFileError(path, "general.alignment", f"must be a power of two, found {alignment}")
    start = -(-end // alignment) * alignment
    room = max(0, len(view) - start)
    tensors: dict[str, WeightTensor] = {}
    spans: list[tuple[int, int, str]] = []
    for info in infos:
        where = f"tensor {info.name}"
        if info.name in tensors:
            raise ModelFileError(path, where, "the tensor stands twice in the file")
        size, rows = _tensor_bytes(path, info)
        if info.offset % alignment:
            raise ModelFileError(path, where, f"offset {info.offset} is not a multiple of the alignment {alignment}")
        if info.offset + size > room:
            raise ModelFileError(
                path,
                where,
                f"data [{info.offset}, {info.offset + size}) lies outside the {room} bytes of the data part",
            )
        begin = start + info.offset
        data = np.frombuffer(view[begin : begin + size], np.uint8).reshape(rows, -1)
        tensors[info.name] = WeightTensor(info.name, info.type_name, tuple(reversed(info.dimensions)), data)
        spans.append((info.offset, info.offset + size, info.name))
    spans.sort()
    for (_, before_end, before), (after_begin, _, after) in pairwise(spans):
        if after_begin < before_end:
            raise ModelFileError(path, f"tensor {after}", f"overlaps tensor {before}")
    return tensors


def _tensor_bytes(path: str, info: _TensorInfo) -> tuple[int, int]:
    """Bytes of the tensor's data, and rows (everything but the first dimension)."""
    where = f"tensor {info.name}"
    # Python integers do not overflow, so a product of absurd dimensions is merely larger than the file.
    if 0 in info.dimensions:
        raise ModelFileError(path, where, f"has a dimension of 0: {list(info.dimensions)}")
    block = BLOCKS[info.type_name]
    if info.dimensions[0] % block.elements:
        raise ModelFileError(
            path,
            where,
            f"rows of {info.dimensions[0]} values are not whole {info.type_name} blocks of {block.elements}",
        )
    rows = math.prod(info.dimensions[1:])
    return info.dimensions[0] // block.elements * block.bytes * rows, rows
