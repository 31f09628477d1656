"""Weights rounded once more at load: to four bits in groups of 32, or to eight bits with one scale per row.

Both are round-to-nearest, without calibration. A group of four bits is asymmetric, because symmetric ones cost this
class of models a quarter of their perplexity; its scale and minimum are kept in half precision, so that rounding what
already is such a group gives the same group again.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shoal.kernels.activation_groups import round_to_groups

GROUP_SIZE = 32
_LARGEST_HALF = np.float32(65504.0)


def round_to_rows(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """``values`` [rows, features] as 8 bits with one scale per row stand for them."""
    return round_to_groups(values, values.shape[1])


def round_to_four_bits(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """``values`` [rows, features], features a multiple of 32, as 4-bit groups stand for them."""
    rows, features = values.shape
    groups = values.reshape(rows, features // GROUP_SIZE, GROUP_SIZE)
    least = _to_half(groups.min(axis=2, keepdims=True))
    scale = _to_half((groups.max(axis=2, keepdims=True) - least) / np.float32(15.0))
    with np.errstate(divide="ignore"):
        inverse = np.where(scale > 0, np.float32(1.0) / scale, np.float32(0.0))
    levels = np.clip(np.rint((groups - least) * inverse), np.float32(0.0), np.float32(15.0))
    rounded: NDArray[np.float32] = (scale * levels + least).astype(np.float32)
    return rounded.reshape(rows, features)


def _to_half(values: NDArray[np.float32]) -> NDArray[np.float32]:
    return np.clip(values, -_LARGEST_HALF, _LARGEST_HALF).astype(np.float16).astype(np.float32)
