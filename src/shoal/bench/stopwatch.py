"""Timing the parts of the engine's own step, from outside: its scheduler, its backend and its outbox look at a clock.

The engine runs unchanged. What lies between the commit and the end of the step is the making and handing out of text;
what lies nowhere is the rest. Work that only the benchmark needs (counting a step's cost) is put off until the round is
over: a step keeps its plan, which is a value.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from shoal.backends.base import Backend
from shoal.core.grammar import GrammarSpec
from shoal.core.plan import CacheShape, StepPlan, StepResult, TokenDelta
from shoal.core.scheduler import Scheduler, SchedulerConfig
from shoal.engine.messages import Chunk
from shoal.errors import EngineError, RequestFailedError

KernelTimes = Callable[[], Mapping[str, float]]
SAMPLING = "sample"  # the kind of operation that is not the model's


class StepRecord(NamedTuple):
    """One step, in seconds.

    plan: what it ran. tokens: handed out. kernels: by kind of operation, sampling included. packing: plan to arrays
    and results back. text: from the commit to the end of the step, without what the outbox took.
    """

    plan: StepPlan
    tokens: int
    seconds: float
    kernels: Mapping[str, float]
    packing: float
    scheduling: float
    text: float

    def split(self) -> dict[str, float]:
        """Where the time went; the parts add up to the step."""
        parts = {kind: value for kind, value in self.kernels.items() if kind != SAMPLING}
        parts["sampling"] = self.kernels.get(SAMPLING, 0.0)
        parts.update(packing=self.packing, scheduling=self.scheduling, text=self.text)
        parts["rest"] = self.seconds - sum(parts.values())
        return parts


@dataclass(slots=True)
class Stopwatch:
    """The parts of the step that is running."""

    scheduling: float = 0.0
    execute: float = 0.0
    committed: float = 0.0  # when
    delivering: float = 0.0
    tokens: int = 0
    finished: int = 0
    plan: StepPlan | None = None
    kernels: Mapping[str, float] = field(default_factory=dict)

    def record(self, step: Callable[[], None]) -> StepRecord | None:
        """Run a step of the engine; None if it computed nothing."""
        self.scheduling = self.execute = self.committed = self.delivering = 0.0
        self.tokens = 0
        self.plan, self.kernels = None, {}
        begin = time.perf_counter()
        step()
        end = time.perf_counter()
        if self.plan is None:
            return None
        return StepRecord(
            plan=self.plan,
            tokens=self.tokens,
            seconds=end - begin,
            kernels=self.kernels,
            packing=self.execute - sum(self.kernels.values()),
            scheduling=self.scheduling,
            text=end - self.committed - self.delivering,
        )


class TimedScheduler(Scheduler):
    """The scheduler, timed."""

    def __init__(self, config: SchedulerConfig, cache: CacheShape, watch: Stopwatch) -> None:
        super().__init__(config, cache)
        self._watch = watch

    def schedule(self, now: float) -> StepPlan:
        """See ``Scheduler``."""
        begin = time.perf_counter()
        plan = super().schedule(now)
        self._watch.scheduling += time.perf_counter() - begin
        return plan

    def commit(self, plan: StepPlan, result: StepResult) -> tuple[TokenDelta, ...]:
        """See ``Scheduler``."""
        begin = time.perf_counter()
        deltas = super().commit(plan, result)
        self._watch.committed = time.perf_counter()
        self._watch.scheduling += self._watch.committed - begin
        return deltas


class TimedBackend:
    """Implements ``Backend`` over another, timed. ``kernel_times`` gives the last step's seconds by operation."""

    def __init__(self, backend: Backend, kernel_times: KernelTimes, watch: Stopwatch) -> None:
        self._backend = backend
        self._kernel_times = kernel_times
        self._watch = watch

    @property
    def cache_shape(self) -> CacheShape:
        """The backend's."""
        return self._backend.cache_shape

    @property
    def vocab_size(self) -> int:
        """The backend's."""
        return self._backend.vocab_size

    @property
    def context_length(self) -> int:
        """The backend's."""
        return self._backend.context_length

    def execute(self, plan: StepPlan) -> StepResult:
        """Run the step, and remember it."""
        watch = self._watch
        begin = time.perf_counter()
        result = self._backend.execute(plan)
        watch.execute += time.perf_counter() - begin
        watch.plan = plan
        watch.kernels = self._kernel_times()
        return result

    def check_grammar(self, spec: GrammarSpec) -> object:
        """See ``Backend``."""
        return self._backend.check_grammar(spec)

    def forget(self, seq_id: int) -> None:
        """See ``Backend``."""
        self._backend.forget(seq_id)

    def close(self) -> None:
        """Nothing: the backend outlives the engine of one round."""


class CountingOutbox:
    """Takes the chunks of all requests and counts. A failure is kept, for the loop to raise."""

    def __init__(self, watch: Stopwatch) -> None:
        self._watch = watch
        self._failure: Exception | None = None

    def deliver(self, chunks: Sequence[Chunk]) -> None:
        """Count tokens and ends."""
        begin = time.perf_counter()
        for chunk in chunks:
            self._watch.tokens += len(chunk.token_ids)
            self._watch.finished += chunk.finish is not None
            if chunk.error is not None:
                self._failure = RequestFailedError(chunk.error)
        self._watch.delivering += time.perf_counter() - begin

    def fail(self, error: EngineError) -> None:
        """Keep it."""
        self._failure = error

    def check(self) -> None:
        """Raise what went wrong."""
        if self._failure is not None:
            raise self._failure
