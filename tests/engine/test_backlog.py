"""Predicted waits against what a scheduler does."""

from __future__ import annotations

import pytest
from engine_support import make_request
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.core.plan import CacheShape, EntryResult, StepPlan, StepResult
from shoal.core.request import Request
from shoal.core.scheduler import Scheduler, SchedulerConfig
from shoal.engine.backlog import Backlog, Pace

ROWS = 64


def pace(slots: int) -> Pace:
    return Pace(slots=slots, rows=ROWS, step_seconds=0.5)


def played(requests: list[Request], slots: int) -> tuple[Scheduler, Backlog]:
    scheduler = Scheduler(SchedulerConfig(max_num_seqs=slots, token_budget=ROWS), CacheShape(4096, 16, 1, 1, 16, "f32"))
    backlog = Backlog()
    for request in requests:
        scheduler.add(request, 0.0)
        backlog.add(request)
    return scheduler, backlog


def step(scheduler: Scheduler, backlog: Backlog) -> StepPlan:
    plan = scheduler.schedule(0.0)
    result = StepResult(tuple(EntryResult((7,) if entry.samples else ()) for entry in plan.entries))
    for delta in scheduler.commit(plan, result):
        backlog.progress(delta.request_id, delta.index, len(delta.token_ids), ended=delta.finish is not None)
    return plan


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=40),
    slots=st.integers(1, 8),
    before=st.integers(0, 30),
)
def test_the_wait_is_what_the_scheduler_makes_of_it(lengths: list[int], slots: int, before: int) -> None:
    """For lengths that are known, from any point in the course of things."""
    requests = [make_request(f"r{number}", max_tokens=length, ignore_eos=True) for number, length in enumerate(lengths)]
    scheduler, backlog = played(requests, slots)
    for _ in range(before):
        if scheduler.has_work():
            step(scheduler, backlog)
    predicted = backlog.wait(pace(slots), 0)
    newcomer = make_request("new", max_tokens=1, ignore_eos=True)
    scheduler.add(newcomer, 0.0)
    backlog.add(newcomer)
    steps = 0
    while not any(entry.request.request_id == "new" for entry in step(scheduler, backlog).entries):
        steps += 1
    # A place that gets free in one step is taken in the next, and each prompt costs a row of a step.
    assert predicted / 0.5 == pytest.approx(steps, abs=1.5 + len(lengths) / ROWS)
    while scheduler.has_work():
        step(scheduler, backlog)
    assert len(backlog) == 0


def test_nobody_waits_while_there_are_places() -> None:
    backlog = Backlog()
    backlog.add(make_request("a", max_tokens=100, n=3))
    assert backlog.wait(pace(4), 0) == 0
    assert backlog.wait(pace(3), 0) == pytest.approx(50 + 0.5 / ROWS)


def test_lower_priorities_do_not_count() -> None:
    backlog = Backlog()
    backlog.add(make_request("a", max_tokens=100))
    assert backlog.wait(pace(1), 1) == 0
    assert backlog.wait(pace(1), 0) > 0


def test_open_ends_are_as_long_as_those_that_ended_lately() -> None:
    backlog = Backlog()
    for number in range(200):
        backlog.add(make_request(f"r{number}", max_tokens=10_000))
        backlog.progress(f"r{number}", 0, 20, ended=True)
    backlog.add(make_request("long", max_tokens=10_000))
    assert backlog.wait(pace(1), 0) == pytest.approx(10, rel=0.02)
    backlog.progress("long", 0, 300, ended=False)
    assert backlog.wait(pace(1), 0) == pytest.approx(10, rel=0.02)
    backlog.progress("long", 0, 9_690, ended=False)
    assert backlog.wait(pace(1), 0) == pytest.approx(5, rel=0.02)


def test_what_was_given_up_is_forgotten_and_teaches_nothing() -> None:
    backlog = Backlog()
    backlog.add(make_request("a", max_tokens=100, n=2))
    backlog.progress("a", 0, 1, ended=False)
    backlog.drop("a", 2)
    backlog.progress("a", 1, 5, ended=True)
    assert len(backlog) == 0
    backlog.add(make_request("b", max_tokens=10_000))
    assert backlog.wait(pace(1), 0) == pytest.approx(128, rel=0.01)


def test_room_in_the_queue_comes_when_enough_have_begun() -> None:
    backlog = Backlog()
    for number in range(6):
        backlog.add(make_request(f"r{number}", max_tokens=10))
    # One runs, five wait, and five may: the next has room when the second begins, after the first's ten steps.
    assert backlog.room(pace(1), 5, 1) == pytest.approx(5, abs=0.1)
    assert backlog.room(pace(1), 5, 2) == pytest.approx(10, abs=0.1)
    assert backlog.room(pace(1), 6, 1) == pytest.approx(0, abs=0.1)


def test_what_a_tenant_has_waiting() -> None:
    backlog = Backlog()
    backlog.add(make_request("a", max_tokens=10, n=3))
    assert (backlog.waiting(""), backlog.waiting("other")) == (3, 0)
    backlog.progress("a", 1, 1, ended=False)
    assert backlog.waiting("") == 2
