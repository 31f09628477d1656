"""The values that cross between scheduler, backend and engine: what to run, what came out, what the outside learns.

Named tuples rather than frozen dataclasses: as immutable, and built several times faster, which matters in a loop that
builds one per sequence and step. No arrays here; a backend makes its own.
"""

from __future__ import annotations

from typing import NamedTuple

from shoal.core.request import FinishReason, Request


class StepEntry(NamedTuple):
    """The rows of one sequence in one step: positions [start, start + len(token_ids))."""

    seq_id: int
    request: Request
    index: int  # type: ignore[assignment]  # which of the request's n completions; hides tuple.index
    start: int  # position of the first row; KV of [0, start) is in the cache
    token_ids: tuple[int, ...]  # input tokens of the rows
    block_table: tuple[int, ...]  # the same object from step to step until a block is added
    samples: bool  # whether the last row's logits yield a token, at position start + len(token_ids)
    num_generated: int  # tokens generated before this step
    history: tuple[
        int, ...
    ]  # prompt + generated tokens when needed (penalties; a constraint after a recompute), else ()
    scores: bool = False  # whether the rows of prompt tokens that have a successor give its log-probability

    @property
    def num_scored(self) -> int:
        """Rows [start, start + num_scored) are scored; the prompt's last row has no successor to score."""
        if not self.scores:
            return 0
        return min(self.start + len(self.token_ids), len(self.request.prompt_ids) - 1) - self.start


class StepPlan(NamedTuple):
    """One step. ``entries`` is empty only when there is no work."""

    step_id: int
    entries: tuple[StepEntry, ...]
    num_rows: int
    preempted: tuple[int, ...]  # seq_ids that lost their blocks in this schedule


class TokenLogprobs(NamedTuple):
    """Log-probability of the chosen token and the most likely alternatives, best first."""

    logprob: float
    top: tuple[tuple[int, float], ...]


class EntryResult(NamedTuple):
    """What one entry gave: tokens (none for a chunk that does not sample), or an error that concerns it alone."""

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()  # one per token, or empty when not asked for
    error: str | None = None
    ended: bool = False  # the completion's constraint allows nothing after these tokens
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # of the entry's scored rows


class StepResult(NamedTuple):
    """Results in the order of ``StepPlan.entries``."""

    entries: tuple[EntryResult, ...]


class TokenDelta(NamedTuple):
    """What the outside learns about one completion after a step."""

    seq_id: int
    request_id: str
    index: int  # type: ignore[assignment]
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    finish: FinishReason | None
    error: str | None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # of all the prompt, with the first delta of a scored sequence


class CacheShape(NamedTuple):
    """The paged KV cache, decided once by the backend."""

    num_blocks: int
    block_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str  # "int8", "bf16" or "f32"

    @property
    def num_tokens(self) -> int:
        """Tokens that fit."""
        return self.num_blocks * self.block_size
