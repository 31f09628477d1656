"""Sending a workload: at its times (open loop), or so many at once (closed loop).

In an open loop each request is a task of its own, started at its time whatever became of those before; how late the
generator itself was is part of the report, because a generator that lags measures itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shoal.bench.load.target import Outcome, Target


@dataclass(frozen=True, slots=True)
class LoadRun:
    """Everything that was sent, in the order of sending; ``began`` and ``ended`` on the clock of the outcomes."""

    outcomes: tuple[Outcome, ...]
    began: float
    ended: float


async def run_open(
    target: Target,
    path: str,
    bodies: Sequence[Mapping[str, Any]],
    arrivals: Sequence[float],
    *,
    time_limit: float,
    notice: Callable[[int], None] = lambda done: None,
) -> LoadRun:
    """Send body i at second ``arrivals[i]``. notice: told how many are done, each time one is."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    done = 0

    async def send(body: Mapping[str, Any], outcome: Outcome) -> None:
        nonlocal done
        await target.send(path, body, outcome, time_limit)
        done += 1
        notice(done)

    outcomes: list[Outcome] = []
    async with asyncio.TaskGroup() as group:
        for body, at in zip(bodies, arrivals, strict=True):
            planned = began + at
            if planned > loop.time():
                await asyncio.sleep(planned - loop.time())
            outcomes.append(Outcome(planned))
            group.create_task(send(body, outcomes[-1]))
    return LoadRun(tuple(outcomes), began, loop.time())


async def run_closed(
    target: Target,
    path: str,
    bodies: Sequence[Mapping[str, Any]],
    concurrency: int,
    *,
    time_limit: float,
    notice: Callable[[int], None] = lambda done: None,
) -> LoadRun:
    """Keep ``concurrency`` requests going until all bodies were sent and answered."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    outcomes: list[Outcome] = []
    left = iter(bodies)
    done = 0

    async def work() -> None:
        nonlocal done
        for body in left:
            outcome = Outcome(loop.time())
            outcomes.append(outcome)
            await target.send(path, body, outcome, time_limit)
            done += 1
            notice(done)

    async with asyncio.TaskGroup() as group:
        for _ in range(min(concurrency, len(bodies))):
            group.create_task(work())
    return LoadRun(tuple(outcomes), began, loop.time())
