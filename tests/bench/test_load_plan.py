"""Arrivals, workloads, reports and charts: pure, so everything is equalities."""

from __future__ import annotations

import random
import statistics
import xml.etree.ElementTree as ET
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.bench.load.arrivals import BURSTY, POISSON, draw_arrivals, read_trace
from shoal.bench.load.chart import draw_sweep
from shoal.bench.load.report import Spread, make_report, timeline_of
from shoal.bench.load.run import LoadRun
from shoal.bench.load.target import Outcome
from shoal.bench.load.workload import CHAT, COMPLETIONS, MadeUp, from_items, made_up
from shoal.errors import ConfigError
from shoal.metrics.goodput import LatencyLimits


@pytest.mark.parametrize(("shape", "variation"), [(POISSON, 1.0), (BURSTY, 2.0), (100.0, 0.1)])
def test_arrivals_have_the_rate_and_the_burstiness(shape: float, variation: float) -> None:
    times = draw_arrivals(20.0, 40_000, shape=shape, seed=1)
    gaps = [after - before for before, after in pairwise(times)]
    assert times[0] == 0
    assert min(gaps) >= 0
    assert statistics.mean(gaps) == pytest.approx(1 / 20, rel=0.05)
    assert statistics.pstdev(gaps) / statistics.mean(gaps) == pytest.approx(variation, rel=0.05)


def test_the_same_seed_gives_the_same_arrivals() -> None:
    assert draw_arrivals(3, 50, seed=4) == draw_arrivals(3, 50, seed=4) != draw_arrivals(3, 50, seed=5)
    assert draw_arrivals(3, 50, seed=4)[:20] == draw_arrivals(3, 20, seed=4)


@pytest.mark.parametrize("wrong", [0, -1, float("nan"), float("inf")])
def test_wrong_rates_are_refused(wrong: float) -> None:
    with pytest.raises(ConfigError, match="rate"):
        draw_arrivals(wrong, 5)
    with pytest.raises(ConfigError, match="burstiness"):
        draw_arrivals(1, 5, shape=wrong)


def test_a_trace_is_sorted_and_begins_at_zero() -> None:
    assert read_trace(["12.5", "", '{"at": 10, "user": 3}', "11"], "f") == (0.0, 1.0, 2.5)
    for bad in ("x", "true", "[1]", '{"when": 1}', "NaN", '"1"'):
        with pytest.raises(ConfigError, match="f, line 2"):
            read_trace(["1", bad], "f")
    with pytest.raises(ConfigError, match="no arrival times"):
        read_trace(["", " "], "f")


@pytest.mark.parametrize("endpoint", [CHAT, COMPLETIONS])
def test_made_up_prompts(endpoint: str) -> None:
    shape = MadeUp(prompt_words=20, output_tokens=7, shared_words=5)
    bodies = made_up(shape, 30, endpoint=endpoint, seed=1)
    texts = [body["prompt"] if endpoint == COMPLETIONS else body["messages"][0]["content"] for body in bodies]
    assert {len(text.split()) for text in texts} == {20}
    assert len({" ".join(text.split()[:5]) for text in texts}) == 1
    assert len({" ".join(text.split()[5:8]) for text in texts}) == 30
    assert {body["max_tokens"] for body in bodies} == {7}
    assert made_up(shape, 10, endpoint=endpoint, seed=1) == bodies[:10]
    assert made_up(shape, 30, endpoint=endpoint, seed=2) != bodies


def test_prompts_of_a_file_fit_the_endpoint() -> None:
    items = [
        {"id": "a", "prompt": "p", "max_tokens": 3},
        {"messages": [{"role": "user", "content": "m"}, {"role": "user", "content": None}]},
    ]
    assert from_items(items, 3, endpoint=CHAT) == [
        {"max_tokens": 3, "messages": [{"role": "user", "content": "p"}]},
        {"messages": items[1]["messages"]},
        {"max_tokens": 3, "messages": [{"role": "user", "content": "p"}]},
    ]
    assert from_items(items, 2, endpoint=COMPLETIONS) == [{"prompt": "p", "max_tokens": 3}, {"prompt": "m\n"}]


def outcome(
    planned: float, events: list[float], tokens: int, *, late: float = 0.0, error: str | None = None
) -> Outcome:
    return Outcome(
        planned,
        sent=planned + late,
        ended=(events or [planned])[-1] + 0.5,
        status=200,
        events=events,
        tokens=tokens,
        prompt_tokens=10,
        cached_tokens=4,
        error=error,
    )


def test_a_report_adds_up() -> None:
    run = LoadRun(
        (
            outcome(100.0, [101.0, 101.5, 102.5], 3),
            outcome(101.0, [104.0, 104.1], 6, late=0.25),
            outcome(102.0, [103.0], 1, error="429 queue_full"),
            outcome(103.0, [], 0, error="timed out"),
        ),
        began=100.0,
        ended=110.0,
    )
    report = make_report(run, asked_rate=1.0, limits=LatencyLimits(ttft=2.0))
    assert (report.requests, report.succeeded) == (4, 2)
    assert report.errors == {"429 queue_full": 1, "timed out": 1}
    assert (report.prompt_tokens, report.cached_tokens, report.output_tokens) == (20, 8, 9)
    assert report.output_tokens_rate == 0.9
    assert report.finished_rate == 0.2
    assert report.sent_rate == 1.0
    assert report.ttft is not None
    assert (report.ttft.mean, report.ttft.most) == (2.0, 3.0)
    assert report.itl is not None
    assert report.itl.most == pytest.approx(1.0)
    assert report.lateness is not None
    assert report.lateness.most == 0.25
    assert report.goodput == 0.1
    assert report.limits == {"ttft": 2.0}
    assert make_report(run).goodput is None
    # Three tokens in 1.5 s after the first; six tokens, told by the usage, in two events 0.1 s apart.
    assert report.tpot is not None
    assert report.tpot.mean == pytest.approx((1.5 / 2 + 0.1 / 5) / 2)


def test_nothing_succeeded() -> None:
    report = make_report(LoadRun((outcome(0.0, [], 0, error="timed out"),), 0.0, 1.0), concurrency=1)
    assert report.ttft is report.itl is report.tpot is report.total is None
    assert report.output_tokens_rate == 0
    assert "<svg" in draw_sweep([report], ["1"], title="t", note="n")


@settings(max_examples=50)
@given(st.lists(st.floats(0, 1e3), min_size=1, max_size=40), st.integers(0, 30))
def test_a_timeline_has_all_tokens(gaps: list[float], more: int) -> None:
    events = [sum(gaps[: index + 1]) for index in range(len(gaps))]
    line = timeline_of(outcome(0.0, events, len(events) + more))
    assert sum(count for _, count in line.token_times[0]) == len(events) + more
    assert line.ttft == events[0]
    assert len(line.itl) == len(events) - 1


def test_a_spread_of_nothing_is_none() -> None:
    assert Spread.of([]) is None
    spread = Spread.of(range(101))
    assert spread is not None
    assert (spread.p50, spread.p90, spread.p99, spread.most) == (50, 90, 99, 100)


def test_a_chart_is_a_picture_with_every_load() -> None:
    generator = random.Random(0)
    reports = []
    for number in range(1, 5):
        outcomes = [
            outcome(0.0, [1.0 + 0.01 * number * step for step in range(5)], 5 + generator.randrange(9))
            for _ in range(9)
        ]
        reports.append(make_report(LoadRun(tuple(outcomes), 0.0, 5.0 / number), concurrency=number))
    picture = draw_sweep(reports, ["one", "two", "<three>", "four"], title="a & b", note="n")
    root = ET.fromstring(picture)
    texts = [item.text for item in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"one", "two", "<three>", "four", "a & b"} <= set(texts)
    assert len(list(root.iter("{http://www.w3.org/2000/svg}circle"))) == 8
    for circle in root.iter("{http://www.w3.org/2000/svg}circle"):
        assert 0 <= float(circle.attrib["cx"]) <= 760
        assert 0 <= float(circle.attrib["cy"]) <= 420
