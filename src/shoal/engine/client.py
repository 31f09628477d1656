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
from typing import Self

from shoal.core.params import SamplingParams
from shoal.core.request import FinishReason, Request
from shoal.engine.messages import Chunk
from shoal.engine.request import EmptyResult, resolve
from shoal.engine.thread import EngineThread
from shoal.errors import EngineError, RequestFailedError, ShoalError


class Stream(AsyncIterator[Chunk]):
    """The chunks of one request, for one reader.

    Leaving early aborts the request: by ``aclose``, by ``async with``, or by cancelling the task that waits for the
    next chunk. A stream that nobody reads or closes runs to its own end. If a completion fails, ``RequestFailedError``
    is raised after the last chunk.
    """

    def __init__(self, client: AsyncClient, request_id: str, prompt_ids: tuple[int, ...], n: int, seed: int | None):
        self.request_id = request_id
        self.prompt_ids = prompt_ids
        self.seed = seed  # as resolved; None when nothing is computed
        self._client = client
        self._pending: dict[int, list[Chunk]] = {}  # per completion, merged when read
        self._open = n  # completions whose last chunk has not been written
        self._failure: str | None = None  # of a completion
        self._error: EngineError | None = None  # of the engine
        self._event = asyncio.Event()

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
        """Abort the request if it is not done. Idempotent."""
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
        self._pending.setdefault(chunk.index, []).append(chunk)
        if chunk.finish is not None:
            self._open -= 1
            self._failure = self._failure or chunk.error


class AsyncClient:
    """Uses an ``EngineThread`` from one event loop. Several clients may share one engine, each in its own loop."""

    def __init__(self, engine: EngineThread) -> None:
        self._engine = engine
        self._lock = threading.Lock()  # guards the fields below and all streams' buffers; held for instants only
        self._streams: dict[str, Stream] = {}
        self._gained: dict[Stream, None] = {}  # in order, each once
        self._waking = False
        self._loop: asyncio.AbstractEventLoop | None = None

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
        self._bind_loop()
        request_id = self._engine.new_request_id()
        request = resolve(
            request_id,
            prompt_ids,
            params,
            self._engine.limits,
            priority=priority,
            deadline=deadline,
            cache_salt=cache_salt,
        )
        if isinstance(request, EmptyResult):
            return self._empty_stream(request_id, request)
        return self._queue(request)

    def _bind_loop(self) -> None:
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
        elif self._loop is not loop:
            raise EngineError(
                "this AsyncClient belongs to another event loop; make one per loop, they can share the engine"
            )

    def _empty_stream(self, request_id: str, empty: EmptyResult) -> Stream:
        stream = Stream(self, request_id, empty.prompt_ids, empty.n, None)
        with self._lock:
            for index in range(empty.n):
                stream._absorb(Chunk(request_id, index, finish=FinishReason.LENGTH))
        return stream

    def _queue(self, request: Request) -> Stream:
        stream = Stream(self, request.request_id, request.prompt_ids, request.params.n, request.seed)
        with self._lock:
            self._streams[request.request_id] = stream
        try:
            self._engine.submit(request, self)
        except ShoalError:
            with self._lock:
                del self._streams[request.request_id]
            raise
        return stream

    def _abandon(self, stream: Stream) -> None:
        with self._lock:
            running = self._streams.pop(stream.request_id, None) is not None
            stream._pending.clear()
            stream._open = 0
            stream._failure = None
        stream._event.set()
        if running:
            self._engine.abort(stream.request_id)

    # The outbox: called by the engine thread.

    def deliver(self, chunks: Sequence[Chunk]) -> None:
        """Write one step's chunks into their streams and wake the loop."""
        with self._lock:
            for chunk in chunks:
                stream = self._streams.get(chunk.request_id)
                if stream is None:  # abandoned meanwhile
                    continue
                stream._absorb(chunk)
                self._gained[stream] = None
                if stream._open == 0:
                    del self._streams[chunk.request_id]
        self._wake()

    def fail(self, error: EngineError) -> None:
        """End every stream with the error."""
        with self._lock:
            for stream in self._streams.values():
                stream._error = error
            self._gained.update(dict.fromkeys(self._streams.values()))
            self._streams.clear()
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
    )
