"""Percentiles with linear interpolation between the two nearest values."""

from __future__ import annotations

from collections.abc import Iterable


def percentile(values: Iterable[float], rank: float) -> float:
    """The value below which ``rank`` percent lie.

    Rank r of n sorted values stands at position r / 100 * (n - 1), interpolated (the "inclusive" method, which is
    NumPy's default). ValueError for no values or a rank outside [0, 100].
    """
    if not 0 <= rank <= 100:
        raise ValueError(f"rank must be in [0, 100], got {rank}")
    ordered = sorted(values)
    if not ordered:
        raise ValueError("there are no values")
    position = rank / 100 * (len(ordered) - 1)
    below = int(position)
    if below + 1 == len(ordered):
        return ordered[-1]
    return ordered[below] + (position - below) * (ordered[below + 1] - ordered[below])
