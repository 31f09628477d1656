"""Goodput: how many requests per second met all their limits (Zhong et al. 2024, DistServe)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from shoal.metrics.percentiles import percentile
from shoal.metrics.timeline import RequestTimeline


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyLimits:
    """Seconds; None is no limit. ``itl`` bounds the 95th percentile of a request's own gaps."""

    ttft: float | None = None
    itl: float | None = None
    tpot: float | None = None
    total: float | None = None

    def met_by(self, timeline: RequestTimeline) -> bool:
        """Whether a finished request kept all limits. One that gave no token kept none."""
        if timeline.ttft is None or timeline.total is None:
            return False
        gaps = timeline.itl
        found = (
            (self.ttft, timeline.ttft),
            (self.itl, percentile(gaps, 95) if gaps else 0.0),
            (self.tpot, timeline.tpot or 0.0),
            (self.total, timeline.total),
        )
        return all(limit is None or value <= limit for limit, value in found)


def goodput(timelines: Iterable[RequestTimeline], limits: LatencyLimits, seconds: float) -> float:
    """Requests per second that met all limits, over a span of ``seconds`` > 0."""
    if seconds <= 0:
        raise ValueError(f"seconds must be positive, got {seconds}")
    return sum(limits.met_by(timeline) for timeline in timelines) / seconds
