"""Percentiles, timelines and goodput by hand and against the standard library."""

from __future__ import annotations

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.metrics.goodput import LatencyLimits, goodput
from shoal.metrics.percentiles import percentile
from shoal.metrics.timeline import RequestTimeline

VALUES = st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=50)


@given(VALUES)
def test_percentiles_equal_the_inclusive_quantiles(values: list[float]) -> None:
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    for rank in (1, 25, 50, 95, 99):
        assert percentile(values, rank) == pytest.approx(cuts[rank - 1], rel=1e-9, abs=1e-6)
    assert percentile(values, 0) == min(values)
    assert percentile(values, 100) == max(values)


def test_percentiles_of_nothing_and_of_impossible_ranks() -> None:
    assert percentile([3.0], 99) == 3.0
    with pytest.raises(ValueError, match="no values"):
        percentile([], 50)
    for rank in (-1, 101, float("nan")):
        with pytest.raises(ValueError, match="rank"):
            percentile([1.0], rank)


def timeline() -> RequestTimeline:
    found = RequestTimeline(10.0)
    found.admit(10.5)
    found.admit(99.0)
    for at in (11.0, 11.5, 12.5):
        found.add_token(0, at)
    found.add_token(1, 11.25, 3)
    found.finish(13.0)
    return found


def test_a_timeline() -> None:
    found = timeline()
    assert (found.queue_time, found.ttft, found.total) == (0.5, 1.0, 3.0)
    assert found.itl == (0.5, 1.0)
    # Completion 0: 1.5 s for two further tokens; completion 1: all three at once.
    assert found.tpot == pytest.approx((0.75 + 0.0) / 2)


def test_an_empty_timeline_has_no_numbers() -> None:
    found = RequestTimeline(1.0)
    assert (found.queue_time, found.ttft, found.total, found.tpot, found.itl) == (None, None, None, None, ())


@pytest.mark.parametrize(
    ("limits", "met"),
    [
        (LatencyLimits(), True),
        (LatencyLimits(ttft=1.0, itl=1.0, tpot=0.4, total=3.0), True),
        (LatencyLimits(ttft=0.9), False),
        (LatencyLimits(itl=0.9), False),
        (LatencyLimits(tpot=0.3), False),
        (LatencyLimits(total=2.9), False),
    ],
)
def test_goodput_counts_what_met_all_limits(limits: LatencyLimits, met: bool) -> None:
    assert limits.met_by(timeline()) is met
    assert goodput([timeline(), timeline(), RequestTimeline(0.0)], limits, 4.0) == (0.5 if met else 0.0)


def test_goodput_over_no_time_is_an_error() -> None:
    with pytest.raises(ValueError, match="seconds"):
        goodput([], LatencyLimits(), 0.0)
