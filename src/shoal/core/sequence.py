"""One completion on its way: its tokens, its blocks, and how far it has been computed.

There are no phases. A sequence has a length and ``num_computed``; prefill, a chunk of it, a decode, a prefix hit and
recomputation after preemption are all the question how far behind it is.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType

from shoal.core.block_pool import NO_PREFIX
from shoal.core.errors import InternalError
from shoal.core.plan import TokenLogprobs
from shoal.core.request import Request


class State(Enum):
    """Where a sequence stands."""

    WAITING = "waiting"  # new or preempted: holds no blocks
    RUNNING = "running"
    HELD = "held"  # done, but static batching keeps its place until the batch is done
    FINISHED = "finished"


TRANSITIONS: Mapping[State, frozenset[State]] = MappingProxyType(
    {
        State.WAITING: frozenset({State.RUNNING, State.FINISHED}),
        State.RUNNING: frozenset({State.WAITING, State.HELD, State.FINISHED}),
        State.HELD: frozenset({State.FINISHED}),
        State.FINISHED: frozenset(),
    }
)


@dataclass(slots=True, eq=False)
class Sequence:
    """Engine thread only. ``key`` orders it among others under the policy; smaller is served first.

    block_table is replaced, never changed, so its identity says whether it is still the same.
    """

    seq_id: int
    request: Request
    index: int
    key: tuple[float, ...]
    salt: Hashable
    publishes: bool
    tokens: list[int]
    num_prompt: int
    num_computed: int = 0
    num_cached: int = 0  # tokens found in the prefix cache at the first admission
    block_table: tuple[int, ...] = ()
    num_published: int = 0  # blocks
    prefix_id: int = NO_PREFIX
    state: State = State.WAITING
    num_preemptions: int = 0
    admitted: bool = field(default=False)  # ever
    scored: list[TokenLogprobs] | None = None  # of the prompt so far; None when there is nothing (more) to score

    @property
    def num_generated(self) -> int:
        """Tokens beyond the prompt."""
        return len(self.tokens) - self.num_prompt

    @property
    def remaining(self) -> int:
        """Tokens whose keys and values are not computed yet; 1 in the middle of decoding."""
        return len(self.tokens) - self.num_computed

    def move_to(self, state: State) -> None:
        """Change state along the table; anything else is an InternalError."""
        if state not in TRANSITIONS[self.state]:
            raise InternalError(f"sequence {self.seq_id} cannot go from {self.state.value} to {state.value}")
        self.state = state
