"""8-bit activations: each row is cut into groups of 32 consecutive features, and each group has its own scale.

One scale per row is cheaper, but a single large feature then takes the resolution from all others. A group's scale
depends on that group only, so neither the other rows of the step nor their number can change a row's result.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

GROUP_SIZE = 32
_LEVELS = np.float32(127.0)


def quantize_groups(x: NDArray[np.float32], size: int = GROUP_SIZE) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Quantize ``x`` [rows, width] to int8 [rows, width] and scales [rows, ceil(width / size)], in float32 arithmetic.

    A group's scale is absmax / 127 and its values are round-half-even(x * (127 / absmax)). A group of zeros, or of
    values so small that 127 / absmax is no float32, becomes zeros with scale 0. A group with an infinity or NaN
    becomes zeros with a NaN scale, so that the fault stays visible in the product. The last group may be short.
    """
    rows, width = x.shape
    count = -(-width // size)
    groups = np.zeros((rows, count * size), dtype=np.float32)
    groups[:, :width] = x
    groups = groups.reshape(rows, count, size)
    absmax = np.max(np.abs(groups), axis=2, initial=0.0)
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        inverse = (_LEVELS / absmax).astype(np.float32)
    usable = np.isfinite(absmax) & np.isfinite(inverse)
    scales = np.where(usable, absmax / _LEVELS, np.float32(0.0)).astype(np.float32)
    scales[~np.isfinite(absmax)] = np.nan
    finite_groups = np.where(usable[:, :, None], groups, np.float32(0.0))
    levels = np.rint(finite_groups * np.where(usable, inverse, np.float32(0.0))[:, :, None])
    return levels.astype(np.int8).reshape(rows, count * size)[:, :width], scales


def dequantize_groups(
    levels: NDArray[np.int8], scales: NDArray[np.float32], size: int = GROUP_SIZE
) -> NDArray[np.float32]:
    """The float32 values that ``quantize_groups`` stands for."""
    width = levels.shape[1]
    return levels.astype(np.float32) * np.repeat(scales, size, axis=1)[:, :width]


def round_to_groups(x: NDArray[np.float32], size: int = GROUP_SIZE) -> NDArray[np.float32]:
    """``x`` as a product with 8-bit grouped activations sees it."""
    return dequantize_groups(*quantize_groups(x, size), size)
