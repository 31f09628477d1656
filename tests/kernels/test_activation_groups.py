"""Grouped 8-bit activations against a scalar twin."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.kernels.activation_groups import GROUP_SIZE, dequantize_groups, quantize_groups, round_to_groups


def twin(row: np.ndarray) -> tuple[list[int], list[np.float32]]:
    levels: list[int] = []
    scales: list[np.float32] = []
    for start in range(0, len(row), 32):
        group = row[start : start + 32]
        absmax = np.float32(max(abs(value) for value in group))
        scales.append(absmax / np.float32(127))
        inverse = np.float32(127) / absmax if absmax else np.float32(0)
        levels += [round(float(np.float32(value * inverse))) for value in group]  # round() ties to even
    return levels, scales


@given(st.integers(0, 2**32 - 1), st.integers(1, 5), st.integers(1, 130), st.floats(-20, 20))
def test_equals_the_scalar_twin(seed: int, rows: int, width: int, exponent: float) -> None:
    rng = np.random.default_rng(seed)
    x = (rng.standard_normal((rows, width)) * 10.0**exponent).astype(np.float32)
    x[rng.random(x.shape) < 0.2] = 0
    levels, scales = quantize_groups(x)
    assert levels.dtype == np.int8
    assert scales.shape == (rows, -(-width // GROUP_SIZE))
    for row in range(rows):
        expected_levels, expected_scales = twin(x[row])
        assert levels[row].tolist() == expected_levels
        np.testing.assert_array_equal(scales[row], np.array(expected_scales, dtype=np.float32))


@given(st.integers(0, 2**32 - 1), st.integers(1, 100))
def test_error_is_at_most_half_a_level(seed: int, width: int) -> None:
    x = np.random.default_rng(seed).standard_normal((3, width)).astype(np.float32)
    _, scales = quantize_groups(x)
    limit = np.repeat(scales, GROUP_SIZE, axis=1)[:, :width] * 0.5001
    assert (np.abs(round_to_groups(x) - x) <= limit).all()


def test_a_row_does_not_see_the_others() -> None:
    x = np.random.default_rng(1).standard_normal((7, 96)).astype(np.float32)
    together = round_to_groups(x)
    for row in range(7):
        np.testing.assert_array_equal(round_to_groups(x[row : row + 1])[0], together[row])


def test_ties_go_to_even() -> None:
    row = np.zeros((1, 32), dtype=np.float32)
    row[0, :5] = (127, 0.5, 1.5, 2.5, -2.5)
    assert quantize_groups(row)[0][0, :5].tolist() == [127, 0, 2, 2, -2]


@pytest.mark.parametrize("value", [0.0, 1e-40])
def test_nothing_and_next_to_nothing_become_zeros(value: float) -> None:
    levels, scales = quantize_groups(np.full((2, 33), value, dtype=np.float32))
    assert not levels.any()
    assert not scales.any()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_fault_stays_visible_in_its_own_group_only(value: float) -> None:
    x = np.ones((2, 64), dtype=np.float32)
    x[0, 3] = value
    levels, scales = quantize_groups(x)
    back = dequantize_groups(levels, scales)
    assert np.isnan(back[0, :32]).all()
    np.testing.assert_array_equal(back[0, 32:], x[0, 32:])
    np.testing.assert_array_equal(back[1], x[1])


def test_no_rows() -> None:
    levels, scales = quantize_groups(np.zeros((0, 40), dtype=np.float32))
    assert levels.shape == (0, 40)
    assert scales.shape == (0, 2)
