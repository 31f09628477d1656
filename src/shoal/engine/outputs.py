"""What a finished request looks like, and how its chunks are put together into that."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.core.plan import TokenLogprobs
from shoal.core.request import FinishReason
from shoal.engine.messages import Chunk
from shoal.metrics.timeline import RequestTimeline


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOutput:
    """One completion.

    text: without the stop string or stop token that ended it.
    token_ids: all generated tokens, those that ended it included.
    logprobs: one entry per token if asked for, else empty.
    error: what went wrong when ``finish_reason`` is "error", else None.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    logprobs: tuple[TokenLogprobs, ...] = ()
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Token counts. ``cached_tokens`` of the prompt were found in the prefix cache."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """Seconds; None where there is nothing to measure (no token, or a single one).

    queue: arrival to first being scheduled.
    prefill: from there to the first token.
    decode: from there to the end.
    ttft: arrival to the first token.
    total: arrival to the end.
    itl: gaps between deliveries, of each completion in turn.
    tpot: time per output token after the first, mean over the completions.
    compute: of the steps it was in, the part that its rows were of all rows: what it would be charged.
    mean_batch: sequences in those steps, on average.
    """

    queue: float | None
    prefill: float | None
    decode: float | None
    ttft: float | None
    total: float
    itl: tuple[float, ...]
    tpot: float | None
    compute: float
    mean_batch: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """All that came of one request.

    seed: reproduces the completions; drawn if the parameters had none. None when nothing was computed.
    timings: None when the request never reached the engine.
    prompt_logprobs: of each token of the prompt but the first, if asked for, else empty.
    """

    prompt_ids: tuple[int, ...]
    completions: tuple[CompletionOutput, ...]
    usage: Usage
    timings: Timings | None
    seed: int | None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()

    @property
    def text(self) -> str:
        """The text of the first completion."""
        return self.completions[0].text

    @property
    def finish_reason(self) -> FinishReason:
        """Why the first completion ended."""
        return self.completions[0].finish_reason

    @property
    def error(self) -> str | None:
        """What went wrong with the first completion that failed, None if none did."""
        return next((item.error for item in self.completions if item.error is not None), None)


class OutputBuilder:
    """Gathers one request's chunks."""

    def __init__(self, prompt_ids: tuple[int, ...], n: int, seed: int | None) -> None:
        self._prompt_ids = prompt_ids
        self._seed = seed
        self._parts: list[list[Chunk]] = [[] for _ in range(n)]
        self._unfinished = n
        self._timeline: RequestTimeline | None = None
        self._prompt_logprobs: tuple[TokenLogprobs, ...] = ()

    def add(self, chunk: Chunk) -> None:
        """Take the next chunk of any of the completions."""
        self._parts[chunk.index].append(chunk)
        if chunk.finish is not None:
            self._unfinished -= 1
        if chunk.timeline is not None:
            self._timeline = chunk.timeline
        if chunk.prompt_logprobs:
            self._prompt_logprobs = chunk.prompt_logprobs

    @property
    def done(self) -> bool:
        """Whether every completion has ended."""
        return self._unfinished == 0

    def build(self) -> RequestOutput:
        """The output; a completion that has not ended counts as aborted."""
        completions = tuple(_completion(index, parts) for index, parts in enumerate(self._parts))
        timeline = self._timeline
        return RequestOutput(
            prompt_ids=self._prompt_ids,
            completions=completions,
            usage=Usage(
                prompt_tokens=len(self._prompt_ids),
                completion_tokens=sum(len(item.token_ids) for item in completions),
                cached_tokens=0 if timeline is None else timeline.cached_tokens,
            ),
            timings=None if timeline is None else _timings(timeline),
            seed=self._seed,
            prompt_logprobs=self._prompt_logprobs,
        )


def failed_output(prompt_ids: tuple[int, ...], n: int, message: str) -> RequestOutput:
    """The output of a request that was refused before it reached the engine."""
    builder = OutputBuilder(prompt_ids, n, None)
    for index in range(n):
        builder.add(Chunk("", index, finish=FinishReason.ERROR, error=message))
    return builder.build()


def _completion(index: int, parts: list[Chunk]) -> CompletionOutput:
    last = parts[-1] if parts else None
    return CompletionOutput(
        index=index,
        text="".join(part.text for part in parts),
        token_ids=tuple(token for part in parts for token in part.token_ids),
        finish_reason=FinishReason.ABORT if last is None or last.finish is None else last.finish,
        logprobs=tuple(entry for part in parts for entry in part.logprobs),
        error=None if last is None else last.error,
    )


def _timings(timeline: RequestTimeline) -> Timings:
    return Timings(
        queue=timeline.queue_time,
        prefill=timeline.prefill_time,
        decode=timeline.decode_time,
        ttft=timeline.ttft,
        total=timeline.total or 0.0,
        itl=timeline.itl,
        tpot=timeline.tpot,
        compute=timeline.compute,
        mean_batch=timeline.mean_batch,
    )
