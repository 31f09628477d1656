"""The seam between the engine and whatever computes: a backend executes plans and owns the KV cache's memory."""

from __future__ import annotations

from typing import Protocol

from shoal.core.grammar import GrammarSpec
from shoal.core.plan import CacheShape, StepPlan, StepResult


class Backend(Protocol):
    """Executes plans. Called from one thread at a time.

    ``execute`` is idempotent: running an entry again at the same positions writes the same KV bits and gives the same
    tokens, which is what lets the engine re-run a failed step entry by entry to find the guilty one.
    """

    @property
    def cache_shape(self) -> CacheShape:
        """The paged KV cache as built."""
        ...

    @property
    def vocab_size(self) -> int:
        """Token ids are below it."""
        ...

    @property
    def context_length(self) -> int:
        """Longest sequence, in tokens."""
        ...

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step.

        A fault of one entry is its ``EntryResult.error``; an exception condemns no entry in particular.
        """
        ...

    def check_grammar(self, spec: GrammarSpec) -> object:
        """InvalidRequestError, naming the spec's field, for a constraint that cannot be honoured.

        What comes back keeps the constraint ready: a request holds it to its end. Called from any thread, before a
        request that holds it is queued.
        """
        ...

    def forget(self, seq_id: int) -> None:
        """The sequence will not appear again: drop anything kept for it. Unknown ids are ignored."""
        ...

    def close(self) -> None:
        """Free everything; idempotent."""
        ...
