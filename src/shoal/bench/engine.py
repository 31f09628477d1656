"""How fast the engine is: rounds of the engine's own steps over real work, for several batch sizes in turn.

Rounds are interleaved over the batch sizes (all sizes once, then all again), so that a machine whose speed drifts
drifts for all of them. Each round has its own scheduler and engine over the one backend, without a prefix cache;
prompts are random tokens, the end of sequence is ignored. The ceilings are measured before and after, and the higher of
the two counts.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from statistics import median
from typing import Any, Protocol

from shoal.backends.base import Backend
from shoal.bench.machine import Disturbance, MachineWatch
from shoal.bench.neighbours import FairShare, Neighbours, fair_share
from shoal.bench.stopwatch import CountingOutbox, KernelTimes, StepRecord, Stopwatch, TimedBackend, TimedScheduler
from shoal.bench.summary import BatchFigures, summarize
from shoal.bench.work import Item, Work, draw
from shoal.core.params import SamplingParams
from shoal.core.request import Request
from shoal.core.scheduler import SchedulerConfig
from shoal.engine.engine import Engine
from shoal.engine.inbox import Inbox
from shoal.engine.messages import Submit
from shoal.engine.request import resolve
from shoal.errors import ConfigError
from shoal.perf.ceilings import Ceilings
from shoal.perf.step_cost import ModelCost
from shoal.text.tokenizer import Tokenizer

MOST_MOVED = 0.10  # of a ceiling, from the beginning to the end of a run


class Notice(Protocol):
    """Called before each round."""

    def __call__(self, done: int, total: int, what: str) -> None:
        """Tell that ``done`` of ``total`` rounds are over, and what begins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What is measured.

    kernel_times: seconds of the backend's last step by kind of operation.
    params: how tokens are chosen.
    threads, cores: that compute, and that there are.
    """

    backend: Backend
    kernel_times: KernelTimes
    tokenizer: Tokenizer
    cost: ModelCost
    params: SamplingParams
    token_budget: int
    threads: int
    cores: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BesideFigures:
    """One batch size beside busy processes. Times of a step at the median, all rounds together."""

    batch: int
    neighbours: int
    step_ms_alone: float
    step_ms_beside: float
    taken_cores: float
    fair: FairShare

    @property
    def slowdown(self) -> float:
        """How many times as long a step takes."""
        return self.step_ms_beside / self.step_ms_alone

    def as_record(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "neighbours": self.neighbours,
            "step_ms_p50_alone": self.step_ms_alone,
            "step_ms_p50_beside": self.step_ms_beside,
            "slowdown": self.slowdown,
            "taken_cores": self.taken_cores,
            "fair_slowdown": self.fair.by_count,
            "fair_slowdown_by_time_taken": self.fair.by_taken,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReport:
    """One run. ``ceilings`` are those that counted. ``beside`` is empty unless there were neighbours."""

    started: datetime
    seconds: float
    results: tuple[BatchFigures, ...]
    beside: tuple[BesideFigures, ...]
    ceilings: Ceilings
    disturbance: Disturbance
    warnings: tuple[str, ...]


def check_fit(work: Work, batches: Sequence[int], context_length: int, pool_blocks: int, block_size: int) -> None:
    """ConfigError that names the option if the work does not fit the model's context or the KV cache."""
    if work.longest > context_length:
        raise ConfigError(
            "prompt_len",
            f"{work.prompt_len} prompt and {work.output_len} output tokens exceed the context of {context_length}; "
            "lower prompt_len or output_len",
        )
    for batch in batches:
        if work.blocks(batch, block_size) > pool_blocks:
            raise ConfigError(
                "batch",
                f"{batch} sequences of {work.longest} tokens need {work.blocks(batch, block_size) * block_size} tokens "
                f"of KV cache, but it holds {pool_blocks * block_size}; lower batch or the lengths",
            )


def measure(
    subject: Subject,
    work: Work,
    batches: Sequence[int],
    *,
    rounds: int,
    seed: int,
    measure_ceilings: Callable[[Sequence[str] | None], Ceilings],
    neighbours: int = 0,
    notice: Notice = lambda done, total, what: None,
) -> EngineReport:
    """Run everything. ConfigError if it does not fit (see ``check_fit``).

    measure_ceilings: of these paths, or of all that the machine has.
    """
    shape = subject.backend.cache_shape
    check_fit(work, batches, subject.backend.context_length, shape.num_blocks, shape.block_size)
    started, begin = datetime.now(UTC), time.perf_counter()
    total = 1 + len(batches) * rounds * (2 if neighbours else 1)
    notice(0, total, "measuring the machine, warming up")
    watch = MachineWatch()
    first = measure_ceilings(None)
    run_round(subject, replace(work, output_len=2, mixed=False), max(batches), seed)
    alone: dict[int, list[list[StepRecord]]] = {batch: [] for batch in batches}
    beside: dict[int, list[list[StepRecord]]] = {batch: [] for batch in batches}
    taken = {batch: [0.0, 0.0] for batch in batches}  # processor seconds, and seconds
    done = 1
    for number in range(rounds):
        for batch in batches:
            notice(done, total, f"batch {batch}, round {number + 1} of {rounds}")
            alone[batch].append(run_round(subject, work, batch, seed + number))
            done += 1
            if not neighbours:
                continue
            notice(done, total, f"batch {batch} beside {neighbours}, round {number + 1} of {rounds}")
            with Neighbours(neighbours) as company:
                cpu, clock = company.cpu_seconds(), time.perf_counter()
                beside[batch].append(run_round(subject, work, batch, seed + number))
                taken[batch][0] += company.cpu_seconds() - cpu
                taken[batch][1] += time.perf_counter() - clock
            done += 1
    last = measure_ceilings(subject.cost.paths)
    disturbance = watch.report(sum(cpu for cpu, _ in taken.values()))
    ceilings = first.raised_to(last)
    return EngineReport(
        started=started,
        seconds=time.perf_counter() - begin,
        results=tuple(summarize(batch, alone[batch], subject.cost, ceilings, mixed=work.mixed) for batch in batches),
        beside=tuple(
            _beside(
                subject,
                batch,
                neighbours,
                alone[batch],
                beside[batch],
                taken_cores=taken[batch][0] / taken[batch][1],
            )
            for batch in batches
            if neighbours
        ),
        ceilings=ceilings,
        disturbance=disturbance,
        warnings=(*disturbance.warnings(subject.cores), *_moved(first, last)),
    )


def run_round(subject: Subject, work: Work, batch: int, seed: int) -> list[StepRecord]:
    """One batch size once: its steps in order."""
    backend = subject.backend
    stopwatch = Stopwatch()
    vocabulary = [token for token in range(backend.vocab_size) if not subject.tokenizer.is_control(token)]
    items = draw(work, batch, vocabulary, seed)
    config = SchedulerConfig(
        max_num_seqs=batch,
        token_budget=subject.token_budget,
        max_waiting=len(items),
        prefix_caching=False,
        watermark=0.0,  # the pool is as large as the work
    )
    engine = Engine(
        TimedBackend(backend, subject.kernel_times, stopwatch),
        subject.tokenizer,
        TimedScheduler(config, backend.cache_shape, stopwatch),
        Inbox(len(items)),
        time.perf_counter,
    )
    outbox = CountingOutbox(stopwatch)
    for number, item in enumerate(items):
        engine.inbox.submit(Submit(_request(engine, number, item, subject.params), outbox, engine.clock()))
    gc.collect()
    records = []
    while stopwatch.finished < len(items):
        record = stopwatch.record(engine.step)
        outbox.check()
        if record is not None:
            records.append(record)
    return records


def _request(engine: Engine, number: int, item: Item, params: SamplingParams) -> Request:
    exact = replace(params, max_tokens=item.output_len, ignore_eos=True)
    request = resolve(str(number), item.prompt_ids, exact, engine.limits)
    assert isinstance(request, Request)  # only no tokens at all would give something else
    return request


def _beside(
    subject: Subject,
    batch: int,
    neighbours: int,
    alone: Sequence[Sequence[StepRecord]],
    beside: Sequence[Sequence[StepRecord]],
    *,
    taken_cores: float,
) -> BesideFigures:
    return BesideFigures(
        batch=batch,
        neighbours=neighbours,
        step_ms_alone=_median_ms(alone),
        step_ms_beside=_median_ms(beside),
        taken_cores=taken_cores,
        fair=fair_share(subject.threads, subject.cores, neighbours, taken_cores),
    )


def _median_ms(rounds: Sequence[Sequence[StepRecord]]) -> float:
    """Of steps that only decode."""
    return 1e3 * median(
        step.seconds for steps in rounds for step in steps if all(entry.num_generated for entry in step.plan.entries)
    )


def _moved(first: Ceilings, last: Ceilings) -> list[str]:
    return [
        f"the machine's speed moved during the run: {name} {change:+.0%}"
        for name, change in last.change_from(first).items()
        if abs(change) > MOST_MOVED
    ]
