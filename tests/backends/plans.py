"""Short ways to write requests, entries and plans in the tests of backends."""

from __future__ import annotations

from typing import Any

from shoal.core.params import SamplingParams
from shoal.core.plan import StepEntry, StepPlan
from shoal.core.request import Request


def request(prompt: tuple[int, ...], name: str = "r", **params: Any) -> Request:
    """A greedy request unless told otherwise."""
    salt, seed = params.pop("cache_salt", None), params.pop("seed", 0)
    stop_ids = params.pop("stop_ids", frozenset())
    return Request(
        request_id=name,
        prompt_ids=prompt,
        params=SamplingParams(**{"temperature": 0.0, **params}),
        max_tokens=1000,
        stop_ids=stop_ids,
        seed=seed,
        cache_salt=salt,
    )


def entry(
    req: Request,
    tokens: tuple[int, ...],
    start: int,
    length: int,
    table: tuple[int, ...],
    *,
    seq_id: int = 0,
    index: int = 0,
) -> StepEntry:
    """Rows [start, start + length) of a sequence whose tokens so far are ``tokens``; samples if they reach the end."""
    return StepEntry(
        seq_id=seq_id,
        request=req,
        index=index,
        start=start,
        token_ids=tokens[start : start + length],
        block_table=table,
        samples=start + length == len(tokens),
        num_generated=len(tokens) - len(req.prompt_ids),
        history=tokens if req.params.penalized else (),
    )


def plan(*entries: StepEntry, preempted: tuple[int, ...] = ()) -> StepPlan:
    """A step of these entries."""
    return StepPlan(0, entries, sum(len(item.token_ids) for item in entries), preempted)
