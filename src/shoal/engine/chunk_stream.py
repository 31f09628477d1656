"""One request, streamed to a caller's thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from types import TracebackType
from typing import Self

from shoal.core.request import FinishReason, Request
from shoal.engine.feed import QueueOutbox
from shoal.engine.messages import Chunk
from shoal.engine.outputs import OutputBuilder, RequestOutput
from shoal.engine.request import EmptyResult
from shoal.engine.thread import EngineThread
from shoal.errors import QueueFullError, RequestFailedError


class ChunkStream(Iterator[Chunk]):
    """The chunks of one request. Closing it early, or dropping it, aborts the request.

    If a completion fails, ``RequestFailedError`` is raised after the last chunk.
    """

    def __init__(self, engine: EngineThread, request: Request | EmptyResult) -> None:
        self._engine = engine
        self._outbox = QueueOutbox()
        self._ready: deque[Chunk] = deque()
        self._request_id: str | None = None  # while chunks are to come
        if isinstance(request, EmptyResult):
            self._builder = OutputBuilder(request.prompt_ids, request.n, None)
            self._ready.extend(Chunk("", index, finish=FinishReason.LENGTH) for index in range(request.n))
        else:
            self._builder = OutputBuilder(request.prompt_ids, request.params.n, request.seed)
            self._request_id = request.request_id
            self._submit(request)

    @property
    def output(self) -> RequestOutput:
        """Everything read so far, as one value; what has not ended counts as aborted."""
        return self._builder.build()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Chunk:
        while not self._ready:
            if self._request_id is None:
                self._raise_end()
            try:
                self._ready.extend(self._outbox.get())
            except BaseException:
                self.close()
                raise
        chunk = self._ready.popleft()
        self._builder.add(chunk)
        if self._builder.done:
            self._request_id = None
        return chunk

    def close(self) -> None:
        """Abort the request if it is not done. Idempotent."""
        request_id, self._request_id = self._request_id, None
        self._ready.clear()
        if request_id is not None:
            self._engine.abort(request_id)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_request_id", None) is not None:  # construction may have failed early
            self.close()

    def _submit(self, request: Request) -> None:
        while True:
            try:
                self._engine.submit(request, self._outbox)
                return
            except QueueFullError:
                self._engine.wait_for_room(request.params.n)

    def _raise_end(self) -> None:
        if self._builder.done and (error := self.output.error) is not None:
            raise RequestFailedError(error)
        raise StopIteration
