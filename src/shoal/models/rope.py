"""Frequencies of rotary position embeddings (Su et al. 2021) and how files scale them for longer contexts.

The base frequencies are base^(-2i/d). Linear scaling (Chen et al. 2023) divides them all by one factor; Llama 3's
scaling arrives as one factor per frequency, computed by whoever made the file.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def inverse_frequencies(
    base: float, rotary_dim: int, *, linear_factor: float = 1.0, factors: NDArray[np.float32] | None = None
) -> NDArray[np.float32]:
    """float32 [rotary_dim / 2], computed in float64.

    linear_factor: positions are compressed by it. factors: float32 [rotary_dim / 2], each divides its frequency.
    """
    exponents = np.arange(0, rotary_dim, 2, dtype=np.float64) / rotary_dim
    frequencies = base**-exponents / linear_factor
    if factors is not None:
        frequencies = frequencies / factors.astype(np.float64)
    # Too large for float32 becomes infinite, which the caller looks for.
    with np.errstate(over="ignore"):
        return frequencies.astype(np.float32)
