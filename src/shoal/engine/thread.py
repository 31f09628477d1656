"""The thread that owns an engine, and the handle by which every other thread uses it.

The thread steps while there is work and sleeps at the inbox when there is none: no polling. It is a daemon, so a
program that forgets to close cannot hang at exit; instead an exit handler closes the engine and waits for the step
that is running, so that no native code runs while the interpreter goes down. An engine that is garbage-collected
without having been closed ends its thread too.
"""

from __future__ import annotations

import atexit
import itertools
import threading
import weakref
from collections.abc import Iterable
from functools import partial

from shoal.core.request import Request
from shoal.engine.engine import Engine, EngineStats
from shoal.engine.inbox import Inbox
from shoal.engine.messages import Outbox, Submit
from shoal.engine.request import Limits
from shoal.errors import EngineDeadError


class EngineThread:
    """Runs an engine until closed. Every method may be called from any thread."""

    def __init__(self, engine: Engine, *, name: str = "shoal-engine") -> None:
        self._engine = engine
        self._inbox = engine.inbox
        self._numbers = itertools.count(1)
        self._thread = threading.Thread(target=_run, args=(engine,), name=name, daemon=True)
        # Garbage collection may happen in any thread and at any point, so there the end is only asked for.
        self._finalizer = weakref.finalize(self, _ask_to_end, self._inbox)
        self._finalizer.atexit = False
        self._at_exit = partial(_close_if_alive, weakref.ref(self))
        atexit.register(self._at_exit)
        self._abandoned = False
        self._thread.start()

    @property
    def limits(self) -> Limits:
        """What a request must fit."""
        return self._engine.limits

    @property
    def stats(self) -> EngineStats:
        """How things stood after the last step."""
        return self._engine.stats

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    @property
    def dead(self) -> bool:
        """Whether the engine stopped on an internal error, and not because it was closed."""
        return self._inbox.dead

    @property
    def failure(self) -> EngineDeadError | None:
        """The internal error on which it stopped, if it did."""
        return self._inbox.failure

    @property
    def in_step(self) -> int | None:
        """The number of the step that goes on now; None between steps and while there is nothing to do."""
        return self._engine.in_step

    def new_request_id(self) -> str:
        """An id that no other request of this engine has."""
        return f"request-{next(self._numbers)}"

    def now(self) -> float:
        """The time on the engine's clock."""
        return self._engine.clock()

    def submit(self, request: Request, outbox: Outbox) -> None:
        """Queue a request, or raise ``QueueFullError``, ``EngineClosedError`` or ``EngineDeadError`` at once."""
        self.submit_all((request,), outbox)

    def submit_all(self, requests: Iterable[Request], outbox: Outbox) -> None:
        """Queue several requests at once, all or none; they arrive at the same instant."""
        now = self.now()
        self._inbox.submit(*(Submit(request, outbox, now) for request in requests))

    def wait_for_room(self, count: int = 1) -> None:
        """Sleep until the waiting queue has room for so many completions."""
        self._inbox.wait_for_room(count)

    def abort(self, request_id: str) -> None:
        """Ask to stop a request; its last chunk says ``abort``, unless it was done already."""
        self._inbox.abort(request_id)

    def close(self, *, drain: bool = False) -> None:
        """End the engine and wait for its thread. ``drain`` finishes all requests first, otherwise they are aborted."""
        atexit.unregister(self._at_exit)
        self._inbox.close(drain=drain)
        if self._thread is not threading.current_thread() and not self._abandoned:
            self._thread.join()

    def abandon(self, error: EngineDeadError) -> None:
        """Give up an engine whose step does not end: it counts as dead, and nobody waits for its thread any more.

        Its callers are not told; the thread that would tell them is the one that is stuck. The process is to end soon.
        """
        self._abandoned = True
        self._finalizer.detach()
        atexit.unregister(self._at_exit)
        self._inbox.die(error)


def _run(engine: Engine) -> None:
    try:
        while not engine.ended:
            if not engine.has_work():
                engine.inbox.wait()
            engine.step()
    except Exception as error:
        dead = EngineDeadError(f"the engine stopped on an internal error: {type(error).__name__}: {error}")
        dead.__cause__ = error
        engine.die(dead)
    finally:
        engine.close_backend()


def _ask_to_end(inbox: Inbox) -> None:
    inbox.close(drain=False)


def _close_if_alive(reference: weakref.ref[EngineThread]) -> None:
    engine_thread = reference()
    if engine_thread is not None:
        engine_thread.close()
