from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import pytest

from shoal.core.params import SamplingParams
from shoal.core.request import Request
from shoal.engine.inbox import Inbox
from shoal.engine.messages import Abort, Chunk, Close, Submit
from shoal.errors import EngineClosedError, EngineDeadError, EngineError, QueueFullError


class NoOutbox:
    def deliver(self, chunks: Sequence[Chunk]) -> None:
        raise AssertionError("nothing runs here")

    def fail(self, error: EngineError) -> None:
        raise AssertionError("nothing runs here")


def submit(name: str, n: int = 1) -> Submit:
    request = Request(
        request_id=name, prompt_ids=(1,), params=SamplingParams(n=n), max_tokens=1, stop_ids=frozenset(), seed=0
    )
    return Submit(request, NoOutbox(), 0.0)


def in_thread(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work, name="inbox-test", daemon=True)
    thread.start()
    return thread


def joined(thread: threading.Thread) -> bool:
    thread.join(timeout=30)
    return not thread.is_alive()


def test_messages_come_out_in_order_and_once() -> None:
    inbox = Inbox(10)
    first = submit("a")
    inbox.submit(first)
    inbox.abort("a")
    inbox.close(drain=True)
    assert inbox.take() == [first, Abort("a"), Close(True)]
    assert inbox.take() == []


def test_the_limit_counts_what_is_here_and_what_waits_in_the_scheduler() -> None:
    inbox = Inbox(2)
    inbox.submit(submit("a"))
    inbox.submit(submit("b"))
    with pytest.raises(QueueFullError) as caught:
        inbox.submit(submit("c"))
    assert caught.value.limit == 2
    inbox.take()
    with pytest.raises(QueueFullError):  # taken, but not yet known to run
        inbox.submit(submit("c"))
    inbox.report_waiting(1)
    inbox.submit(submit("c"))
    with pytest.raises(QueueFullError):
        inbox.submit(submit("d"))


def test_every_completion_counts() -> None:
    inbox = Inbox(4)
    inbox.submit(submit("a", n=3))
    with pytest.raises(QueueFullError):
        inbox.submit(submit("b", n=2))
    inbox.submit(submit("c", n=1))


def test_aborts_are_taken_when_full() -> None:
    inbox = Inbox(1)
    inbox.submit(submit("a"))
    inbox.abort("a")
    assert len(inbox.take()) == 2


def test_after_close_only_aborts_are_taken() -> None:
    inbox = Inbox(2)
    inbox.close(drain=True)
    with pytest.raises(EngineClosedError):
        inbox.submit(submit("a"))
    with pytest.raises(EngineClosedError):
        inbox.wait_for_room(1)
    inbox.abort("a")
    inbox.close(drain=False)
    assert inbox.take() == [Close(True), Abort("a"), Close(False)]


def test_death_gives_back_what_nobody_takes_and_is_told_to_everybody() -> None:
    inbox = Inbox(2)
    left = submit("a")
    inbox.submit(left)
    error = EngineDeadError("the engine stopped")
    error.__cause__ = ValueError("why")
    assert inbox.die(error) == [left]
    raised = []
    for _ in range(2):
        with pytest.raises(EngineDeadError, match="stopped") as caught:
            inbox.submit(submit("b"))
        raised.append(caught.value)
        assert caught.value.__cause__ is error.__cause__
    assert raised[0] is not raised[1]
    inbox.abort("a")
    inbox.close(drain=False)
    assert inbox.take() == []
    with pytest.raises(EngineDeadError):  # close does not hide it
        inbox.submit(submit("b"))


def test_the_engine_sleeps_until_a_message_comes() -> None:
    inbox = Inbox(2)
    thread = in_thread(inbox.wait)
    inbox.abort("x")
    assert joined(thread)


@pytest.mark.parametrize("end", [False, True])
def test_a_caller_sleeps_until_there_is_room_or_the_engine_is_gone(end: bool) -> None:
    inbox = Inbox(1)
    inbox.submit(submit("a"))
    raised: list[EngineError] = []

    def wait() -> None:
        try:
            inbox.wait_for_room(1)
        except EngineError as error:
            raised.append(error)

    thread = in_thread(wait)
    inbox.take()
    if end:
        inbox.die(EngineDeadError("gone"))
    else:
        inbox.report_waiting(0)
    assert joined(thread)
    assert len(raised) == end
