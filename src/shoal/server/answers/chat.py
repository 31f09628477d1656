"""Answers of ``/v1/chat/completions``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shoal.core.request import FinishReason
from shoal.engine.client import StreamedRequest
from shoal.engine.messages import Chunk
from shoal.server.answers.envelope import Envelope
from shoal.server.answers.logprobs import chat_entries
from shoal.server.work import ChatWork
from shoal.tools.parser import ContentDelta, ToolCallDelta

TOOL_CALLS = "tool_calls"


@dataclass(frozen=True, slots=True)
class Delta:
    """What one choice gained: content or a piece of a call, the entries of its tokens, its end."""

    content: str = ""
    call: ToolCallDelta | None = None
    logprobs: Sequence[dict[str, Any]] = ()
    finish: str | None = None


class ChatChoice:
    """One completion on its way."""

    def __init__(self, work: ChatWork, index: int) -> None:
        self.index = index
        self._texts = work.served.texts
        self._top = work.logprobs
        self._parser = work.tools.parser()

    def push(self, chunk: Chunk) -> list[Delta]:
        """What the chunk adds."""
        entries: Sequence[dict[str, Any]] = ()
        if self._top is not None:
            entries = chat_entries(self._texts, chunk.token_ids, chunk.logprobs, self._top)
        deltas = [_delta(item) for item in self._parse(chunk)]
        if entries:
            # Texts may lag behind their tokens; the entries go with whatever comes in the same step.
            first = deltas[0] if deltas else Delta()
            deltas[:1] = [Delta(first.content, first.call, entries)]
        if chunk.finish is not None:
            deltas.append(Delta(finish=self._finish(chunk.finish)))
        return deltas

    def _parse(self, chunk: Chunk) -> list[ContentDelta | ToolCallDelta]:
        if self._parser is None:
            return [ContentDelta(chunk.text)] if chunk.text else []
        found = self._parser.push(chunk.text)
        return found if chunk.finish is None else [*found, *self._parser.finish()]

    def _finish(self, finish: FinishReason) -> str:
        called = self._parser is not None and self._parser.num_calls > 0
        return TOOL_CALLS if called and finish is FinishReason.STOP else finish.value


class ChatAnswer:
    """All choices of one request, in ``Answer``'s manner."""

    def __init__(self, work: ChatWork, requests: Sequence[StreamedRequest], envelope: Envelope) -> None:
        self._work = work
        self._envelope = envelope
        self._choices = [ChatChoice(work, index) for index in range(work.n)]
        self._gathered: list[list[Delta]] = [[] for _ in self._choices]

    def opening(self) -> list[dict[str, Any]]:
        """Each choice says first whose message it is."""
        opened = {"role": "assistant", "content": ""}
        return [self._envelope.event([self._event(index, opened, Delta())]) for index in range(self._work.n)]

    def events(self, chunk: Chunk) -> list[dict[str, Any]]:
        """The stream's next objects."""
        return [
            self._envelope.event([self._event(chunk.index, _shown(delta), delta)])
            for delta in self._choices[chunk.index].push(chunk)
        ]

    def gather(self, chunk: Chunk) -> None:
        """Keep what a whole answer will be made of."""
        self._gathered[chunk.index] += self._choices[chunk.index].push(chunk)

    def whole(self) -> dict[str, Any]:
        """The answer, once every chunk was gathered."""
        return self._envelope.whole([self._whole(index, deltas) for index, deltas in enumerate(self._gathered)])

    def _event(self, index: int, shown: dict[str, Any], delta: Delta) -> dict[str, Any]:
        logprobs = None
        if delta.logprobs:
            logprobs = {"content": list(delta.logprobs), "refusal": None}
        return {"index": index, "delta": shown, "logprobs": logprobs, "finish_reason": delta.finish}

    def _whole(self, index: int, deltas: Sequence[Delta]) -> dict[str, Any]:
        content = "".join(item.content for item in deltas)
        calls = _calls([item.call for item in deltas if item.call is not None])
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if calls:
            message = {**message, "content": content or None, "tool_calls": calls}
        logprobs = None
        if self._work.logprobs is not None:
            logprobs = {"content": [entry for item in deltas for entry in item.logprobs], "refusal": None}
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": deltas[-1].finish}


def _delta(found: ContentDelta | ToolCallDelta) -> Delta:
    return Delta(content=found.text) if isinstance(found, ContentDelta) else Delta(call=found)


def _shown(delta: Delta) -> dict[str, Any]:
    if delta.call is not None:
        return {"tool_calls": [_call_piece(delta.call)]}
    if delta.finish is not None:
        return {}
    return {"content": delta.content}


def _call_piece(call: ToolCallDelta) -> dict[str, Any]:
    if call.id is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": call.index, "id": call.id, "type": "function", "function": function}


def _calls(pieces: Sequence[ToolCallDelta]) -> list[dict[str, Any]]:
    calls: list[dict[str, Any]] = []
    for piece in pieces:
        if piece.id is not None:
            function = {"name": piece.name, "arguments": piece.arguments}
            calls.append({"id": piece.id, "type": "function", "function": function})
        else:
            calls[piece.index]["function"]["arguments"] += piece.arguments
    return calls
