"""``shoal verify``: show on this machine that results do not depend on circumstances."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from shoal.cli.console import FAILED, make_console, note
from shoal.cli.options import DEFAULT_MODEL, Json, Model, takes_engine_options
from shoal.config import EngineConfig

if TYPE_CHECKING:
    from shoal.verification import Report


@takes_engine_options
def verify(
    *,
    engine: EngineConfig,
    model: Model = DEFAULT_MODEL,
    requests: Annotated[int, typer.Option(min=2, max=4096, help="How many requests to compare.")] = 64,
    seed: Annotated[int, typer.Option(help="Which requests: same seed, same requests.")] = 0,
    as_json: Json = False,
) -> None:
    """Check that every request gives the same tokens and log-probability bits alone and in company.

    Runs each request alone, then all of them batched, with other token budgets, with so little KV memory that
    sequences are preempted, with a cold and a warm prefix cache, on another number of threads and under static
    batching. Exit
    status 1 if anything differs.
    """
    from rich.progress import Progress

    from shoal.assembly import build_backend, open_model
    from shoal.cli.loading import fetch_if_missing
    from shoal.verification import make_requests
    from shoal.verification import verify as run_verification

    fetch_if_missing(model)
    file_model, config, _ = open_model(model, engine, notify=note)
    description = file_model.description
    wanted = make_requests(
        requests,
        vocab_size=description.vocab_size,
        context_length=config.context_length or description.context_length,
        seed=seed,
    )
    with Progress(console=make_console(), transient=True) as bar:
        task = bar.add_task("verifying", total=None)
        report = run_verification(
            lambda variant: build_backend(file_model, variant),
            config,
            wanted,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    if as_json:
        typer.echo(json.dumps(_record(report)))
    else:
        _print(report)
    if not report.ok:
        raise typer.Exit(FAILED)


def _record(report: Report) -> dict[str, object]:
    return {
        "requests": report.requests,
        "comparisons": report.comparisons,
        "mismatches": report.mismatches,
        "ok": report.ok,
        "variants": [
            {
                "name": item.name,
                "comparisons": item.comparisons,
                "mismatches": item.mismatches,
                "steps": item.steps,
                "mean_batch": round(item.mean_batch, 2),
                "preemptions": item.preemptions,
                "prefix_hit_tokens": item.prefix_hit_tokens,
                "exercised": item.exercised,
            }
            for item in report.variants
        ],
    }


def _print(report: Report) -> None:
    from rich.table import Table

    table = Table(title=f"{report.requests} requests, each against itself alone")
    for name in ("circumstance", "compared", "different", "steps", "mean batch", "preempted", "prefix hits"):
        first = name == "circumstance"
        table.add_column(name, justify="left" if first else "right", no_wrap=first)
    for item in report.variants:
        table.add_row(
            item.name,
            str(item.comparisons),
            str(item.mismatches),
            str(item.steps),
            f"{item.mean_batch:.1f}",
            str(item.preemptions),
            str(item.prefix_hit_tokens),
        )
    console = make_console(stderr=False)
    console.print(table)
    for item in report.variants:
        if not item.exercised:
            console.print(f"{item.name}: its circumstance never came about, so it proves nothing; use more requests")
    verdict = "exact" if report.ok else "NOT EXACT" if report.mismatches else "not shown"
    console.print(f"{report.comparisons} comparisons, {report.mismatches} mismatches: {verdict}")
