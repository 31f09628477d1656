from __future__ import annotations

import contextlib
import gc
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import pytest
from engine_support import Recorder, make_engine, make_request

from shoal.core.request import FinishReason
from shoal.engine.thread import EngineThread
from shoal.errors import EngineClosedError, EngineDeadError, QueueFullError

HERE = Path(__file__).parent


def joined(thread: threading.Thread) -> bool:
    thread.join(timeout=30)
    return not thread.is_alive()


def test_it_serves_and_sleeps_and_serves_again() -> None:
    engine = make_engine()
    running = EngineThread(engine)
    for round_number in range(3):
        outbox = Recorder()
        name = running.new_request_id()
        running.submit(make_request(name, max_tokens=4), outbox)
        outbox.wait_for(name)
        assert outbox.result(name, 0)[2] is FinishReason.LENGTH
        assert engine.stats.steps == 4 * (round_number + 1), "it does not step while there is no work"
    running.close()
    assert not running.alive


def test_close_with_drain_finishes_what_is_there() -> None:
    running = EngineThread(make_engine())
    outbox = Recorder()
    for name in "abc":
        running.submit(make_request(name, max_tokens=20), outbox)
    running.close(drain=True)
    assert [outbox.result(name, 0)[2] for name in "abc"] == [FinishReason.LENGTH] * 3
    with pytest.raises(EngineClosedError):
        running.submit(make_request("late"), outbox)


def test_close_aborts_what_is_there_and_may_be_repeated() -> None:
    running = EngineThread(make_engine(gate=(gate := threading.Event())))
    outbox = Recorder()
    running.submit(make_request("a", max_tokens=20), outbox)
    closer = threading.Thread(target=running.close)
    closer.start()
    gate.set()
    assert joined(closer)
    running.close()
    assert outbox.result("a", 0)[2] is FinishReason.ABORT


def test_the_limit_on_waiting_is_seen_by_the_caller() -> None:
    engine = make_engine(max_num_seqs=1, max_waiting=2, gate=(gate := threading.Event()))
    running = EngineThread(engine)
    outbox = Recorder()
    accepted = 0
    with contextlib.suppress(QueueFullError):
        for index in range(5):
            running.submit(make_request(f"r{index}", max_tokens=3), outbox)
            accepted += 1
    assert accepted in {2, 3}, "two wait, and one may have been taken off the queue meanwhile"
    gate.set()
    running.wait_for_room()
    running.submit(make_request("last", max_tokens=3), outbox)
    outbox.wait_for("last")
    running.close()


def test_a_dead_engine_tells_everybody(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()

    def broken(*_: Any) -> Any:
        raise ZeroDivisionError("the books are wrong")

    monkeypatch.setattr(engine._scheduler, "commit", broken)
    running = EngineThread(engine)
    outbox = Recorder()
    running.submit(make_request("a"), outbox)
    outbox.wait_for_failure()
    (failure,) = outbox.failures
    assert isinstance(failure, EngineDeadError)
    assert "ZeroDivisionError: the books are wrong" in str(failure)
    assert isinstance(failure.__cause__, ZeroDivisionError)
    with pytest.raises(EngineDeadError):
        running.submit(make_request("b"), outbox)
    running.abort("a")
    running.close()
    assert not running.alive


def test_a_forgotten_engine_ends_its_thread() -> None:
    running = EngineThread(make_engine())
    thread = running._thread
    del running
    gc.collect()
    assert joined(thread)


def run_script(script: str) -> subprocess.CompletedProcess[str]:
    prelude = f"import sys; sys.path[:0] = {[str(HERE), *sys.path]!r}\n"
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", prelude + textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("running", [False, True])
def test_a_program_that_forgets_to_close_exits_cleanly(running: bool) -> None:
    done = run_script(
        f"""
        from engine_support import Recorder, make_engine, make_request
        from shoal.engine.thread import EngineThread

        thread = EngineThread(make_engine())
        if {running}:
            outbox = Recorder()
            thread.submit(make_request("a", max_tokens=2000), outbox)
            outbox.wait_for_call()
        print("end")
        """
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")


def test_an_interrupt_in_the_main_thread_ends_the_program() -> None:
    done = run_script(
        """
        import os, signal
        from engine_support import make_loaded
        from shoal import LLM, SamplingParams

        def interrupt(step):
            if step == 3:
                os.kill(os.getpid(), signal.SIGINT)

        llm = LLM.from_loaded(make_loaded(context_length=2048, on_step=interrupt))
        try:
            llm.generate([[1]] * 100, SamplingParams(max_tokens=1000, temperature=0, ignore_eos=True))
        except KeyboardInterrupt:
            print("interrupted")
        output, = llm.generate([1], SamplingParams(max_tokens=2, temperature=0, ignore_eos=True))
        print(len(output.completions[0].token_ids), llm.stats().scheduler.used_blocks)
        """
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "interrupted\n2 0\n", "")
