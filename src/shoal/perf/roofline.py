"""The least time a step can take on a machine: of memory and arithmetic, each at its measured best, the longer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shoal.perf.ceilings import Ceilings
from shoal.perf.step_cost import StepCost

MEMORY = "memory"


@dataclass(frozen=True, slots=True)
class Bound:
    """A lower bound, in seconds: of memory, and of each arithmetic path, which take turns on the same cores."""

    memory: float
    compute: Mapping[str, float]

    @property
    def seconds(self) -> float:
        """Memory can be read while the cores compute, so the longer of the two."""
        return max(self.memory, sum(self.compute.values()))

    @property
    def binding(self) -> str:
        """``MEMORY``, or the path that takes the largest part of the arithmetic."""
        if self.memory >= sum(self.compute.values()):
            return MEMORY
        return max(self.compute, key=lambda path: self.compute[path])


def step_bound(cost: StepCost, ceilings: Ceilings) -> Bound:
    """The least time for a step of this cost."""
    return Bound(
        memory=cost.bytes / ceilings.bandwidth,
        compute={path: count / ceilings.peak(path) for path, count in cost.ops.items() if count},
    )
