"""From timed steps to the figures of a batch size. Pure.

A plain load has two phases. Prefill is every step up to the one that computes the last prompt token; the decodes that
already share those steps ride along and count for nothing. Decode is every step after, and the tokens it gave. A mixed
load has no phases: prompt tokens and output tokens are both held against the whole run.

Medians are over rounds, spreads from the worst round to the best. Step times are of the decode phase (of a mixed load:
of all steps), all rounds together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any, NamedTuple

from shoal.bench.stopwatch import StepRecord
from shoal.metrics.percentiles import percentile
from shoal.perf.ceilings import Ceilings
from shoal.perf.roofline import step_bound
from shoal.perf.step_cost import ModelCost, plan_rows, step_cost


class Spread(NamedTuple):
    """A figure over rounds."""

    median: float
    lowest: float
    highest: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseFigures:
    """One phase of a batch size, over all rounds.

    tokens_per_s: what was reached. ceiling_tokens_per_s: what the machine allows. ceiling_fraction: the first over the
    second, round by round.
    bound_by: what the ceiling consists of, "memory" or a path, with its share of the least time.
    step_bytes, step_ops: mean of a step.
    mean_batch: sequences per step.
    split_ms: mean time of a step by part; the parts add up to step_ms_mean.
    """

    tokens_per_s: Spread
    ceiling_tokens_per_s: float
    ceiling_fraction: float
    bound_by: str
    bound_share: float
    step_bytes: float
    step_ops: float
    mean_batch: float
    steps: int
    step_ms_mean: float
    step_ms_p50: float
    step_ms_p99: float
    split_ms: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchFigures:
    """Everything about one batch size. output_tokens_per_s: all generated tokens over the whole run."""

    batch: int
    requests: int
    prefill: PhaseFigures
    decode: PhaseFigures
    output_tokens_per_s: Spread

    def as_record(self) -> dict[str, Any]:
        """For JSON: the decode phase's figures under their plain names, the prefill's with a prefix."""
        decode, prefill = self.decode, self.prefill
        return {
            "batch": self.batch,
            "requests": self.requests,
            "prefill_tokens_per_s": prefill.tokens_per_s.median,
            "decode_tokens_per_s": decode.tokens_per_s.median,
            "output_tokens_per_s": self.output_tokens_per_s.median,
            "ceiling_tokens_per_s": decode.ceiling_tokens_per_s,
            "ceiling_fraction": decode.ceiling_fraction,
            "bound_by": decode.bound_by,
            "bound_share": decode.bound_share,
            "prefill_ceiling_tokens_per_s": prefill.ceiling_tokens_per_s,
            "prefill_ceiling_fraction": prefill.ceiling_fraction,
            "prefill_bound_by": prefill.bound_by,
            "prefill_bound_share": prefill.bound_share,
            "mean_batch": decode.mean_batch,
            "steps": decode.steps,
            "step_bytes": decode.step_bytes,
            "step_ops": decode.step_ops,
            "step_ms_mean": decode.step_ms_mean,
            "step_ms_p50": decode.step_ms_p50,
            "step_ms_p99": decode.step_ms_p99,
            "split_ms": dict(decode.split_ms),
            "prefill_step_ms_mean": prefill.step_ms_mean,
            "prefill_split_ms": dict(prefill.split_ms),
            "spread": {
                "prefill_tokens_per_s": [prefill.tokens_per_s.lowest, prefill.tokens_per_s.highest],
                "decode_tokens_per_s": [decode.tokens_per_s.lowest, decode.tokens_per_s.highest],
                "output_tokens_per_s": [self.output_tokens_per_s.lowest, self.output_tokens_per_s.highest],
            },
        }


class _Phase(NamedTuple):
    """One round's steps of a phase, and the tokens that they count for."""

    steps: Sequence[StepRecord]
    tokens: int


def summarize(
    batch: int, rounds: Sequence[Sequence[StepRecord]], cost: ModelCost, ceilings: Ceilings, *, mixed: bool
) -> BatchFigures:
    """The figures of one batch size, from the steps of each of its rounds."""
    divided = [_mixed_phases(steps) if mixed else _phases(steps) for steps in rounds]
    outputs = [sum(step.tokens for step in steps) / _seconds(steps) for steps in rounds]
    return BatchFigures(
        batch=batch,
        requests=len({entry.request.request_id for step in rounds[0] for entry in step.plan.entries}),
        prefill=_figures([prefill for prefill, _ in divided], cost, ceilings),
        decode=_figures([decode for _, decode in divided], cost, ceilings),
        output_tokens_per_s=_spread(outputs),
    )


def prompt_rows(step: StepRecord) -> int:
    """Rows of a step that are prompt tokens."""
    return sum(len(entry.token_ids) for entry in step.plan.entries if entry.num_generated == 0)


def _phases(steps: Sequence[StepRecord]) -> tuple[_Phase, _Phase]:
    rows = [prompt_rows(step) for step in steps]
    border = max(index for index, count in enumerate(rows) if count) + 1
    after = steps[border:]
    return _Phase(steps[:border], sum(rows)), _Phase(after, sum(step.tokens for step in after))


def _mixed_phases(steps: Sequence[StepRecord]) -> tuple[_Phase, _Phase]:
    return _Phase(steps, sum(map(prompt_rows, steps))), _Phase(steps, sum(step.tokens for step in steps))


def _figures(phases: Sequence[_Phase], cost: ModelCost, ceilings: Ceilings) -> PhaseFigures:
    rates, limits, fractions = [], [], []
    binding: dict[str, float] = {}
    costs = []
    for phase in phases:
        least = 0.0
        for step in phase.steps:
            step_costs = step_cost(cost, plan_rows(step.plan))
            bound = step_bound(step_costs, ceilings)
            least += bound.seconds
            binding[bound.binding] = binding.get(bound.binding, 0.0) + bound.seconds
            costs.append(step_costs)
        seconds = _seconds(phase.steps)
        rates.append(phase.tokens / seconds)
        limits.append(phase.tokens / least)
        fractions.append(least / seconds)
    bound_by = max(binding, key=lambda name: binding[name])
    steps = [step for phase in phases for step in phase.steps]
    times = [step.seconds for step in steps]
    splits = [step.split() for step in steps]
    return PhaseFigures(
        tokens_per_s=_spread(rates),
        ceiling_tokens_per_s=median(limits),
        ceiling_fraction=median(fractions),
        bound_by=bound_by,
        bound_share=binding[bound_by] / sum(binding.values()),
        step_bytes=fmean(item.bytes for item in costs),
        step_ops=fmean(sum(item.ops.values()) for item in costs),
        mean_batch=fmean(len(step.plan.entries) for step in steps),
        steps=len(steps),
        step_ms_mean=_ms(fmean(times)),
        step_ms_p50=_ms(percentile(times, 50)),
        step_ms_p99=_ms(percentile(times, 99)),
        split_ms={part: _ms(fmean(split[part] for split in splits)) for part in splits[0]},
    )


def _seconds(steps: Sequence[StepRecord]) -> float:
    return sum(step.seconds for step in steps)


def _spread(values: Sequence[float]) -> Spread:
    return Spread(median(values), min(values), max(values))


def _ms(seconds: float) -> float:
    return seconds * 1e3
