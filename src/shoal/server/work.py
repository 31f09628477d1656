"""A request that was found valid: what the engine is to do, and how its answer is to look."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.core.request import Request
from shoal.engine.request import EmptyResult
from shoal.server.service import ServedModel
from shoal.tools.use import ToolUse


@dataclass(frozen=True, kw_only=True)
class Work:
    """One HTTP request's worth of engine requests, one for each prompt, all with the same parameters.

    served: the model that does it.
    requests: in the prompts' order.
    n: choices to show per prompt; of the ``candidates`` that are made, the most likely ones.
    logprobs: alternatives to show beside each token's own log-probability; None shows nothing.
    stream: events instead of one answer.
    include_usage: a last event with the usage. timings: a timings object in the answer.
    """

    served: ServedModel
    requests: tuple[Request | EmptyResult, ...]
    n: int
    candidates: int
    logprobs: int | None
    stream: bool
    include_usage: bool
    timings: bool


@dataclass(frozen=True, kw_only=True)
class CompletionWork(Work):
    """echoes: the prompts' texts, each to stand in front of its choices; empty without ``echo``."""

    echoes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class ChatWork(Work):
    """tools: how calls are found in the text."""

    tools: ToolUse
