"""The shapes of answers, for the description of the API at ``/docs``; tests hold real answers against them."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict


class Shape(BaseModel):
    """Part of an answer; there is nothing in it that is not described."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class ErrorObject(Shape):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(Shape):
    """Every error's body."""

    error: ErrorObject


class CachedTokens(Shape):
    """Of the prompt's tokens, those that were found in the prefix cache."""

    cached_tokens: int


class Usage(Shape):
    """Tokens of all prompts and choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class Timings(Shape):
    """Seconds; null where there is nothing to measure.

    queue_s: arrival to first computation. prefill_s: from there to the first token. decode_s: from there to the end.
    compute_s: of the steps that the request was in, the part that its rows were of all rows.
    mean_batch: sequences in those steps, on average.
    """

    queue_s: float | None
    prefill_s: float | None
    decode_s: float | None
    ttft_s: float | None
    total_s: float | None
    mean_batch: float | None
    compute_s: float


class CompletionLogprobs(Shape):
    """One entry per token in each list."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Shape):
    """One completion of one prompt."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None


class CompletionResponse(Shape):
    """The answer of ``/v1/completions``; a stream's objects have the same shape."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage | None = None
    timings: Timings | None = None


class ChatToken(Shape):
    """A token; its bytes say exactly what it is, also when it is half a character."""

    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprobs(ChatToken):
    """A token of the answer, with the most likely ones at its place."""

    top_logprobs: list[ChatToken]


class ChatLogprobs(Shape):
    """One entry per token of the answer."""

    content: list[ChatTokenLogprobs]
    refusal: None


class CalledFunction(Shape):
    """A function's name, and its arguments as JSON."""

    name: str
    arguments: str


class ToolCall(Shape):
    """A call that the model wants made."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatMessage(Shape):
    """The assistant's message."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[ToolCall] | None = None


class ChatChoice(Shape):
    """One answer to the conversation."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]


class ChatResponse(Shape):
    """The answer of ``/v1/chat/completions``."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    timings: Timings | None = None


class PartialFunction(Shape):
    """The name comes with a call's first piece; the arguments' pieces are to be joined."""

    name: str | None = None
    arguments: str


class PartialToolCall(Shape):
    """A piece of the call ``index``."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: PartialFunction


class ChatDelta(Shape):
    """What a choice gained."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    tool_calls: list[PartialToolCall] | None = None


class ChatChunkChoice(Shape):
    """One choice's part of an event."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"] | None


class ChatChunk(Shape):
    """An event of a streamed chat answer."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    timings: Timings | None = None


class Model(Shape):
    """A model. max_model_len: tokens of prompt and answer together."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class ModelList(Shape):
    """The models."""

    object: Literal["list"]
    data: list[Model]


class TokenizeResponse(Shape):
    """A prompt's tokens."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeResponse(Shape):
    """The tokens' text."""

    prompt: str


class Status(Shape):
    """How the server is."""

    status: str


class Version(Shape):
    """Shoal's version."""

    version: str
