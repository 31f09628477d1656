"""Answers of ``/v1/completions``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shoal.core.plan import TokenLogprobs
from shoal.core.request import FinishReason
from shoal.engine.client import StreamedRequest
from shoal.engine.messages import Chunk
from shoal.server.answers.envelope import Envelope
from shoal.server.answers.logprobs import completion_logprobs, joined
from shoal.server.token_texts import TokenOffsets, TokenTexts
from shoal.server.work import CompletionWork


@dataclass(frozen=True, slots=True)
class Delta:
    """What one choice gained."""

    text: str
    logprobs: dict[str, list[Any]] | None
    finish: FinishReason | None


class CompletionChoice:
    """One completion on its way; ``prompt`` is its echo, or None."""

    def __init__(
        self, texts: TokenTexts, request: StreamedRequest, index: int, *, echo: str | None, logprobs: bool
    ) -> None:
        self.index = index
        self._texts = texts
        self._prompt_ids = request.prompt_ids
        self._echo = echo
        self._logprobs = logprobs
        self._begun = False
        self._offsets: TokenOffsets = texts.offsets(len(echo or ""))
        self._sum = 0.0
        self._count = 0

    @property
    def mean_logprob(self) -> float:
        """Of its tokens so far, by which the best completions are chosen."""
        return self._sum / self._count if self._count else 0.0

    def push(self, chunk: Chunk, prompt_logprobs: Sequence[TokenLogprobs]) -> Delta:
        """What the chunk adds. ``prompt_logprobs`` counts with the first one."""
        self._sum += sum(entry.logprob for entry in chunk.logprobs)
        self._count += len(chunk.logprobs)
        text = chunk.text
        ids: list[int] = []
        entries: list[TokenLogprobs | None] = []
        offsets: list[int] = []
        if not self._begun:
            self._begun = True
            if self._echo is not None:
                text = self._echo + text
                if self._logprobs:
                    ids += self._prompt_ids
                    entries += [None, *prompt_logprobs]
                    offsets += self._texts.prompt_offsets(self._prompt_ids, self._echo)
        if not self._logprobs:
            return Delta(text, None, chunk.finish)
        ids += chunk.token_ids
        entries += chunk.logprobs
        offsets += [self._offsets.push(token_id) for token_id in chunk.token_ids]
        return Delta(text, completion_logprobs(self._texts, ids, entries, offsets), chunk.finish)


class CompletionAnswer:
    """All choices of one request, in ``Answer``'s manner."""

    def __init__(self, work: CompletionWork, requests: Sequence[StreamedRequest], envelope: Envelope) -> None:
        self._work = work
        self._envelope = envelope
        self._needs_prompt_logprobs = bool(work.echoes) and work.logprobs is not None
        self._prompt_logprobs: dict[str, Sequence[TokenLogprobs]] = {}
        self._held: dict[str, list[Chunk]] = {}  # of completions that came before their prompt's logprobs
        self._choices: dict[tuple[str, int], CompletionChoice] = {}
        self._prompts: list[list[tuple[CompletionChoice, list[Delta]]]] = []
        for number, request in enumerate(requests):
            row: list[tuple[CompletionChoice, list[Delta]]] = []
            for index in range(work.candidates):
                choice = CompletionChoice(
                    work.served.texts,
                    request,
                    number * work.candidates + index,
                    echo=work.echoes[number] if work.echoes else None,
                    logprobs=work.logprobs is not None,
                )
                self._choices[request.request_id, index] = choice
                row.append((choice, []))
            self._prompts.append(row)
        self._gathered = {choice.index: deltas for row in self._prompts for choice, deltas in row}

    def opening(self) -> list[dict[str, Any]]:
        """Nothing comes before the text."""
        return []

    def push(self, chunk: Chunk) -> list[tuple[int, Delta]]:
        """What the chunk adds, to which choices."""
        name = chunk.request_id
        if self._needs_prompt_logprobs and name not in self._prompt_logprobs:
            # The first completion computes the prompt, and may be overtaken by one that shares what it computed.
            if chunk.index != 0:
                self._held.setdefault(name, []).append(chunk)
                return []
            self._prompt_logprobs[name] = chunk.prompt_logprobs
        return [self._push(item) for item in (chunk, *self._held.pop(name, ()))]

    def _push(self, chunk: Chunk) -> tuple[int, Delta]:
        choice = self._choices[chunk.request_id, chunk.index]
        return choice.index, choice.push(chunk, self._prompt_logprobs.get(chunk.request_id, ()))

    def events(self, chunk: Chunk) -> list[dict[str, Any]]:
        """The stream's next objects."""
        return [
            self._envelope.event([_choice(index, delta.text, delta.logprobs, delta.finish)])
            for index, delta in self.push(chunk)
            if delta.text or delta.finish is not None or (delta.logprobs and delta.logprobs["tokens"])
        ]

    def gather(self, chunk: Chunk) -> None:
        """Keep what a whole answer will be made of."""
        for index, delta in self.push(chunk):
            self._gathered[index].append(delta)

    def whole(self) -> dict[str, Any]:
        """The answer, once every chunk was gathered."""
        shown: list[dict[str, Any]] = []
        for row in self._prompts:
            best = row
            if self._work.n < len(row):
                best = sorted(row, key=lambda item: -item[0].mean_logprob)[: self._work.n]
            for _, deltas in best:
                logprobs = None if self._work.logprobs is None else joined([item.logprobs or {} for item in deltas])
                text = "".join(item.text for item in deltas)
                shown.append(_choice(len(shown), text, logprobs, deltas[-1].finish))
        return self._envelope.whole(shown)


def _choice(
    index: int, text: str, logprobs: dict[str, list[Any]] | None, finish: FinishReason | None
) -> dict[str, Any]:
    return {
        "index": index,
        "text": text,
        "logprobs": logprobs,
        "finish_reason": None if finish is None else finish.value,
    }
