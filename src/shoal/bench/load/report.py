"""From outcomes to numbers: what was asked for, what was got, and how long it took those who waited."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from shoal.bench.load.run import LoadRun
from shoal.bench.load.target import Outcome
from shoal.metrics.goodput import LatencyLimits, goodput
from shoal.metrics.percentiles import percentile
from shoal.metrics.timeline import RequestTimeline

RANKS = (50, 90, 95, 99)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Of some seconds: their mean and percentiles."""

    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    most: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread | None:
        """None for no values."""
        found = list(values)
        if not found:
            return None
        ranks = {f"p{rank}": percentile(found, rank) for rank in RANKS}
        return cls(mean=sum(found) / len(found), most=max(found), **ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """One load. Times in seconds, rates per second.

    asked_rate: of the arrivals; None in a closed loop. sent_rate: at which requests really went out.
    lateness: how late the generator sent, against its plan; what is not small beside a server's times spoils them.
    goodput: requests per second that kept all limits; None without limits.
    """

    requests: int
    succeeded: int
    errors: Mapping[str, int]
    seconds: float
    asked_rate: float | None
    concurrency: int | None
    sent_rate: float
    finished_rate: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    output_tokens_rate: float
    lateness: Spread | None
    ttft: Spread | None
    itl: Spread | None
    tpot: Spread | None
    total: Spread | None
    limits: Mapping[str, float]
    goodput: float | None

    def as_record(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def make_report(
    run: LoadRun,
    *,
    asked_rate: float | None = None,
    concurrency: int | None = None,
    limits: LatencyLimits | None = None,
) -> LoadReport:
    """What came of a run. Percentiles are of the requests that succeeded."""
    good = [outcome for outcome in run.outcomes if outcome.error is None]
    lines = [timeline_of(outcome) for outcome in good]
    seconds = run.ended - run.began
    kept = None if limits is None else {name: value for name, value in asdict(limits).items() if value is not None}
    last_sent = max((outcome.sent for outcome in run.outcomes), default=run.began)
    return LoadReport(
        requests=len(run.outcomes),
        succeeded=len(good),
        errors=dict(Counter(outcome.error for outcome in run.outcomes if outcome.error is not None).most_common()),
        seconds=seconds,
        asked_rate=asked_rate,
        concurrency=concurrency,
        sent_rate=_rate(len(run.outcomes) - 1, last_sent - run.began),
        finished_rate=_rate(len(good), seconds),
        prompt_tokens=sum(outcome.prompt_tokens for outcome in good),
        cached_tokens=sum(outcome.cached_tokens for outcome in good),
        output_tokens=sum(outcome.tokens for outcome in good),
        output_tokens_rate=_rate(sum(outcome.tokens for outcome in good), seconds),
        lateness=Spread.of(max(0.0, outcome.sent - outcome.planned) for outcome in run.outcomes),
        ttft=Spread.of(line.ttft for line in lines if line.ttft is not None),
        itl=Spread.of(gap for line in lines for gap in line.itl),
        tpot=Spread.of(line.tpot for line in lines if line.tpot is not None),
        total=Spread.of(line.total for line in lines if line.total is not None),
        limits=kept or {},
        goodput=goodput(lines, limits, seconds) if limits is not None and kept and seconds > 0 else None,
    )


def timeline_of(outcome: Outcome) -> RequestTimeline:
    """A successful outcome as its client's timeline: arrived when it was to be sent, so that a wait to connect counts.

    Every event counts as one token, and the last one as all that the usage tells beyond that.
    """
    line = RequestTimeline(arrived=min(outcome.planned, outcome.sent))
    for at in outcome.events:
        line.add_token(0, at)
    more = outcome.tokens - len(outcome.events)
    if outcome.events and more > 0:
        at, count = line.token_times[0][-1]
        line.token_times[0][-1] = (at, count + more)
    line.finish(outcome.ended)
    return line


def _rate(count: float, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0
