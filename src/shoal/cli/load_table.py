"""What the clients of a load saw, for the eye."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.table import Table

if TYPE_CHECKING:
    from shoal.bench.load.report import LoadReport, Spread

_LATE = 0.05  # of the median TTFT: a generator that is later than that measures itself


def load_table(labels: Sequence[str], reports: Sequence[LoadReport]) -> Table:
    """A line for each load."""
    table = Table(title="What the clients saw; in ms, median and 95th percentile", title_justify="left")
    table.add_column("load", no_wrap=True)
    for name in ("done", "req/s", "tok/s", "TTFT", "ITL", "TPOT", "in all"):
        table.add_column(name, justify="right", no_wrap=True)
    with_goodput = any(report.goodput is not None for report in reports)
    if with_goodput:
        table.add_column("good/s", justify="right", no_wrap=True)
    for label, report in zip(labels, reports, strict=True):
        row = [
            label,
            f"{report.succeeded}/{report.requests}",
            f"{report.finished_rate:.2f}",
            f"{report.output_tokens_rate:.0f}",
            *(_spread(spread) for spread in (report.ttft, report.itl, report.tpot, report.total)),
        ]
        if with_goodput:
            row.append("" if report.goodput is None else f"{report.goodput:.2f}")
        table.add_row(*row)
    return table


def load_warnings(labels: Sequence[str], reports: Sequence[LoadReport]) -> list[str]:
    """What makes the figures worth less."""
    found = []
    for label, report in zip(labels, reports, strict=True):
        for error, count in report.errors.items():
            found.append(f"{label}: {count} of {report.requests} failed: {error}")
        late, ttft = report.lateness, report.ttft
        if report.asked_rate is not None and late is not None and ttft is not None and late.p95 > _LATE * ttft.p50:
            found.append(f"{label}: requests were sent up to {late.p95 * 1e3:.0f} ms late; give the generator a core")
    return found


def _spread(spread: Spread | None) -> str:
    return "-" if spread is None else f"{spread.p50 * 1e3:.0f} {spread.p95 * 1e3:.0f}"
