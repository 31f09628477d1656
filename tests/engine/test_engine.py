"""The step loop without a thread: every step is made by the test, every step is checked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from engine_support import EOS, Recorder, make_engine, make_request, run_until_idle, text_of
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.backends.null import Fault
from shoal.core.request import FinishReason, Request
from shoal.engine.engine import Engine
from shoal.engine.messages import Chunk, Submit
from shoal.errors import EngineClosedError, EngineDeadError, QueueFullError

STOP, LENGTH, ABORT, ERROR = FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT, FinishReason.ERROR


def submit(engine: Engine, outbox: Recorder, *requests: Request) -> None:
    for request in requests:
        engine.inbox.submit(Submit(request, outbox, engine.clock()))


def alone(request: Request, **options: Any) -> list[tuple[tuple[int, ...], str, FinishReason | None]]:
    engine = make_engine(**options)
    outbox = Recorder()
    submit(engine, outbox, request)
    run_until_idle(engine)
    return [outbox.result(request.request_id, index) for index in range(request.params.n)]


def test_a_batch_gives_what_each_request_gives_alone() -> None:
    requests = [make_request(f"r{i}", prompt=range(1, 2 + 7 * i), max_tokens=3 + i, seed=i) for i in range(12)]
    engine = make_engine(token_budget=16, max_num_seqs=5)
    outbox = Recorder()
    submit(engine, outbox, *requests)
    run_until_idle(engine)
    for request in requests:
        assert [outbox.result(request.request_id, 0)] == alone(request)
        assert outbox.timelines[request.request_id] is not None


def test_one_call_per_step_and_outbox() -> None:
    engine = make_engine()
    one, other = Recorder(), Recorder()
    submit(engine, one, *(make_request(f"a{i}", max_tokens=4) for i in range(5)))
    submit(engine, other, *(make_request(f"b{i}", max_tokens=4) for i in range(5)))
    engine.step()
    assert (one.calls, other.calls) == (1, 1)
    run_until_idle(engine)
    assert (one.calls, other.calls) == (4, 4)


def test_preempted_requests_give_what_they_give_alone() -> None:
    requests = [make_request(f"r{i}", prompt=range(1, 31), max_tokens=60, seed=i, salt=str(i)) for i in range(4)]
    engine = make_engine(blocks=10)
    outbox = Recorder()
    submit(engine, outbox, *requests)
    run_until_idle(engine)
    assert engine.stats.scheduler.preemptions > 0
    for request in requests:
        assert [outbox.result(request.request_id, 0)] == alone(request)


def test_what_was_taken_in_is_not_refused_when_a_preemption_fills_the_queue() -> None:
    """During every step the queue is filled up as far as the door knows; in some of them it becomes longer."""
    requests = [make_request(f"r{i}", prompt=range(1, 31), max_tokens=60, seed=i, salt=str(i)) for i in range(20)]
    later, outbox = list(requests), Recorder()

    def fill(_: int) -> None:
        while later:
            try:
                submit(engine, outbox, later[0])
            except QueueFullError:
                return
            del later[0]

    engine = make_engine(blocks=12, max_waiting=2, on_step=fill)
    fill(0)
    run_until_idle(engine)
    assert engine.stats.scheduler.preemptions > 0
    for request in requests:
        assert [outbox.result(request.request_id, 0)] == alone(request)


@pytest.mark.parametrize("kind", ["error", "raise", "raise_step", "nan"])
@pytest.mark.parametrize("after", [0, 3])
def test_only_the_guilty_fails(kind: Any, after: int) -> None:
    requests = [make_request(f"r{i}", max_tokens=8, seed=i) for i in range(6)]
    engine = make_engine(faults=(Fault(request_id="r2", kind=kind, after=after),))
    outbox = Recorder()
    submit(engine, outbox, *requests)
    run_until_idle(engine)
    for request in requests:
        if request.request_id == "r2":
            tokens, _, finish = outbox.result("r2", 0)
            assert (len(tokens), finish) == (after, ERROR)
            assert ("no numbers" if kind == "nan" else "scripted fault") in (outbox.errors["r2"] or "")
        else:
            assert [outbox.result(request.request_id, 0)] == alone(request)


@pytest.mark.parametrize("count", [1, 3])
def test_a_transient_exception_costs_nobody_anything(count: int) -> None:
    requests = [make_request(f"r{i}", max_tokens=8, seed=i) for i in range(count)]
    engine = make_engine(faults=(Fault(request_id="r0", kind="raise", after=2, times=1),))
    outbox = Recorder()
    submit(engine, outbox, *requests)
    run_until_idle(engine)
    for request in requests:
        assert [outbox.result(request.request_id, 0)] == alone(request)


def test_when_all_fail_the_engine_lives_on() -> None:
    faults = tuple(Fault(request_id=f"r{i}", kind="raise_step") for i in range(3))
    engine = make_engine(faults=faults)
    outbox = Recorder()
    submit(engine, outbox, *(make_request(f"r{i}") for i in range(3)))
    run_until_idle(engine)
    assert [outbox.result(f"r{i}", 0)[2] for i in range(3)] == [ERROR] * 3
    submit(engine, outbox, make_request("later", max_tokens=5))
    run_until_idle(engine)
    assert [outbox.result("later", 0)] == alone(make_request("later", max_tokens=5))


def test_one_failing_completion_of_several_ends_the_request_with_all_its_chunks() -> None:
    engine = make_engine(faults=(Fault(request_id="r", kind="error", after=2, times=1),))
    outbox = Recorder()
    submit(engine, outbox, make_request("r", n=3, max_tokens=5))
    run_until_idle(engine)
    finishes = [outbox.result("r", index)[2] for index in range(3)]
    assert ERROR in finishes
    assert None not in finishes
    assert outbox.timelines["r"] is not None


def test_a_backend_that_gives_too_few_results_fails_the_requests_only() -> None:
    engine = make_engine()
    outbox = Recorder()
    submit(engine, outbox, make_request("r"))
    execute = engine._backend.execute
    engine._backend.execute = lambda plan: execute(plan)._replace(entries=())  # type: ignore[method-assign]
    run_until_idle(engine)
    assert outbox.result("r", 0)[2] is ERROR
    assert "0 results for 1 entries" in (outbox.errors["r"] or "")


def test_a_request_that_the_scheduler_refuses_fails_alone() -> None:
    engine = make_engine()
    outbox = Recorder()
    submit(engine, outbox, make_request("twin", max_tokens=3), make_request("fine", max_tokens=3))
    engine.step()
    submit(engine, outbox, make_request("huge", prompt=[1] * 30, max_tokens=10**6))
    run_until_idle(engine)
    assert outbox.result("huge", 0)[2] is ERROR
    assert outbox.result("fine", 0)[2] is LENGTH


def test_an_outbox_that_raises_is_gone_and_its_requests_with_it() -> None:
    engine = make_engine()

    class Gone(Recorder):
        def deliver(self, chunks: Sequence[Chunk]) -> None:
            raise RuntimeError("Event loop is closed")

    outbox = Recorder()
    submit(engine, Gone(), *(make_request(f"gone{i}", max_tokens=50) for i in range(3)))
    submit(engine, outbox, make_request("here", max_tokens=5))
    run_until_idle(engine)
    assert engine.stats.steps == 5
    assert [outbox.result("here", 0)] == alone(make_request("here", max_tokens=5))


def test_an_internal_error_is_told_to_all_and_nothing_is_accepted_any_more() -> None:
    engine = make_engine()
    live, pending = Recorder(), Recorder()
    submit(engine, live, make_request("live"))
    engine.step()
    submit(engine, pending, make_request("pending"))
    engine.die(EngineDeadError("broken"))
    assert [str(error) for error in (*live.failures, *pending.failures)] == ["broken", "broken"]
    with pytest.raises(EngineDeadError):
        submit(engine, live, make_request("late"))


def test_close_with_drain_finishes_without_aborts() -> None:
    for drain, finish in ((True, LENGTH), (False, ABORT)):
        engine = make_engine()
        outbox = Recorder()
        submit(engine, outbox, make_request("r", max_tokens=5))
        engine.step()
        engine.inbox.close(drain=drain)
        assert not engine.ended
        run_until_idle(engine)
        assert engine.ended
        assert outbox.result("r", 0)[2] is finish
        with pytest.raises(EngineClosedError):
            submit(engine, outbox, make_request("late"))


def test_ten_thousand_queued_requests_all_aborted() -> None:
    engine = make_engine(max_waiting=10_000, max_num_seqs=8)
    outbox = Recorder()
    submit(engine, outbox, *(make_request(f"r{index}", max_tokens=50) for index in range(10_000)))
    with pytest.raises(QueueFullError):
        submit(engine, outbox, make_request("one too many"))
    for _ in range(3):
        engine.step()
    for index in range(10_000):
        engine.inbox.abort(f"r{index}")
    engine.step()
    assert not engine.has_work()
    assert engine.stats.scheduler.used_blocks == 0
    ends = [chunk.request_id for chunk in outbox.chunks if chunk.finish is ABORT]
    assert sorted(ends) == sorted(f"r{index}" for index in range(10_000))
    submit(engine, outbox, make_request("afterwards", max_tokens=2))
    run_until_idle(engine)
    assert outbox.result("afterwards", 0)[2] is LENGTH


# Text.


@pytest.mark.parametrize("boundary", range(1, 6))
def test_a_stop_string_ends_the_text_before_it_however_tokens_cut_it(boundary: int) -> None:
    script = "hello <end> more"
    engine = make_engine(script=script)
    outbox = Recorder()
    submit(engine, outbox, make_request("r", max_tokens=16, stop=["<end>"[:boundary]]))
    run_until_idle(engine)
    tokens, text, finish = outbox.result("r", 0)
    assert text == "hello "
    assert finish is STOP
    assert text_of(tokens) == "hello " + "<end>"[:boundary]


def test_a_stop_string_counts_from_min_tokens_on() -> None:
    engine = make_engine(script="a.b.c.d.e.f.")
    outbox = Recorder()
    submit(engine, outbox, make_request("r", max_tokens=12, min_tokens=5, stop=["."]))
    run_until_idle(engine)
    assert outbox.result("r", 0)[1:] == ("a.b.c", STOP)


def test_what_was_held_back_comes_out_at_the_end() -> None:
    engine = make_engine(script="hello <en")
    outbox = Recorder()
    submit(engine, outbox, make_request("r", max_tokens=9, stop=["<end>"]))
    run_until_idle(engine)
    assert outbox.result("r", 0)[1:] == ("hello <en", LENGTH)


def test_the_end_token_is_counted_but_is_not_text() -> None:
    engine = make_engine(script=[*b"ok", EOS])
    outbox = Recorder()
    submit(engine, outbox, make_request("r", max_tokens=9))
    run_until_idle(engine)
    assert outbox.result("r", 0) == ((*b"ok", EOS), "ok", STOP)


def test_half_a_character_never_leaks() -> None:
    script = "é€😀"
    engine = make_engine(script=list(script.encode()))
    outbox = Recorder()
    submit(engine, outbox, make_request("r", max_tokens=len(script.encode())))
    run_until_idle(engine)
    assert outbox.result("r", 0)[1] == script
    assert all("\ufffd" not in chunk.text for chunk in outbox.chunks)


def test_an_exception_while_making_text_ends_that_request_only(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    outbox = Recorder()
    submit(engine, outbox, make_request("bad", max_tokens=5), make_request("good", max_tokens=5, seed=1))
    detokenize = engine._detokenize

    def broken(live: Any, delta: Any) -> Any:
        if delta.request_id == "bad":
            raise UnicodeError("no such byte")
        return detokenize(live, delta)

    monkeypatch.setattr(engine, "_detokenize", broken)
    run_until_idle(engine)
    assert outbox.result("bad", 0) == ((), "", ERROR)
    assert outbox.errors["bad"] == "UnicodeError: no such byte"
    assert outbox.result("good", 0)[2] is LENGTH


# Aborts at any moment, under any load.

_REQUESTS = st.lists(
    st.fixed_dictionaries(
        {
            "prompt": st.integers(1, 40).map(lambda size: range(1, 1 + size)),
            "max_tokens": st.integers(1, 20),
            "n": st.integers(1, 3),
            "seed": st.integers(0, 3),
        }
    ),
    min_size=1,
    max_size=6,
)
_MOVES = st.lists(st.one_of(st.just("step"), st.integers(0, 5), st.integers(10, 15)), max_size=40)


@settings(max_examples=60, deadline=None)
@given(
    requests=_REQUESTS,
    moves=_MOVES,
    policy=st.sampled_from(["fcfs", "priority", "static"]),
    blocks=st.integers(5, 12),
    guilty=st.integers(0, 5),
    kind=st.sampled_from(["error", "raise", "raise_step", "nan"]),
    after=st.integers(0, 6),
)
def test_aborts_at_any_moment(
    *, requests: list[dict[str, Any]], moves: list[Any], policy: str, blocks: int, guilty: int, kind: Any, after: int
) -> None:
    """Numbers below 10 submit that request, others abort it; the rest is submitted at the end."""
    made = [make_request(f"r{index}", **options) for index, options in enumerate(requests)]
    fault = Fault(request_id=f"r{guilty}", kind=kind, after=after)
    engine = make_engine(blocks=blocks, token_budget=16, policy=policy, faults=(fault,), max_num_seqs=4)
    outbox = Recorder()
    submitted: set[int] = set()
    aborted: set[int] = set()

    def send(index: int) -> None:
        if index < len(made) and index not in submitted:
            submitted.add(index)
            submit(engine, outbox, made[index])

    for move in moves:
        if move == "step":
            engine.step()
        elif move < 10:
            send(move)
        elif move - 10 in submitted:
            aborted.add(move - 10)
            engine.inbox.abort(f"r{move - 10}")
    for index in range(len(made)):
        send(index)
    run_until_idle(engine)

    assert engine.stats.scheduler.used_blocks == 0
    for index, request in enumerate(made):
        reference = alone(request)
        for completion in range(request.params.n):
            tokens, text, finish = outbox.result(request.request_id, completion)
            whole, whole_text, whole_finish = reference[completion]
            if finish in (ABORT, ERROR):
                assert tokens == whole[: len(tokens)]
                assert whole_text.startswith(text)
                assert index in aborted if finish is ABORT else index == guilty
            else:
                assert (tokens, text, finish) == (whole, whole_text, whole_finish)
