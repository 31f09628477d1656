"""One request's answer, whole or as a stream, whatever its endpoint.

An answer reads the engine's stream of chunks. A failed completion fails the answer: before anything was sent that is an
HTTP error, later an event that holds the error object.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Protocol

from shoal.core.request import FinishReason
from shoal.engine.client import Stream
from shoal.engine.messages import Chunk
from shoal.errors import EngineClosedError, RequestFailedError
from shoal.server.answers.chat import ChatAnswer
from shoal.server.answers.completion import CompletionAnswer
from shoal.server.answers.envelope import Envelope
from shoal.server.answers.usage import Tally
from shoal.server.work import ChatWork, CompletionWork, Work


class _Choices(Protocol):
    def opening(self) -> list[dict[str, Any]]: ...
    def events(self, chunk: Chunk) -> list[dict[str, Any]]: ...
    def gather(self, chunk: Chunk) -> None: ...
    def whole(self) -> dict[str, Any]: ...


class Answer:
    """Over the chunks of a stream; ``whole`` or ``events``, once.

    texts: what was generated so far, each completion's pieces, if ``keep_texts``.
    """

    def __init__(self, work: Work, stream: Stream, *, id: str, created: int, keep_texts: bool = False) -> None:
        self._work = work
        self._stream = stream
        chat = isinstance(work, ChatWork)
        self.id = f"{'chatcmpl' if chat else 'cmpl'}-{id}"
        self._envelope = Envelope(
            id=self.id,
            kind="chat.completion" if chat else "text_completion",
            event_kind="chat.completion.chunk" if chat else "text_completion",
            created=created,
            model=work.served.name,
            fingerprint=work.served.fingerprint,
            null_usage=work.include_usage,
        )
        self.tally = Tally(stream.requests)
        self.texts: dict[tuple[str, int], list[str]] | None = {} if keep_texts else None
        self._choices = _choices(work, stream, self._envelope)

    async def whole(self) -> dict[str, Any]:
        """The whole answer. Cancelling aborts the request."""
        async for chunk in self._stream:
            self._take(chunk)
            self._choices.gather(chunk)
        return {**self._choices.whole(), "usage": self.tally.usage(), **self._timings()}

    async def events(self) -> AsyncIterator[list[dict[str, Any]]]:
        """The objects of a stream, as many at a time as there are. The first come with the first token."""
        opening = self._choices.opening()
        async for chunk in self._stream:
            self._take(chunk)
            events = self._choices.events(chunk)
            if events:
                yield [*opening, *events]
                opening = []
        usage = {"usage": self.tally.usage()} if self._work.include_usage else {}
        last = {**usage, **self._timings()}
        if last:
            yield [self._envelope.last(last)]

    def _take(self, chunk: Chunk) -> None:
        if chunk.finish is FinishReason.ABORT:
            raise EngineClosedError("the server is shutting down; the answer is not complete")
        if chunk.finish is FinishReason.ERROR:  # the others of the answer are of no use then
            raise RequestFailedError(chunk.error or "the request failed")
        self.tally.add(chunk)
        if self.texts is not None:
            self.texts.setdefault((chunk.request_id, chunk.index), []).append(chunk.text)

    def _timings(self) -> dict[str, Any]:
        return {"timings": self.tally.timings()} if self._work.timings else {}


def _choices(work: Work, stream: Stream, envelope: Envelope) -> _Choices:
    match work:
        case ChatWork():
            return ChatAnswer(work, stream.requests, envelope)
        case CompletionWork():
            return CompletionAnswer(work, stream.requests, envelope)
        case _:
            raise TypeError(f"no answer to {type(work).__name__}")
