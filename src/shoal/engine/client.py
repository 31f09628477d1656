"""The engine for one asyncio event loop: submit, iterate, abort.

The engine thread writes each chunk straight into its stream's buffer. A reader takes all that has come for one
completion as one merged chunk, so a slow reader gets fewer, larger chunks, the engine never waits, and memory is
bounded by ``max_tokens``. The loop is woken once for all streams that gained something, and not again until it has
woken up.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterable, Sequence
from types import TracebackType
from typing import NamedTuple, Self

from shoal.core.params import SamplingParams
from shoal.core.request import FinishReason, Request
from shoal.engine.backlog import Backlog, Pace
from shoal.engine.messages import Chunk
from shoal.engine.request import EmptyResult, resolve
from shoal.engine.thread import EngineThread
from shoal.errors import EngineError, RequestFailedError, ShoalError


class Stream(AsyncIterator[Chunk]):
    """The chunks of one request, or of several that belong together, for one reader.

    Which request a chunk is of, its ``request_id`` says. Leaving early aborts the request: by ``aclose``, by
    ``async with``, or by cancelling the task that waits for the next chunk. A stream that nobody reads or closes runs
    to its own end. If a completion fails, ``RequestFailedError`` is raised after the last chunk.
    """

    def __init__(self, client: AsyncClient, requests: Iterable[StreamedRequest]):
        self.requests = tuple(requests)
        self._client = client
        self._pending: dict[tuple[str, int], list[Chunk]] = {}  # per completion, merged when read
        # Completions whose last chunk has not been written, in all and by request.
        self._open_by_request = {request.request_id: request.n for request in self.requests}
        self._open = sum(self._open_by_request.values())
        self._failure: str | None = None  # of a completion
        self.produced = 0  # tokens that the engine has delivered, read or not
        self._error: EngineError | None = None  # of the engine
        self._event = asyncio.Event()

    @property
    def request_id(self) -> str:
        """Of the first request."""
        return self.requests[0].request_id

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        """Of the first request."""
        return self.requests[0].prompt_ids

    @property
    def seed(self) -> int | None:
        """Of the first request, as resolved; None when nothing is computed."""
        return self.requests[0].seed

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Chunk:
        try:
            while (chunk := self._take()) is None:
                await self._event.wait()
                self._event.clear()
        except asyncio.CancelledError:
            await self.aclose()
            raise
        return chunk

    async def aclose(self) -> None:
        """Abort what is not done. Idempotent."""
        self._client._abandon(self)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    def _take(self) -> Chunk | None:
        """The next chunk, None if there is none yet."""
        with self._client._lock:
            if self._pending:
                return merge(self._pending.pop(next(iter(self._pending))))
            if self._error is not None:
                # A new exception for each reader: one instance raised twice would gather both tracebacks.
                raise type(self._error)(str(self._error)) from self._error.__cause__
            if self._open:
                return None
            if self._failure is not None:
                raise RequestFailedError(self._failure)
            raise StopAsyncIteration

    def _absorb(self, chunk: Chunk) -> None:
        """Called by the engine thread with the client's lock held."""
        self._pending.setdefault((chunk.request_id, chunk.index), []).append(chunk)
        self.produced += len(chunk.token_ids)
        if chunk.finish is not None:
            self._open -= 1
            self._open_by_request[chunk.request_id] -= 1
            self._failure = self._failure or chunk.error

    def _ended(self, request_id: str) -> bool:
        return self._open_by_request[request_id] == 0


class StreamedRequest(NamedTuple):
    """What a reader may want to know of a request while it runs. ``seed``: None when nothing is computed."""

    request_id: str
    prompt_ids: tuple[int, ...]
    n: int
    seed: int | None


class AsyncClient:
    """Uses an ``EngineThread`` from one event loop. Several clients may share one engine, each in its own loop."""

    def __init__(self, engine: EngineThread) -> None:
        self._engine = engine
        self._lock = threading.Lock()  # guards the fields below and all streams' buffers; held for instants only
        self._streams: dict[str, Stream] = {}
        self._backlog = Backlog()
        self._gained: dict[Stream, None] = {}  # in order, each once
        self._waking = False
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def busy(self) -> bool:
        """Whether a request runs or waits."""
        with self._lock:
            return bool(self._streams)

    def predicted_wait(self, pace: Pace, priority: int = 0) -> float:
        """Seconds until a request that came now would be begun (see ``backlog``)."""
        with self._lock:
            return self._backlog.wait(pace, priority)

    def predicted_room(self, pace: Pace, count: int) -> float:
        """Seconds until the waiting queue will have room for ``count`` completions."""
        with self._lock:
            return self._backlog.room(pace, self._engine.limits.max_waiting, count)

    def waiting(self, tenant: str) -> int:
        """How many of a tenant's completions have no token yet."""
        with self._lock:
            return self._backlog.waiting(tenant)

    async def submit(
        self,
        prompt_ids: Iterable[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        deadline: float | None = None,
        cache_salt: str | None = None,
    ) -> Stream:
        """Queue a request. Raises ``InvalidRequestError``, ``QueueFullError`` or an ``EngineError`` at once."""
        request = self.resolve(prompt_ids, params, priority=priority, deadline=deadline, cache_salt=cache_salt)
        return self.queue([request])

    def resolve(
        self,
        prompt_ids: Iterable[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        deadline: float | None = None,
        cache_salt: str | None = None,
        tenant: str = "",
        weight: float = 1.0,
    ) -> Request | EmptyResult:
        """A request for ``queue``, or ``InvalidRequestError``. From any thread: it may compile a grammar."""
        return resolve(
            self._engine.new_request_id(),
            prompt_ids,
            params,
            self._engine.limits,
            priority=priority,
            deadline=deadline,
            cache_salt=cache_salt,
            tenant=tenant,
            weight=weight,
        )

    def queue(self, requests: Sequence[Request | EmptyResult]) -> Stream:
        """Queue requests, all or none, to be read as one stream. ``QueueFullError`` or an ``EngineError`` for none."""
        self._bind_loop()
        computed = [request for request in requests if isinstance(request, Request)]
        stream = Stream(self, [self._streamed(request) for request in requests])
        with self._lock:
            for known in stream.requests:
                self._streams[known.request_id] = stream
            for item in computed:
                self._backlog.add(item)
            for known, request in zip(stream.requests, requests, strict=True):
                if isinstance(request, EmptyResult):
                    for index in range(known.n):
                        self._absorb(stream, Chunk(known.request_id, index, finish=FinishReason.LENGTH))
        try:
            self._engine.submit_all(computed, self)
        except ShoalError:
            with self._lock:
                for known in stream.requests:
                    self._streams.pop(known.request_id, None)
                    self._backlog.drop(known.request_id, known.n)
            raise
        return stream

    def _streamed(self, request: Request | EmptyResult) -> StreamedRequest:
        if isinstance(request, EmptyResult):
            return StreamedRequest(self._engine.new_request_id(), request.prompt_ids, request.n, None)
        return StreamedRequest(request.request_id, request.prompt_ids, request.params.n, request.seed)

    def _bind_loop(self) -> None:
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
        elif self._loop is not loop:
            raise EngineError(
                "this AsyncClient belongs to another event loop; make one per loop, they can share the engine"
            )

    def _abandon(self, stream: Stream) -> None:
        with self._lock:
            running = [
                known.request_id for known in stream.requests if self._streams.pop(known.request_id, None) is not None
            ]
            for known in stream.requests:
                self._backlog.drop(known.request_id, known.n)
            stream._pending.clear()
            stream._open = 0
            stream._failure = None
        stream._event.set()
        for request_id in running:
            self._engine.abort(request_id)

    def _absorb(self, stream: Stream, chunk: Chunk) -> None:
        """With the lock held."""
        stream._absorb(chunk)
        self._backlog.progress(chunk.request_id, chunk.index, len(chunk.token_ids), ended=chunk.finish is not None)
        if stream._ended(chunk.request_id):
            del self._streams[chunk.request_id]

    # The outbox: called by the engine thread.

    def deliver(self, chunks: Sequence[Chunk]) -> None:
        """Write one step's chunks into their streams and wake the loop."""
        with self._lock:
            for chunk in chunks:
                stream = self._streams.get(chunk.request_id)
                if stream is None:  # abandoned meanwhile
                    continue
                self._absorb(stream, chunk)
                self._gained[stream] = None
        self._wake()

    def fail(self, error: EngineError) -> None:
        """End every stream with the error."""
        with self._lock:
            for stream in self._streams.values():
                stream._error = error
            self._gained.update(dict.fromkeys(self._streams.values()))
            self._streams.clear()
            self._backlog = Backlog()
        self._wake()

    def _wake(self) -> None:
        with self._lock:
            if self._loop is None or self._loop.is_closed():
                # The engine drops this outbox then and aborts its requests.
                raise EngineError("the event loop was closed with streams open")
            if self._waking or not self._gained:
                return
            self._waking = True
        self._loop.call_soon_threadsafe(self._awake)

    def _awake(self) -> None:
        """In the loop: let the readers look at their buffers."""
        with self._lock:
            self._waking = False
            gained, self._gained = self._gained, {}
        for stream in gained:
            stream._event.set()


def merge(chunks: Sequence[Chunk]) -> Chunk:
    """Successive chunks of one completion as one."""
    if len(chunks) == 1:
        return chunks[0]
    return chunks[-1]._replace(
        text="".join(chunk.text for chunk in chunks),
        token_ids=tuple(token for chunk in chunks for token in chunk.token_ids),
        logprobs=tuple(entry for chunk in chunks for entry in chunk.logprobs),
        prompt_logprobs=chunks[0].prompt_logprobs,
    )
