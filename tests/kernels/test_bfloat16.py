"""bfloat16 rounding against exact arithmetic."""

from __future__ import annotations

import struct
from fractions import Fraction

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shoal.kernels.bfloat16 import from_bits, round_to_bfloat16, to_bits

ALL_BITS = np.arange(1 << 16, dtype=np.uint16)


def as_float(bits: int) -> float:
    return struct.unpack("<f", struct.pack("<I", bits))[0]


def nearest(bits: int) -> int:
    """The bfloat16 nearest to a finite float32, by comparing exact distances."""
    below, value = bits >> 16, Fraction(as_float(bits))
    if not bits & 0xFFFF:
        return below
    # Past the largest finite value, infinity stands where the next value would be, as IEEE 754 rounds.
    above_value = (
        Fraction(as_float((below + 1) << 16))
        if (below + 1) & 0x7FFF != 0x7F80
        else Fraction(2) ** 128 * (-1 if bits >> 31 else 1)
    )
    down, up = abs(value - Fraction(as_float(below << 16))), abs(above_value - value)
    if down == up:
        return below if below % 2 == 0 else below + 1
    return below if down < up else below + 1


@given(st.integers(0, (1 << 32) - 1))
def test_rounds_to_nearest_even(bits: int) -> None:
    value = np.array([bits], dtype=np.uint32).view(np.float32)
    got = int(to_bits(value)[0])
    if np.isnan(value[0]):
        assert got & 0x7F80 == 0x7F80
        assert got & 0x7F
        assert got >> 15 == bits >> 31
    elif np.isinf(value[0]):
        assert got == bits >> 16
    else:
        assert got == nearest(bits)


def test_every_upper_half_with_the_low_halves_that_decide() -> None:
    finite = ALL_BITS[(ALL_BITS & 0x7F80) != 0x7F80].astype(np.uint32)
    step = 97  # a sample of the upper halves, coprime to every power of two
    for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
        sample = (finite[::step] << 16) | np.uint32(low)
        expected = [nearest(int(bits)) for bits in sample]
        np.testing.assert_array_equal(to_bits(sample.view(np.float32)), np.array(expected, dtype=np.uint16))


def test_every_bfloat16_survives() -> None:
    values = from_bits(ALL_BITS)
    numbers = ~np.isnan(values)
    np.testing.assert_array_equal(to_bits(values)[numbers], ALL_BITS[numbers])
    assert np.isnan(round_to_bfloat16(values)[~numbers]).all()


def test_shape_and_layout_are_kept() -> None:
    x = np.linspace(-3, 3, 24, dtype=np.float32).reshape(2, 3, 4)
    rounded = round_to_bfloat16(x)
    assert rounded.shape == x.shape
    np.testing.assert_array_equal(round_to_bfloat16(x.transpose(2, 0, 1)), rounded.transpose(2, 0, 1))
    assert round_to_bfloat16(np.float32(1.0)).shape == ()
    assert round_to_bfloat16(np.zeros((0, 4), dtype=np.float32)).shape == (0, 4)
