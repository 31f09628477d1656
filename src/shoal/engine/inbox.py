"""The door in: any thread puts messages, the engine thread takes them all at the start of each step.

The limit on waiting completions is enforced here, at the door, so that a refusal is immediate and the caller's thread
sees it. For that the door counts: those submitted but not yet taken, and those that wait in the scheduler, as the
engine last reported. (Each of a request's ``n`` completions counts, as it does in the scheduler.)

The lock guards only this object's few fields and is never held while anything else happens. It is reentrant, because
a garbage collection inside it may close a forgotten engine through this very door.
"""

from __future__ import annotations

import threading

from shoal.engine.messages import Abort, Close, Message, Submit
from shoal.errors import EngineClosedError, EngineDeadError, EngineError, QueueFullError


class Inbox:
    """Messages for the engine thread."""

    def __init__(self, max_waiting: int) -> None:
        self._max_waiting = max_waiting
        self._condition = threading.Condition(threading.RLock())
        self._messages: list[Message] = []
        self._submitted = 0  # completions, in _messages
        self._waiting = 0  # completions in the scheduler, as the engine last reported, and taken since
        self._refusal: EngineError | None = None  # why nothing is accepted any more

    @property
    def max_waiting(self) -> int:
        """Most completions that may wait."""
        return self._max_waiting

    @property
    def failure(self) -> EngineDeadError | None:
        """The internal error on which the engine stopped, if it did."""
        return self._refusal if isinstance(self._refusal, EngineDeadError) else None

    @property
    def dead(self) -> bool:
        """Whether the engine stopped on an internal error."""
        return self.failure is not None

    # For callers, from any thread.

    def submit(self, *messages: Submit) -> None:
        """Put requests in, all or none; ``QueueFullError`` or, after close or death, an ``EngineError`` for none."""
        with self._condition:
            self._check_open()
            count = sum(message.request.params.n for message in messages)
            if not self._has_room(count):
                raise QueueFullError(self._max_waiting)
            self._submitted += count
            self._messages += messages
            self._condition.notify_all()

    def wait_for_room(self, count: int) -> None:
        """Sleep until ``count`` more can wait; raises as ``submit`` does when the engine is gone."""
        with self._condition:
            while not self._has_room(count) and self._refusal is None:
                self._condition.wait()
            self._check_open()

    def abort(self, request_id: str) -> None:
        """Ask to stop a request. Nothing to do once the engine is gone."""
        with self._condition:
            if not self.dead:
                self._put(Abort(request_id))

    def close(self, *, drain: bool) -> None:
        """Accept no more requests and tell the engine to end. Again is harmless; abort after drain cuts it short."""
        with self._condition:
            if not self.dead:
                self._refusal = EngineClosedError("the engine was closed; make a new one")
                self._put(Close(drain))

    # For the engine thread.

    def wait(self) -> None:
        """Sleep until there is a message."""
        with self._condition:
            while not self._messages:
                self._condition.wait()

    def take(self) -> list[Message]:
        """All messages, in the order they came."""
        if not self._messages:  # the common step; a message put this instant is taken in the next one
            return []
        with self._condition:
            messages, self._messages = self._messages, []
            self._waiting += self._submitted
            self._submitted = 0
            return messages

    def report_waiting(self, count: int) -> None:
        """How many completions wait in the scheduler now."""
        if count == self._waiting:  # only the engine thread writes it
            return
        with self._condition:
            self._waiting = count
            self._condition.notify_all()

    def die(self, error: EngineDeadError) -> list[Message]:
        """Refuse everything from now on; gives the messages that nobody will take any more."""
        with self._condition:
            self._refusal = error
            messages, self._messages = self._messages, []
            self._submitted = 0
            self._condition.notify_all()
            return messages

    def _put(self, message: Message) -> None:
        self._messages.append(message)
        self._condition.notify_all()

    def _has_room(self, count: int) -> bool:
        return self._submitted + self._waiting + count <= self._max_waiting

    def _check_open(self) -> None:
        if self._refusal is not None:
            # A new exception each time: one instance raised in several threads would gather their tracebacks.
            raise type(self._refusal)(str(self._refusal)) from self._refusal.__cause__
