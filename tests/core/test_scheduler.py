"""What the scheduling rules say, one at a time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from core_support import BLOCK, answer, drain, make_request, make_scheduler, served, step

from shoal.core.errors import InternalError
from shoal.core.plan import EntryResult, StepResult
from shoal.core.policy import POLICIES
from shoal.core.request import FinishReason, Request
from shoal.core.scheduler import Scheduler, SchedulerConfig
from shoal.core.sequence import TRANSITIONS, Sequence, State
from shoal.errors import ConfigError, InvalidRequestError, QueueFullError


def test_decodes_come_first_then_chunks_then_admissions_in_one_budget() -> None:
    scheduler = make_scheduler(token_budget=10)
    scheduler.add(make_request("a", [1, 2, 3]), 0.0)
    assert served(step(scheduler)[0]) == [("a.0", 0, 3)]
    scheduler.add(make_request("b", list(range(20))), 0.0)
    scheduler.add(make_request("c", [7, 8]), 0.0)
    assert served(step(scheduler)[0]) == [("a.0", 3, 1), ("b.0", 0, 9)]
    assert served(step(scheduler)[0]) == [("a.0", 4, 1), ("b.0", 9, 9)]
    assert served(step(scheduler)[0]) == [("a.0", 5, 1), ("b.0", 18, 2), ("c.0", 0, 2)]


def test_a_chunk_samples_only_at_its_end() -> None:
    scheduler = make_scheduler(token_budget=4)
    scheduler.add(make_request("a", list(range(6))), 0.0)
    assert [entry.samples for entry in step(scheduler)[0].entries] == [False]
    assert [entry.samples for entry in step(scheduler)[0].entries] == [True]


def test_the_block_table_is_the_same_object_until_a_block_is_added() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", [1, 2, 3], max_tokens=10), 0.0)
    tables = [step(scheduler)[0].entries[0].block_table for _ in range(7)]
    assert tables[1] is tables[0]
    assert len(tables[2]) == 2
    assert tables[2] is tables[3] is tables[4] is tables[5]
    assert len(tables[6]) == 3


def test_the_youngest_is_preempted_and_recomputed() -> None:
    scheduler = make_scheduler(blocks=4, prefix_caching=False)
    for name in ("a", "b"):
        scheduler.add(make_request(name, list(range(7)), max_tokens=9), 0.0)
    step(scheduler)
    step(scheduler)
    plan, _ = step(scheduler)
    assert plan.preempted == (1,)
    assert served(plan) == [("a.0", 8, 1)]
    assert scheduler.stats().preemptions == 1
    plans = drain(scheduler)
    again = next(plan for plan in plans if any(entry.seq_id == 1 for entry in plan.entries))
    # The prompt and what had been generated, from the start.
    assert [item for item in served(again) if item[0] == "b.0"] == [("b.0", 0, 9)]


def test_nobody_is_admitted_in_a_step_that_preempted() -> None:
    scheduler = make_scheduler(blocks=4, prefix_caching=False)
    for name in ("a", "b"):
        scheduler.add(make_request(name, list(range(7)), max_tokens=9), 0.0)
    step(scheduler)
    step(scheduler)
    scheduler.add(make_request("c", [1], max_tokens=1), 0.0)
    assert served(step(scheduler)[0]) == [("a.0", 8, 1)]


def test_admissions_leave_the_watermark_free_for_those_running() -> None:
    scheduler = make_scheduler(blocks=10, watermark=0.2)
    scheduler.add(make_request("a", list(range(16))), 0.0)
    scheduler.add(make_request("b", list(range(20, 36))), 0.0)
    scheduler.add(make_request("c", [1]), 0.0)
    assert [name for name, _, _ in served(step(scheduler)[0])] == ["a.0", "b.0"]


def test_equal_prefixes_are_computed_once_but_never_to_the_last_token() -> None:
    scheduler = make_scheduler()
    prompt = list(range(12))
    scheduler.add(make_request("a", prompt, max_tokens=1), 0.0)
    drain(scheduler)
    scheduler.add(make_request("b", prompt, max_tokens=1), 0.0)
    assert served(step(scheduler)[0]) == [("b.0", 8, 4)]
    assert scheduler.stats().prefix_hit_tokens == 8


def test_generated_tokens_are_found_again_too() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", [1, 2, 3], max_tokens=6), 0.0)
    drain(scheduler)
    scheduler.add(make_request("b", [1, 2, 3, 0, 0, 0, 0, 0, 0], max_tokens=1), 0.0)
    assert served(step(scheduler)[0]) == [("b.0", 8, 1)]


@pytest.mark.parametrize(("salts", "start"), [((None, None), 8), (("x", "x"), 8), (("x", "y"), 0), ((None, "x"), 0)])
def test_salts_keep_prefixes_apart(salts: tuple[str | None, str | None], start: int) -> None:
    scheduler = make_scheduler()
    for name, salt in zip("ab", salts, strict=True):
        scheduler.add(make_request(name, list(range(12)), max_tokens=1, cache_salt=salt), 0.0)
        plan = step(scheduler)[0]
    assert served(plan) == [("b.0", start, 12 - start)]


@pytest.mark.parametrize("caching", [True, False])
def test_n_completions_share_the_prompt(caching: bool) -> None:
    scheduler = make_scheduler(prefix_caching=caching)
    scheduler.add(make_request("a", list(range(10)), n=3, max_tokens=2), 0.0)
    scheduler.add(make_request("b", [1], max_tokens=3), 0.0)
    # The first computes the prompt; the others wait for it without holding up anybody else.
    assert served(step(scheduler)[0]) == [("a.0", 0, 10), ("b.0", 0, 1)]
    assert served(step(scheduler)[0]) == [("a.0", 10, 1), ("b.0", 1, 1), ("a.1", 8, 2), ("a.2", 8, 2)]
    drain(scheduler)
    scheduler.add(make_request("c", list(range(10)), max_tokens=1), 0.0)
    assert served(step(scheduler)[0]) == [("c.0", 8 if caching else 0, 2 if caching else 10)]


def test_completions_go_on_when_the_first_fails() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", list(range(10)), n=2, max_tokens=2), 0.0)
    plan = scheduler.schedule(0.0)
    (delta,) = scheduler.commit(plan, StepResult((EntryResult(error="broken"),)))
    assert (delta.index, delta.finish, delta.error) == (0, FinishReason.ERROR, "broken")
    assert served(step(scheduler)[0]) == [("a.1", 0, 10)]
    drain(scheduler)


def test_priority_displaces_what_is_lower_and_only_that() -> None:
    scheduler = make_scheduler(policy="priority", max_num_seqs=2)
    scheduler.add(make_request("low", [1], max_tokens=9, priority=-1), 0.0)
    scheduler.add(make_request("mid", [2], max_tokens=9), 0.0)
    step(scheduler)
    scheduler.add(make_request("equal", [3], max_tokens=9, priority=-1), 0.0)
    assert step(scheduler)[0].preempted == ()
    scheduler.add(make_request("high", [4], max_tokens=9, priority=1), 0.0)
    plan = scheduler.schedule(0.0)
    assert plan.preempted == (0,)
    scheduler.commit(plan, answer(plan))
    assert [name for name, _, _ in served(step(scheduler)[0])] == ["mid.0", "high.0"]
    drain(scheduler)


def test_a_lone_running_sequence_can_be_displaced() -> None:
    scheduler = make_scheduler(policy="priority", max_num_seqs=1)
    scheduler.add(make_request("low", [1], max_tokens=9), 0.0)
    step(scheduler)
    scheduler.add(make_request("high", [2], max_tokens=9, priority=5), 0.0)
    assert served(step(scheduler)[0]) == [("high.0", 0, 1)]
    drain(scheduler)


def test_nobody_is_displaced_for_nothing() -> None:
    scheduler = make_scheduler(policy="priority", blocks=8)
    shared = list(range(16))
    scheduler.add(make_request("high", shared, max_tokens=9, priority=2), 0.0)
    step(scheduler)
    scheduler.add(make_request("low", shared, max_tokens=9, priority=-1), 0.0)
    step(scheduler)
    # What low holds is mostly high's too: preempting it would not make the room that is needed.
    scheduler.add(make_request("mid", [99] * 20, max_tokens=1), 0.0)
    assert step(scheduler)[0].preempted == ()
    drain(scheduler)


def order_of_service(scheduler: Scheduler, arrivals: dict[int, list[Request]], steps: int) -> list[str]:
    """The order in which requests end; arrivals by step, which takes a second."""
    ended = []
    for time in range(steps):
        for request in arrivals.get(time, ()):
            scheduler.add(request, float(time))
        if scheduler.has_work():
            ended += [delta.request_id for delta in step(scheduler)[1] if delta.finish is not None]
    return ended


@pytest.mark.parametrize(("ageing", "waited"), [(5.0, 10), (20.0, 40), (None, None)])
def test_low_priority_is_starved_only_where_ageing_is_off(ageing: float | None, waited: int | None) -> None:
    """A request of high priority every second would fill the one place for ever."""
    scheduler = make_scheduler(policy="priority", max_num_seqs=1, priority_ageing=ageing)
    arrivals = {time: [make_request(f"high{time}", [1], max_tokens=1, priority=2)] for time in range(100)}
    arrivals[0].append(make_request("low", [2], max_tokens=1))
    order = order_of_service(scheduler, arrivals, 100)
    assert len(order) == 100
    assert ("low" in order) == (waited is not None)
    if waited is not None:
        assert abs(order.index("low") - waited) <= 1  # two levels above it, each worth ``ageing`` seconds


def test_who_has_aged_past_a_priority_is_not_displaced_by_it() -> None:
    scheduler = make_scheduler(policy="priority", max_num_seqs=1, priority_ageing=5.0)
    scheduler.add(make_request("low", [1], max_tokens=9), 0.0)
    step(scheduler)
    scheduler.add(make_request("late", [2], max_tokens=1, priority=1), 6.0)
    assert step(scheduler)[0].preempted == ()
    scheduler.add(make_request("higher", [3], max_tokens=1, priority=2), 6.0)
    assert [served(step(scheduler)[0])[0][0] for _ in range(2)] == ["higher.0", "low.0"]
    drain(scheduler)


def test_an_old_request_takes_nobody_s_place_of_equal_or_higher_priority() -> None:
    scheduler = make_scheduler(policy="priority", max_num_seqs=1, priority_ageing=1.0)
    scheduler.add(make_request("running", [1], max_tokens=9, priority=1), 50.0)
    step(scheduler)
    for priority in (0, 1):
        scheduler.add(make_request(f"old{priority}", [2], max_tokens=1, priority=priority), 0.0)
    assert step(scheduler)[0].preempted == ()
    drain(scheduler)


def test_several_tokens_of_one_step_are_taken_in_order() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", [1], max_tokens=5, stop_ids=[9]), 0.0)
    plan = scheduler.schedule(0.0)
    (delta,) = scheduler.commit(plan, StepResult((EntryResult((5, 6)),)))
    assert (delta.token_ids, delta.finish) == ((5, 6), None)
    plan = scheduler.schedule(0.0)
    assert plan.entries[0].token_ids == (5, 6)
    (delta,) = scheduler.commit(plan, StepResult((EntryResult((7, 9, 8)),)))
    assert (delta.token_ids, delta.finish) == ((7, 9), FinishReason.STOP)
    drain(scheduler)


def test_deadlines_come_in_order_and_before_none() -> None:
    scheduler = make_scheduler(policy="deadline")
    for name, deadline in (("never", None), ("late", 9.0), ("soon", 2.0)):
        scheduler.add(make_request(name, [1], deadline=deadline), 0.0)
    assert [name for name, _, _ in served(step(scheduler)[0])] == ["soon.0", "late.0", "never.0"]


def test_a_static_batch_is_filled_once_and_kept_to_the_end() -> None:
    scheduler = make_scheduler(policy="static", max_num_seqs=2, token_budget=4)
    scheduler.add(make_request("a", [1, 2, 3], max_tokens=1), 0.0)
    scheduler.add(make_request("b", [4, 5, 6], max_tokens=4), 0.0)
    scheduler.add(make_request("c", [7], max_tokens=1), 0.0)
    assert served(step(scheduler)[0]) == [("a.0", 0, 3), ("b.0", 0, 1)]
    held = scheduler.stats().used_blocks
    plans = [step(scheduler)[0] for _ in range(4)]
    assert [name for plan in plans for name, _, _ in served(plan)] == ["b.0"] * 4
    assert held == 2  # a's block too, although a is done
    assert served(step(scheduler)[0]) == [("c.0", 0, 1)]
    drain(scheduler)


def test_a_stop_token_ends_a_completion_but_not_before_min_tokens() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", [1], max_tokens=9, stop_ids=[5], min_tokens=2), 0.0)
    assert [step(scheduler, token=5)[1][0].finish for _ in range(3)] == [None, None, FinishReason.STOP]


def test_the_history_is_there_for_penalties_only() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", [1, 2], presence_penalty=0.5), 0.0)
    scheduler.add(make_request("b", [3, 4]), 0.0)
    step(scheduler, token=9)
    assert [entry.history for entry in step(scheduler)[0].entries] == [(1, 2, 9), ()]


def test_what_ended_meanwhile_is_passed_over_in_commit() -> None:
    scheduler = make_scheduler()
    for name in "abc":
        scheduler.add(make_request(name, [1]), 0.0)
    plan = scheduler.schedule(0.0)
    (gone,) = scheduler.abort("a")
    assert gone.finish is FinishReason.ABORT
    scheduler.finish(1, FinishReason.STOP)
    assert [delta.request_id for delta in scheduler.commit(plan, answer(plan))] == ["c"]
    assert scheduler.abort("a") == ()
    scheduler.finish(99, FinishReason.STOP)
    drain(scheduler)


def test_what_can_never_run_is_refused() -> None:
    scheduler = make_scheduler(blocks=2, max_waiting=2)
    with pytest.raises(InvalidRequestError, match="prompt: must hold at least one token"):
        scheduler.add(make_request("a", []), 0.0)
    with pytest.raises(InvalidRequestError, match="9 tokens can never fit the KV cache of 8"):
        scheduler.add(make_request("a", [1] * 6), 0.0)
    scheduler.add(make_request("a", [1] * 5), 0.0)  # the last token needs no place
    with pytest.raises(InvalidRequestError, match="'a' is in use"):
        scheduler.add(make_request("a", [1]), 0.0)
    with pytest.raises(QueueFullError):
        scheduler.add(make_request("b", [1], n=2), 0.0)
    with pytest.raises(InvalidRequestError, match="n: the queue holds 2 completions, got 3"):
        scheduler.add(make_request("c", [1], n=3), 0.0)
    drain(scheduler)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_num_seqs", 0),
        ("token_budget", True),
        ("priority_ageing", 0.0),
        ("priority_ageing", float("inf")),
        ("policy", "lifo"),
        ("watermark", 1.0),
        ("watermark", "x"),
        ("prefix_caching", "no"),
    ],
)
def test_wrong_options_are_named(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=field):
        SchedulerConfig(**{field: value})  # type: ignore[arg-type]


def test_every_state_changes_along_the_table_only() -> None:
    for before in State:
        for after in State:
            sequence = Sequence(0, make_request("a", [1]), 0, (0.0,), None, True, [1], 1, state=before)
            if after in TRANSITIONS[before]:
                sequence.move_to(after)
            else:
                with pytest.raises(InternalError):
                    sequence.move_to(after)


def test_a_result_of_the_wrong_length_is_an_internal_error() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", [1]), 0.0)
    plan = scheduler.schedule(0.0)
    with pytest.raises(InternalError):
        scheduler.commit(plan, StepResult(()))


def test_a_backend_that_gives_no_token_fails_that_sequence_only() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", [1]), 0.0)
    scheduler.add(make_request("b", [2]), 0.0)
    plan = scheduler.schedule(0.0)
    deltas = scheduler.commit(plan, StepResult((EntryResult(), EntryResult((3,)))))
    assert [(delta.request_id, delta.finish) for delta in deltas] == [("a", FinishReason.ERROR), ("b", None)]
    drain(scheduler)


def test_a_head_that_does_not_fit_is_tried_again_when_room_is_made() -> None:
    scheduler = make_scheduler(blocks=6, prefix_caching=False)
    scheduler.add(make_request("a", [1] * 12, max_tokens=3), 0.0)
    scheduler.add(make_request("b", [2] * 16, max_tokens=2), 0.0)
    assert [name for _ in range(3) for name, _, _ in served(step(scheduler)[0])] == ["a.0"] * 3
    assert served(step(scheduler)[0]) == [("b.0", 0, 16)]
    drain(scheduler)


def test_waste_counts_the_empty_places() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", [1], max_tokens=4), 0.0)
    drain(scheduler)
    # One block over four steps, holding 1, 2, 3 and 4 tokens.
    assert scheduler.stats().waste == pytest.approx((3 + 2 + 1 + 0) / (4 * BLOCK))
    assert scheduler.stats().peak_blocks == 1


TRACES = Path(__file__).parent / "plan_traces.json"


def trace(policy: str) -> list[list[object]]:
    """Plans of one small workload that meets every rule: chunks, preemption, sharing, displacement."""
    scheduler = make_scheduler(blocks=12, policy=policy, max_num_seqs=4, token_budget=12)
    arrivals = {
        0: [("a", list(range(10)), 6, 0, 30.0), ("b", list(range(10)), 12, 0, None)],
        1: [("c", [5] * 14, 8, -1, 9.0)],
        3: [("d", [6, 7, 8], 10, 2, 5.0), ("e", list(range(9)), 3, 0, 40.0)],
    }
    plans: list[list[object]] = []
    for time in range(200):
        for name, prompt, max_tokens, priority, deadline in arrivals.get(time, ()):
            request = make_request(name, prompt, max_tokens, priority=priority, deadline=deadline, n=1 + (name == "a"))
            scheduler.add(request, float(time))
        if not scheduler.has_work():
            break
        plan, _ = step(scheduler)
        plans.append([[list(item) for item in served(plan)], list(plan.preempted)])
    assert scheduler.stats().used_blocks == 0
    return plans


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_plans_are_those_on_record(policy: str) -> None:
    """To record anew after a change that is meant: python tests/core/test_scheduler.py"""
    recorded = json.loads(TRACES.read_text(encoding="utf-8"))[policy]
    assert trace(policy) == recorded
    assert trace(policy) == trace(policy)


if __name__ == "__main__":
    lines = ",\n".join(f'"{policy}": {json.dumps(trace(policy))}' for policy in sorted(POLICIES))
    TRACES.write_text("{" + lines + "}\n", encoding="utf-8")
