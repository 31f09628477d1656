"""Several loads on one server, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from shoal.bench.load.report import LoadReport, make_report
from shoal.bench.load.run import run_closed, run_open
from shoal.bench.load.target import Target
from shoal.errors import ConfigError
from shoal.metrics.goodput import LatencyLimits

MakeBodies = Callable[[int], list[dict[str, Any]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """One load: requests at their arrival times, or, without those, ``at_once`` of them at any time.

    rate: of the arrivals, where it is known.
    """

    label: str
    count: int
    arrivals: tuple[float, ...] | None = None
    rate: float | None = None
    at_once: int = 0


async def measure_sweep(
    target: Target,
    path: str,
    loads: Sequence[Load],
    make_bodies: MakeBodies,
    *,
    time_limit: float,
    warm_up: int,
    limits: LatencyLimits | None,
    notice: Callable[[Load, int], None] = lambda load, done: None,
) -> list[LoadReport]:
    """A report for each load. No body is sent twice, or prefix caches would find it.

    make_bodies: gives so many bodies, always the same ones first. notice: told how many of a load are done.
    ConfigError if not one request of the warm-up succeeds.
    """
    reports = []
    try:
        if warm_up:
            first = (await run_closed(target, path, make_bodies(warm_up), 1, time_limit=time_limit)).outcomes
            if all(outcome.error for outcome in first):
                raise ConfigError("URL", f"the server there does not answer as OpenAI's API does: {first[0].error}")
        start = warm_up
        for load in loads:
            bodies = make_bodies(start + load.count)[start:]
            start += load.count

            def told(done: int, load: Load = load) -> None:
                notice(load, done)

            if load.arrivals is not None:
                run = await run_open(target, path, bodies, load.arrivals, time_limit=time_limit, notice=told)
                reports.append(make_report(run, asked_rate=load.rate, limits=limits))
            else:
                run = await run_closed(target, path, bodies, load.at_once, time_limit=time_limit, notice=told)
                reports.append(make_report(run, concurrency=load.at_once, limits=limits))
    finally:
        target.close()
    return reports
