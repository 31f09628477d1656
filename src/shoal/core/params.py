"""What a user may ask of one generation: validated on construction, frozen afterwards.

One flat class holds how tokens are chosen and when to stop, because users set both in one breath and every
neighbouring project spells it that way. The error of a bad value names its field.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from shoal.core.grammar import GrammarSpec, choose_constraint
from shoal.errors import InvalidRequestError

MAX_STOP_STRINGS = 64
MAX_STOP_STRING_CHARS = 1024
MAX_STOP_TOKEN_IDS = 256
MAX_LOGIT_BIAS = 4096
MAX_LOGPROBS = 64
MAX_N = 128
MAX_TOKENS_LIMIT = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to choose tokens and when to stop.

    temperature: 0 is greedy; otherwise logits are divided by it.
    top_k: keep the k most likely tokens; 0 keeps all.
    top_p: keep the smallest set of tokens whose probability reaches this; 1 keeps all.
    min_p: drop tokens less likely than this fraction of the most likely one; 0 keeps all.
    repetition_penalty: divides positive and multiplies negative logits of tokens in prompt or output
        (Keskar et al. 2019).
    presence_penalty, frequency_penalty: subtracted from logits of tokens in the output, once and per occurrence
        (OpenAI's definition).
    logit_bias: added to the logits of the given token ids.
    seed: same seed, same tokens, whatever else is in the batch; None draws a fresh one.
    logprobs: None for none, k for the chosen token's log-probability and the k most likely alternatives. They
        describe the model's own distribution, before penalties, bias, temperature and truncation.
    prompt_logprobs: the same for each token of the prompt but the first, given those before it.
    max_tokens: at most so many tokens are generated; None means up to the context's end.
    min_tokens: end-of-sequence and stop tokens are impossible before so many tokens; stop strings are ignored before.
    stop: strings that end the output; they are not part of it.
    stop_token_ids: token ids that end the output; they are not part of its text.
    ignore_eos: the end-of-sequence token is a token like any other.
    n: number of independent completions of the prompt, which is computed once.
    response_format: OpenAI's: the text is JSON of any kind, or fits a JSON schema.
    regex: a regular expression that the whole text matches.
    grammar: a grammar in Lark's syntax, or a ready ``GrammarSpec``. At most one of these three constrains the text.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    n: int = 1
    response_format: Mapping[str, Any] | None = None
    regex: str | None = None
    grammar: str | GrammarSpec | None = None
    constraint: GrammarSpec | None = field(init=False, repr=False, compare=False, default=None)

    def __post_init__(self) -> None:
        _number("temperature", self.temperature, low=0.0, high=100.0)
        _integer("top_k", self.top_k, low=0, high=2**31 - 1)
        _number("top_p", self.top_p, low=0.0, high=1.0, low_open=True)
        _number("min_p", self.min_p, low=0.0, high=1.0)
        _number("repetition_penalty", self.repetition_penalty, low=0.0, high=100.0, low_open=True)
        _number("presence_penalty", self.presence_penalty, low=-100.0, high=100.0)
        _number("frequency_penalty", self.frequency_penalty, low=-100.0, high=100.0)
        if self.seed is not None:
            _integer("seed", self.seed, low=-(2**63), high=2**64 - 1)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _integer(name, getattr(self, name), low=0, high=MAX_LOGPROBS)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, low=0, high=MAX_TOKENS_LIMIT)
        _integer("min_tokens", self.min_tokens, low=0, high=MAX_TOKENS_LIMIT)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError("min_tokens", f"{self.min_tokens} is more than max_tokens {self.max_tokens}")
        if not isinstance(self.ignore_eos, bool):
            raise InvalidRequestError("ignore_eos", f"must be true or false, got {self.ignore_eos!r}")
        _integer("n", self.n, low=1, high=MAX_N)
        object.__setattr__(self, "stop", _stop_strings(self.stop))
        ids = _token_ids("stop_token_ids", self.stop_token_ids, MAX_STOP_TOKEN_IDS)
        object.__setattr__(self, "stop_token_ids", ids)
        object.__setattr__(self, "logit_bias", _logit_bias(self.logit_bias))
        object.__setattr__(self, "constraint", choose_constraint(self.response_format, self.regex, self.grammar))

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0.0

    @property
    def penalized(self) -> bool:
        """Whether the choice depends on the tokens so far."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> SamplingParams:
        """Build from a mapping of field names; an unknown name is an error that lists the known ones."""
        known = parameter_names()
        for name in values:
            if name not in known:
                raise InvalidRequestError(str(name), f"unknown parameter; known are {', '.join(sorted(known))}")
        return cls(**values)

    def with_changes(self, **changes: Any) -> SamplingParams:
        """A validated copy with some fields replaced."""
        return replace(self, **changes)


def parameter_names() -> frozenset[str]:
    """What a caller may set."""
    return frozenset(item.name for item in fields(SamplingParams) if item.init)


def _number(name: str, value: object, *, low: float, high: float, low_open: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InvalidRequestError(name, f"must be a number, got {value!r}")
    # Bounds are compared before any conversion: a huge int must not overflow a float.
    if isinstance(value, float) and not math.isfinite(value):
        raise InvalidRequestError(name, f"must be finite, got {value!r}")
    if value < low or value > high or (low_open and value == low):
        raise InvalidRequestError(name, f"must be in {'(' if low_open else '['}{low:g}, {high:g}], got {_short(value)}")


def _integer(name: str, value: object, *, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequestError(name, f"must be an integer, got {value!r}")
    if not low <= value <= high:
        raise InvalidRequestError(name, f"must be in [{low}, {high}], got {_short(value)}")


def _short(value: float) -> str:
    """A number as text, cut when absurdly long (also avoids Python's limit on printing huge integers)."""
    if isinstance(value, int) and abs(value) >= 10**40:
        return "an integer of more than 40 digits"
    return repr(value)


def _stop_strings(value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    if isinstance(value, str):
        value = (value,)
    if not isinstance(value, Iterable):
        raise InvalidRequestError("stop", f"must be a string or a list of strings, got {value!r}")
    items = tuple(value)
    if len(items) > MAX_STOP_STRINGS:
        raise InvalidRequestError("stop", f"at most {MAX_STOP_STRINGS} stop strings, got {len(items)}")
    for item in items:
        if not isinstance(item, str):
            raise InvalidRequestError("stop", f"must hold strings only, got {item!r}")
        if not item:
            raise InvalidRequestError("stop", "a stop string must not be empty")
        if len(item) > MAX_STOP_STRING_CHARS:
            raise InvalidRequestError(
                "stop", f"a stop string has at most {MAX_STOP_STRING_CHARS} characters, got {len(item)}"
            )
    return items


def _token_ids(name: str, value: object, limit: int) -> tuple[int, ...]:
    if value is None:
        return ()
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        raise InvalidRequestError(name, f"must be a list of token ids, got {value!r}")
    items = tuple(value)
    if len(items) > limit:
        raise InvalidRequestError(name, f"at most {limit} token ids, got {len(items)}")
    for item in items:
        _integer(name, item, low=0, high=2**31 - 1)
    return items


def _logit_bias(value: object) -> Mapping[int, float]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise InvalidRequestError("logit_bias", f"must map token ids to numbers, got {value!r}")
    if len(value) > MAX_LOGIT_BIAS:
        raise InvalidRequestError("logit_bias", f"at most {MAX_LOGIT_BIAS} entries, got {len(value)}")
    for key, bias in value.items():
        _integer("logit_bias", key, low=0, high=2**31 - 1)
        _number("logit_bias", bias, low=-1000.0, high=1000.0)
    return dict(sorted(value.items()))
