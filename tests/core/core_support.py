"""Short ways to make requests and to play the engine."""

from __future__ import annotations

from typing import Any

from shoal.core.params import SamplingParams
from shoal.core.plan import CacheShape, EntryResult, StepEntry, StepPlan, StepResult, TokenDelta, TokenLogprobs
from shoal.core.request import Request
from shoal.core.scheduler import Scheduler, SchedulerConfig

BLOCK = 4


def make_scheduler(blocks: int = 64, **config: Any) -> Scheduler:
    config.setdefault("watermark", 0.0)
    return Scheduler(SchedulerConfig(**config), CacheShape(blocks, BLOCK, 1, 1, 16, "f32"))


def make_request(name: str, prompt: list[int], max_tokens: int = 4, **fields: Any) -> Request:
    params = {
        key: fields.pop(key) for key in ("n", "min_tokens", "presence_penalty", "prompt_logprobs") if key in fields
    }
    return Request(
        request_id=name,
        prompt_ids=tuple(prompt),
        params=SamplingParams(**params),
        max_tokens=max_tokens,
        stop_ids=frozenset(fields.pop("stop_ids", ())),
        seed=0,
        **fields,
    )


def answer(plan: StepPlan, token: int = 0) -> StepResult:
    """Every entry that samples gives ``token``; a row at position p that is scored has the log-probability -p."""
    return StepResult(
        tuple(
            EntryResult((token,) if entry.samples else (), prompt_logprobs=scored_rows(entry)) for entry in plan.entries
        )
    )


def scored_rows(entry: StepEntry) -> tuple[TokenLogprobs, ...]:
    return tuple(TokenLogprobs(-float(position), ()) for position in range(entry.start, entry.start + entry.num_scored))


def step(scheduler: Scheduler, token: int = 0) -> tuple[StepPlan, tuple[TokenDelta, ...]]:
    plan = scheduler.schedule(0.0)
    deltas = scheduler.commit(plan, answer(plan, token))
    scheduler.check()
    return plan, deltas


def served(plan: StepPlan) -> list[tuple[str, int, int]]:
    """(request and completion, first position, rows) of each entry."""
    return [(f"{entry.request.request_id}.{entry.index}", entry.start, len(entry.token_ids)) for entry in plan.entries]


def drain(scheduler: Scheduler, limit: int = 1000) -> list[StepPlan]:
    plans = []
    while scheduler.has_work():
        plans.append(step(scheduler)[0])
        assert len(plans) < limit
    assert scheduler.stats().used_blocks == 0
    return plans
