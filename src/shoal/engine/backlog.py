"""What is on its way through the engine, and how long a newcomer will wait behind it.

The engine is taken for so many slots. Each completion holds one for as many steps as it is expected to have tokens
left: what its ``max_tokens`` allows, or the mean length of those that ended lately if that is less (lengths without a
memory: one that runs is expected to go on for as long as one that starts). Whoever waits takes the slot that is free
first. Prompts are computed beside the others, a step's budget of rows at a time, so they come on top. Times a step's
mean time lately, that is the wait.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from heapq import heapify, heapreplace

from shoal.core.request import Request

_FIRST_GUESS = 256.0  # tokens, while nothing has ended yet
_MEMORY = 0.05  # of the mean length: weight of the newest


@dataclass(slots=True)
class Outstanding:
    """One completion. prompt: tokens to compute before its first; most: tokens it may have; produced: it has."""

    tenant: str
    priority: int
    prompt: int
    most: int
    produced: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How the engine goes: completions at once, rows and seconds of a step."""

    slots: int
    rows: int
    step_seconds: float


class Backlog:
    """The outstanding completions of all requests, first those that came first. Not thread-safe."""

    def __init__(self) -> None:
        self._completions: dict[tuple[str, int], Outstanding] = {}
        self._mean_length = _FIRST_GUESS

    def __len__(self) -> int:
        return len(self._completions)

    def add(self, request: Request) -> None:
        """A request was queued."""
        for index in range(request.params.n):
            self._completions[request.request_id, index] = Outstanding(
                request.tenant,
                request.priority,
                len(request.prompt_ids) if index == 0 else 0,  # the others share it
                max(request.max_tokens, 1),
            )

    def progress(self, request_id: str, index: int, tokens: int, *, ended: bool) -> None:
        """A completion gained tokens, or ended by itself; unknown ones are ignored."""
        found = self._completions.get((request_id, index))
        if found is None:
            return
        found.produced += tokens
        if ended:
            self._mean_length += _MEMORY * (found.produced - self._mean_length)
            del self._completions[request_id, index]

    def drop(self, request_id: str, n: int) -> None:
        """A request was given up; what it was long says nothing about others."""
        for index in range(n):
            self._completions.pop((request_id, index), None)

    def waiting(self, tenant: str) -> int:
        """A tenant's completions without a token."""
        return sum(item.tenant == tenant and not item.produced for item in self._completions.values())

    def wait(self, pace: Pace, priority: int) -> float:
        """Seconds until a completion that came now would be begun; those of lower priority do not count."""
        return self._seconds_until(pace, [item for item in self._completions.values() if item.priority >= priority])

    def room(self, pace: Pace, limit: int, count: int) -> float:
        """Seconds until ``count`` more can wait, if at most ``limit`` may."""
        everybody = list(self._completions.values())
        # The queue has room when all but those that may wait beside the newcomers have begun.
        may_wait = max(limit - count, 0)
        begun = len(everybody) - may_wait
        return self._seconds_until(pace, everybody[: max(begun - 1, 0)]) if begun > 0 else 0.0

    def _seconds_until(self, pace: Pace, ahead: Iterable[Outstanding]) -> float:
        """When the one behind all of these begins."""
        ends = [0.0] * pace.slots
        rows = 0.0
        heapify(ends)
        for item in sorted(ahead, key=lambda item: item.produced == 0):  # those that run hold a slot already
            left = max(min(item.most - item.produced, self._mean_length), 1.0)
            heapreplace(ends, ends[0] + left)
            if not item.produced:
                rows += item.prompt
        return (ends[0] + rows / pace.rows) * pace.step_seconds if ends[0] else 0.0
