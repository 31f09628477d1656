"""Running many requests from one thread: feed the queue as room appears, read what comes out.

The queue in the engine never holds more than a window's worth of a caller's requests, so that ten thousand prompts
cost memory for their results and not for waiting. Requests come from an iterator, so encoding them is spread over
the run, too.
"""

from __future__ import annotations

import queue
from collections.abc import Generator, Iterable, Iterator, Sequence
from typing import NamedTuple

from shoal.core.request import FinishReason, Request
from shoal.engine.messages import Chunk
from shoal.engine.outputs import OutputBuilder, RequestOutput, failed_output
from shoal.engine.request import EmptyResult
from shoal.engine.thread import EngineThread
from shoal.errors import EngineError, InvalidRequestError, QueueFullError


class Refused(NamedTuple):
    """A prompt that never was a valid request."""

    prompt_ids: tuple[int, ...]
    n: int
    error: InvalidRequestError


class Event(NamedTuple):
    """Something about the request at ``position`` of the input."""

    position: int
    chunk: Chunk | None  # what one of its completions gained
    output: RequestOutput | None  # set once, when the request is done
    refusal: InvalidRequestError | None = None  # set with the output of a request that was not valid


class QueueOutbox:
    """An outbox for a caller's thread that waits for chunks."""

    def __init__(self) -> None:
        self._arrived: queue.SimpleQueue[Sequence[Chunk] | EngineError] = queue.SimpleQueue()

    def deliver(self, chunks: Sequence[Chunk]) -> None:
        """Called by the engine thread."""
        self._arrived.put(chunks)

    def fail(self, error: EngineError) -> None:
        """Called by the engine thread."""
        self._arrived.put(error)

    def get(self) -> Sequence[Chunk]:
        """Wait for the chunks of a step; raises when the engine is gone."""
        arrived = self._arrived.get()
        if isinstance(arrived, EngineError):
            raise type(arrived)(str(arrived)) from arrived.__cause__
        return arrived


def run_all(
    engine: EngineThread, requests: Iterable[Request | EmptyResult | Refused], window: int
) -> Generator[Event, None, None]:
    """Run all requests, at most ``window`` of them in the engine at once; closing the generator aborts those."""
    run = _Run(engine, requests)
    try:
        while True:
            yield from run.feed(window)
            if not run.open:
                return
            yield from run.receive()
    finally:
        run.abort()


class _Run:
    def __init__(self, engine: EngineThread, requests: Iterable[Request | EmptyResult | Refused]) -> None:
        self._engine = engine
        self._requests = enumerate(requests)
        self._held: tuple[int, Request] | None = None  # taken from the iterator, found no room yet
        self._outbox = QueueOutbox()
        self.open: dict[str, tuple[int, OutputBuilder]] = {}

    def feed(self, window: int) -> Iterator[Event]:
        """Submit while there is room; gives the events of requests that need no engine."""
        while len(self.open) < window:
            if self._held is not None:
                position, request = self._held
                self._held = None
            else:
                item = next(self._requests, None)
                if item is None:
                    return
                position, either = item
                if isinstance(either, Refused):
                    output = failed_output(either.prompt_ids, either.n, str(either.error))
                    yield Event(position, None, output, either.error)
                    continue
                if isinstance(either, EmptyResult):
                    yield from _empty_events(position, either)
                    continue
                request = either
            if not self._submit(position, request):
                return

    def _submit(self, position: int, request: Request) -> bool:
        """Whether the request found room; if it is our only one, room is waited for."""
        builder = OutputBuilder(request.prompt_ids, request.params.n, request.seed)
        self.open[request.request_id] = (position, builder)  # first, so that an interrupt in between aborts it
        while True:
            try:
                self._engine.submit(request, self._outbox)
            except QueueFullError:
                if len(self.open) == 1:
                    self._engine.wait_for_room(request.params.n)
                    continue
                del self.open[request.request_id]
                self._held = (position, request)
                return False
            return True

    def receive(self) -> Iterator[Event]:
        """Wait for one step's chunks; gives their events."""
        for chunk in self._outbox.get():
            position, builder = self.open[chunk.request_id]
            builder.add(chunk)
            output = None
            if builder.done:
                output = builder.build()
                del self.open[chunk.request_id]
            yield Event(position, chunk, output)

    def abort(self) -> None:
        for request_id in self.open:
            self._engine.abort(request_id)


def _empty_events(position: int, empty: EmptyResult) -> Iterator[Event]:
    builder = OutputBuilder(empty.prompt_ids, empty.n, None)
    for index in range(empty.n):
        chunk = Chunk("", index, finish=FinishReason.LENGTH)
        builder.add(chunk)
        yield Event(position, chunk, builder.build() if builder.done else None)
