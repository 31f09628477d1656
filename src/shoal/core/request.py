"""A request as the scheduler sees it: everything resolved, nothing left to look up.

The engine resolves a user's ``SamplingParams`` against the model (context length, end-of-sequence ids, a drawn seed)
into a ``Request``; from here on nothing changes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from shoal.core.params import SamplingParams


class FinishReason(StrEnum):
    """Why a completion ended."""

    STOP = "stop"  # end of sequence, a stop token or a stop string
    LENGTH = "length"  # max_tokens, or the context's end
    ABORT = "abort"  # the caller went away
    ERROR = "error"  # this request failed inside a step


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt and what to do with it.

    request_id: unique among live requests.
    prompt_ids: at least one token id.
    params: as the user gave them.
    max_tokens: resolved limit on generated tokens, fits the context; 0 only where the prompt is to be scored.
    stop_ids: tokens that end a completion: end-of-sequence (unless ignored) and ``params.stop_token_ids``.
    seed: resolved 64-bit seed; completion ``index`` of ``n`` uses its own stream, derived from (seed, index).
    priority: higher is served first under the priority policy.
    deadline: absolute time on the engine's clock by which the request wants to be done, or None (deadline policy).
    cache_salt: requests share cached prefixes only within equal salts; None is the common salt.
    tenant: on whose behalf; tenants of one priority share the engine by ``weight`` under the priority policy.
    compiled: held, and not looked at: it keeps the constraint ready in the backend that compiled it.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    max_tokens: int
    stop_ids: frozenset[int]
    seed: int
    priority: int = 0
    deadline: float | None = None
    cache_salt: str | None = None
    tenant: str = ""
    weight: float = 1.0
    compiled: object = field(default=None, repr=False, compare=False)

    @property
    def num_scored(self) -> int:
        """Rows whose log-probabilities are wanted: row p tells how likely token p + 1 of the prompt was."""
        return 0 if self.params.prompt_logprobs is None else len(self.prompt_ids) - 1
