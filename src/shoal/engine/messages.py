"""What crosses the engine thread's two doors: messages in through the inbox, chunks out through outboxes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from shoal.core.plan import TokenLogprobs
from shoal.core.request import FinishReason, Request
from shoal.errors import EngineError
from shoal.metrics.timeline import RequestTimeline


class Chunk(NamedTuple):
    """What one completion gained in one step, or in several that were merged for a slow reader."""

    request_id: str
    index: int  # type: ignore[assignment]  # which of the request's n completions; nobody calls tuple.index
    text: str = ""  # may lag behind token_ids: half characters and possible stop strings are held back
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish: FinishReason | None = None
    error: str | None = None  # what went wrong, with FinishReason.ERROR
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # on the first chunk of completion 0, if asked for
    timeline: RequestTimeline | None = None  # on the request's very last chunk; nobody changes it any more


class Outbox(Protocol):
    """Where one caller's chunks go. Called by the engine thread, at most once a step; must return at once."""

    def deliver(self, chunks: Sequence[Chunk]) -> None:
        """Take the chunks of one step."""

    def fail(self, error: EngineError) -> None:
        """The engine is gone; nothing more will come for any request of this outbox."""


class Submit(NamedTuple):
    """A new request; its chunks go to ``outbox``."""

    request: Request
    outbox: Outbox
    arrived: float


class Abort(NamedTuple):
    """The caller does not want the rest. Unknown and finished requests are ignored."""

    request_id: str


class Close(NamedTuple):
    """No more work: finish what is there (``drain``) or abort it."""

    drain: bool


Message = Submit | Abort | Close
