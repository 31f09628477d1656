"""Stored tensor blocks to float32, in NumPy: what the integers and scales of each type stand for.

Every value is rounded once, as the format's definition gives it. The layouts are ggml's: 32 values a block for the
plain types, 256 for the K types, whose scales are themselves quantized.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shoal.errors import UnsupportedModelError

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]


class BlockFormat(NamedTuple):
    """Values per block and bytes per block."""

    elements: int
    bytes: int


BLOCKS: Mapping[str, BlockFormat] = {
    "F32": BlockFormat(1, 4),
    "F16": BlockFormat(1, 2),
    "BF16": BlockFormat(1, 2),
    "Q8_0": BlockFormat(32, 34),
    "Q4_0": BlockFormat(32, 18),
    "Q4_1": BlockFormat(32, 20),
    "Q5_0": BlockFormat(32, 22),
    "Q5_1": BlockFormat(32, 24),
    "Q4_K": BlockFormat(256, 144),
    "Q5_K": BlockFormat(256, 176),
    "Q6_K": BlockFormat(256, 210),
}


def dequantize(type_name: str, data: Bytes) -> Floats:
    """uint8 [..., bytes] -> float32 [..., values]; the last axis must hold whole blocks.

    UnsupportedModelError for another type, ValueError for a last axis that is not whole blocks.
    """
    if type_name not in BLOCKS:
        raise UnsupportedModelError(f"tensor type {type_name} is not supported; supported are {', '.join(BLOCKS)}")
    size = BLOCKS[type_name].bytes
    if data.shape[-1] % size:
        raise ValueError(f"{data.shape[-1]} bytes are not whole blocks of {size} bytes ({type_name})")
    blocks = np.ascontiguousarray(data).reshape(*data.shape[:-1], data.shape[-1] // size, size)
    values = _DECODERS[type_name](blocks)
    return values.reshape(*data.shape[:-1], -1)


def _f32(blocks: Bytes) -> Floats:
    return blocks.view("<f4").astype(np.float32)


def _f16(blocks: Bytes) -> Floats:
    return blocks.view("<f2").astype(np.float32)


def _bf16(blocks: Bytes) -> Floats:
    return (blocks.view("<u2").astype(np.uint32) << 16).view(np.float32)


def _half(blocks: Bytes, offset: int) -> Floats:
    """The half-precision number at ``offset`` of every block, [..., 1]."""
    return np.ascontiguousarray(blocks[..., offset : offset + 2]).view("<f2").astype(np.float32)


def _nibbles(packed: Bytes) -> Floats:
    """Low halves of all bytes, then high halves."""
    return np.concatenate((packed & 15, packed >> 4), axis=-1).astype(np.float32)


def _fifth_bits(packed: Bytes) -> Floats:
    """32 bits, each worth 16."""
    return np.unpackbits(packed, axis=-1, bitorder="little").astype(np.float32) * 16


def _q8_0(blocks: Bytes) -> Floats:
    return _half(blocks, 0) * blocks[..., 2:].view(np.int8).astype(np.float32)


def _q4_0(blocks: Bytes) -> Floats:
    return _half(blocks, 0) * (_nibbles(blocks[..., 2:]) - 8)


def _q4_1(blocks: Bytes) -> Floats:
    return _half(blocks, 0) * _nibbles(blocks[..., 4:]) + _half(blocks, 2)


def _q5_0(blocks: Bytes) -> Floats:
    return _half(blocks, 0) * (_nibbles(blocks[..., 6:]) + _fifth_bits(blocks[..., 2:6]) - 16)


def _q5_1(blocks: Bytes) -> Floats:
    return _half(blocks, 0) * (_nibbles(blocks[..., 8:]) + _fifth_bits(blocks[..., 4:8])) + _half(blocks, 2)


def _k_scales(packed: Bytes) -> tuple[Floats, Floats]:
    """Eight 6-bit scales and eight 6-bit minima from 12 bytes: the last four of each are split over two places."""
    first, second, third = packed[..., 0:4], packed[..., 4:8], packed[..., 8:12]
    scales = np.concatenate((first & 63, (third & 15) | ((first >> 6) << 4)), axis=-1)
    minima = np.concatenate((second & 63, (third >> 4) | ((second >> 6) << 4)), axis=-1)
    return scales.astype(np.float32), minima.astype(np.float32)


def _k_groups(blocks: Bytes, integers: Floats) -> Floats:
    """[..., 8 groups, 32] integers with the scales and minima at the block's front."""
    scales, minima = _k_scales(blocks[..., 4:16])
    scale = (_half(blocks, 0) * scales)[..., None]
    minimum = (_half(blocks, 2) * minima)[..., None]
    return (scale * integers - minimum).reshape(*blocks.shape[:-1], 256)


def _k_nibbles(packed: Bytes) -> Bytes:
    """128 bytes to [..., 8 groups, 32]: of every 32 bytes the low halves are a group and the high halves the next."""
    parts = packed.reshape(*packed.shape[:-1], 4, 1, 32)
    return np.concatenate((parts & 15, parts >> 4), axis=-2).reshape(*packed.shape[:-1], 8, 32)


def _q4_k(blocks: Bytes) -> Floats:
    return _k_groups(blocks, _k_nibbles(blocks[..., 16:]).astype(np.float32))


def _q5_k(blocks: Bytes) -> Floats:
    shifts = np.arange(8, dtype=np.uint8)[:, None]
    high = (blocks[..., None, 16:48] >> shifts) & 1
    return _k_groups(blocks, (_k_nibbles(blocks[..., 48:]) | (high << 4)).astype(np.float32))


def _q6_k(blocks: Bytes) -> Floats:
    lead = blocks.shape[:-1]
    low = blocks[..., :128].reshape(*lead, 2, 2, 32)
    low = np.concatenate((low & 15, low >> 4), axis=-2)  # [..., half, quarter, 32]
    shifts = np.array([0, 2, 4, 6], dtype=np.uint8)[:, None]
    high = (blocks[..., 128:192].reshape(*lead, 2, 1, 32) >> shifts) & 3
    integers = (low | (high << 4)).astype(np.float32).reshape(*lead, 16, 16) - 32
    scales = blocks[..., 192:208].view(np.int8).astype(np.float32)
    return ((_half(blocks, 208) * scales)[..., None] * integers).reshape(*lead, 256)


_DECODERS: Mapping[str, Callable[[Bytes], Floats]] = {
    "F32": _f32,
    "F16": _f16,
    "BF16": _bf16,
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
