"""From what a caller gives to what the scheduler takes: every check that needs the model, made once, before the queue.

``SamplingParams`` has checked itself. Here it meets the model's limits, so that whatever enters the inbox can run to
its end: the prompt fits, the tokens exist, the whole sequence fits an empty KV pool. Nothing is clipped silently:
``max_tokens=None`` means "up to the end", any other value is kept or refused (decision 0007).
"""

from __future__ import annotations

import math
import operator
import secrets
from collections.abc import Callable, Iterable, Sized
from dataclasses import dataclass

from shoal.core.grammar import GrammarSpec
from shoal.core.params import SamplingParams
from shoal.core.request import Request
from shoal.errors import InvalidRequestError

TOO_LONG = "context_length_exceeded"  # the word that OpenAI's API has for it
_SEED_MASK = (1 << 64) - 1
# Seeds drawn here are reported to users, often as JSON, where integers above 2**53 are not safe.
_DRAWN_SEED_BITS = 53


def refuse_grammar(spec: GrammarSpec) -> object:
    """What a backend without a vocabulary says to every constraint."""
    raise InvalidRequestError(spec.field, "this engine was started without a vocabulary, so it cannot constrain texts")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a request must fit.

    context_length: most tokens of prompt and completion together.
    vocab_size: token ids are in [0, vocab_size).
    pool_tokens: tokens that the whole KV pool holds.
    max_waiting: completions that the waiting queue holds.
    eos_ids: tokens by which the model ends a text.
    check_grammar: raises InvalidRequestError for a constraint that the backend cannot honour; what it gives keeps the
        constraint ready.
    """

    context_length: int
    vocab_size: int
    pool_tokens: int
    max_waiting: int
    eos_ids: frozenset[int]
    check_grammar: Callable[[GrammarSpec], object] = refuse_grammar

    @property
    def longest(self) -> int:
        """Most tokens of one sequence. The last token is never fed back, so the pool need not hold it."""
        return min(self.context_length, self.pool_tokens + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class EmptyResult:
    """The answer to ``max_tokens=0`` without a prompt to score: valid, and nothing to compute."""

    prompt_ids: tuple[int, ...]
    n: int


def resolve(
    request_id: str,
    prompt_ids: Iterable[int],
    params: SamplingParams,
    limits: Limits,
    *,
    priority: int = 0,
    deadline: float | None = None,
    cache_salt: str | None = None,
    tenant: str = "",
    weight: float = 1.0,
) -> Request | EmptyResult:
    """Check a request against the model; ``InvalidRequestError`` names the field that is wrong."""
    prompt = _check_prompt(prompt_ids, limits)
    _check_ids("logit_bias", params.logit_bias, limits)
    _check_ids("stop_token_ids", params.stop_token_ids, limits)
    _check_order(priority, deadline, cache_salt)
    if params.n > limits.max_waiting:
        raise InvalidRequestError(
            "n", f"{params.n} completions never fit a waiting queue of {limits.max_waiting}; raise max_waiting"
        )
    compiled = None if params.constraint is None else limits.check_grammar(params.constraint)
    max_tokens = _resolve_max_tokens(len(prompt), params, limits)
    if max_tokens == 0 and (params.prompt_logprobs is None or len(prompt) == 1):
        return EmptyResult(prompt_ids=prompt, n=params.n)
    ends = frozenset() if params.ignore_eos else limits.eos_ids
    seed = secrets.randbits(_DRAWN_SEED_BITS) if params.seed is None else params.seed & _SEED_MASK
    return Request(
        request_id=request_id,
        prompt_ids=prompt,
        params=params,
        max_tokens=max_tokens,
        stop_ids=ends | frozenset(params.stop_token_ids),
        seed=seed,
        priority=priority,
        deadline=deadline,
        cache_salt=cache_salt,
        tenant=tenant,
        weight=weight,
        compiled=compiled,
    )


def _check_prompt(prompt_ids: Iterable[int], limits: Limits) -> tuple[int, ...]:
    if isinstance(prompt_ids, (str, bytes)) or not isinstance(prompt_ids, Iterable):
        raise InvalidRequestError("prompt", f"must be token ids here, got {type(prompt_ids).__name__}")
    if isinstance(prompt_ids, Sized):  # before millions of ids are looked at one by one
        _check_length(len(prompt_ids), limits)
    prompt = tuple(item if type(item) is int else _as_id(item) for item in prompt_ids)
    if not prompt:
        raise InvalidRequestError("prompt", "is empty; at least one token is needed to generate from")
    _check_length(len(prompt), limits)
    _check_ids("prompt", prompt, limits)
    return prompt


def _check_length(count: int, limits: Limits) -> None:
    if count > limits.context_length:
        raise InvalidRequestError(
            "prompt",
            f"has {count} tokens, but the context length is {limits.context_length}; shorten it",
            code=TOO_LONG,
        )


def _as_id(item: object) -> int:
    """An integer of another type (NumPy's, say) as an int; truth values and the rest are refused."""
    if not isinstance(item, bool):
        try:
            return operator.index(item)  # type: ignore[arg-type]
        except TypeError:
            pass
    raise InvalidRequestError("prompt", f"token ids must be integers, got {item!r}")


def _check_ids(field: str, ids: Iterable[int], limits: Limits) -> None:
    for token_id in ids:
        if not 0 <= token_id < limits.vocab_size:
            raise InvalidRequestError(
                field, f"token id {token_id} is outside the vocabulary, [0, {limits.vocab_size - 1}]"
            )


def _check_order(priority: object, deadline: object, cache_salt: object) -> None:
    if isinstance(priority, bool) or not isinstance(priority, int):
        raise InvalidRequestError("priority", f"must be an integer, got {priority!r}")
    if deadline is not None and (
        isinstance(deadline, bool) or not isinstance(deadline, (int, float)) or math.isnan(deadline)
    ):
        raise InvalidRequestError("deadline", f"must be a time on the engine's clock, got {deadline!r}")
    if cache_salt is not None and not isinstance(cache_salt, str):
        raise InvalidRequestError("cache_salt", f"must be a string, got {cache_salt!r}")


def _resolve_max_tokens(num_prompt: int, params: SamplingParams, limits: Limits) -> int:
    if params.max_tokens == 0 and (params.prompt_logprobs is None or num_prompt <= limits.pool_tokens):
        return 0
    if num_prompt >= limits.context_length:
        raise InvalidRequestError(
            "prompt",
            f"has {num_prompt} tokens and fills the context of {limits.context_length}; "
            "no room is left to generate, shorten it",
            code=TOO_LONG,
        )
    if num_prompt > limits.pool_tokens:
        raise InvalidRequestError(
            "prompt",
            f"has {num_prompt} tokens, but the KV cache holds {limits.pool_tokens}; shorten it or raise kv_tokens",
            code=TOO_LONG,
        )
    room = limits.longest - num_prompt
    if params.max_tokens is None:
        if params.min_tokens > room:
            raise InvalidRequestError("min_tokens", f"{params.min_tokens} asked for, but only {room} tokens fit")
        return room
    if num_prompt + params.max_tokens > limits.context_length:
        raise InvalidRequestError(
            "max_tokens",
            f"{num_prompt} prompt tokens and max_tokens {params.max_tokens} exceed the context length "
            f"{limits.context_length}; at most {limits.context_length - num_prompt} fit",
            code=TOO_LONG,
        )
    if params.max_tokens > room:
        raise InvalidRequestError(
            "max_tokens",
            f"{num_prompt} prompt tokens and max_tokens {params.max_tokens} exceed the KV cache of "
            f"{limits.pool_tokens} tokens; at most {room} fit, or raise kv_tokens",
            code=TOO_LONG,
        )
    return params.max_tokens
