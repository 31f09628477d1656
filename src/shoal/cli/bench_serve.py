"""``shoal bench serve``: load on a server over HTTP, and what its clients saw."""

from __future__ import annotations

import json
import os
from contextlib import nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shoal.cli.bench_files import check_writable, write_file
from shoal.cli.console import FAILED, make_console, note
from shoal.cli.load_options import parse_loads, parse_workload
from shoal.cli.options import Json

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from rich.progress import Progress, TaskID

    from shoal.bench.load.report import LoadReport
    from shoal.bench.load.sweep import Load
    from shoal.metrics.goodput import LatencyLimits

_LOAD, _WORK, _LIMITS = "Load", "Workload", "Limits for goodput"


def _option(panel: str, help_text: str, **more: Any) -> Any:
    return typer.Option(help=help_text, rich_help_panel=panel, **more)


def serve(
    *,
    url: Annotated[
        str, typer.Argument(metavar="URL", help="Where the API is, with its /v1.")
    ] = "http://127.0.0.1:8000/v1",
    rate: Annotated[
        str | None,
        _option(_LOAD, "Open loop: requests per second; several with commas are a sweep.", metavar="R,R,..."),
    ] = None,
    concurrency: Annotated[
        str | None, _option(_LOAD, "Closed loop: requests at once; several are a sweep.", metavar="N,N,...")
    ] = None,
    trace: Annotated[
        Path | None, _option(_LOAD, "Open loop: a file of arrival times, in seconds, a line each.", metavar="FILE")
    ] = None,
    burstiness: Annotated[
        float, _option(_LOAD, "Shape of the gaps' gamma distribution: 1 is Poisson, 0.25 bursty, 100 nearly even.")
    ] = 1.0,
    requests: Annotated[int, _option(_LOAD, "Requests of each load.", min=1, max=1_000_000)] = 100,
    time_limit: Annotated[float, _option(_LOAD, "Seconds after which a request counts as failed.", min=0.1)] = 600.0,
    warm_up: Annotated[int, _option(_LOAD, "Requests sent before, one by one, and not counted.", min=0, max=1000)] = 1,
    endpoint: Annotated[str, _option(_WORK, "Which endpoint.", metavar="chat|completions")] = "chat",
    model: Annotated[str | None, _option(_WORK, "The model's id; not given: none is sent.")] = None,
    prompts: Annotated[
        Path | None,
        _option(_WORK, "A prompts file, as for shoal run, instead of made-up prompts.", metavar="FILE.jsonl"),
    ] = None,
    prompt_words: Annotated[int, _option(_WORK, "Words of a made-up prompt, about a token each.", min=1)] = 128,
    shared_words: Annotated[int, _option(_WORK, "So many of them begin every prompt.", min=0)] = 0,
    output_tokens: Annotated[int, _option(_WORK, "Most tokens of an answer to a made-up prompt.", min=1)] = 128,
    extra: Annotated[
        str | None, _option(_WORK, "More fields of every request, as a JSON object.", metavar="JSON")
    ] = None,
    seed: Annotated[int, _option(_WORK, "Same seed, same prompts and arrivals.")] = 0,
    ttft: Annotated[float | None, _option(_LIMITS, "Seconds to the first token.", min=0)] = None,
    itl: Annotated[
        float | None, _option(_LIMITS, "Seconds between tokens, 95th percentile of a request.", min=0)
    ] = None,
    tpot: Annotated[float | None, _option(_LIMITS, "Seconds per token after the first.", min=0)] = None,
    total: Annotated[float | None, _option(_LIMITS, "Seconds to the end.", min=0)] = None,
    api_key: Annotated[
        str | None, typer.Option(help="Sent as a bearer token.", envvar="OPENAI_API_KEY", show_envvar=True)
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write the JSON to a file, too.")
    ] = None,
    chart: Annotated[
        Path | None, typer.Option(metavar="FILE.svg", help="Draw throughput against latency over the sweep.")
    ] = None,
    as_json: Json = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress on standard error.")] = False,
) -> None:
    """Send load to any server with OpenAI's API, and tell what its clients saw.

    Give one of --rate, --concurrency and --trace. In an open loop requests are sent at their times whatever the server
    does, as real users are; in a closed loop the next one waits for an answer. Made-up prompts are random words;
    answers are cut at --output-tokens. Exit status 1 if no request succeeded.
    """
    import uvloop

    from shoal.bench.load.chart import draw_sweep
    from shoal.bench.load.sweep import measure_sweep
    from shoal.bench.load.target import Target
    from shoal.bench.load.workload import PATHS
    from shoal.cli.load_table import load_table, load_warnings

    loads = parse_loads(
        rate=rate, concurrency=concurrency, trace=trace, burstiness=burstiness, requests=requests, seed=seed
    )
    make_bodies = parse_workload(
        endpoint=endpoint,
        prompts=prompts,
        prompt_words=prompt_words,
        shared_words=shared_words,
        output_tokens=output_tokens,
        model=model,
        extra=extra,
        seed=seed,
    )
    for path in (output, chart):
        check_writable(path)
    target = Target(url, api_key=api_key)
    with _progress(quiet=quiet) as bar:
        reports = uvloop.run(
            measure_sweep(
                target,
                PATHS[endpoint],
                loads,
                make_bodies,
                time_limit=time_limit,
                warm_up=warm_up,
                limits=_limits(ttft, itl, tpot, total),
                notice=_notice(bar),
            )
        )
    labels = [load.label for load in loads]
    record = _record(url, endpoint, labels, reports)
    if output is not None:
        write_file("output", output, json.dumps(record, indent=1) + "\n")
    if chart is not None:
        day = record["date"][:10]
        picture = draw_sweep(reports, labels, title=f"{url}: throughput and latency", note=f"{day}, {endpoint}")
        write_file("chart", chart, picture)
    if as_json:
        typer.echo(json.dumps(record))
    else:
        make_console(stderr=False).print(load_table(labels, reports))
    for warning in load_warnings(labels, reports):
        note(f"warning: {warning}")
    if not any(report.succeeded for report in reports):
        raise typer.Exit(FAILED)


def _limits(ttft: float | None, itl: float | None, tpot: float | None, total: float | None) -> LatencyLimits | None:
    from shoal.metrics.goodput import LatencyLimits

    if ttft is itl is tpot is total is None:
        return None
    return LatencyLimits(ttft=ttft, itl=itl, tpot=tpot, total=total)


def _record(url: str, endpoint: str, labels: Sequence[str], reports: Sequence[LoadReport]) -> dict[str, Any]:
    return {
        "url": url,
        "endpoint": endpoint,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cores": os.cpu_count(),
        "loads": [{"load": label, **report.as_record()} for label, report in zip(labels, reports, strict=True)],
    }


def _progress(*, quiet: bool) -> AbstractContextManager[Progress | None]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = make_console()
    if quiet or not console.is_terminal:
        return nullcontext()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    # Twice a second: drawing takes time from what is measured.
    return Progress(*columns, console=console, refresh_per_second=2, transient=True)


def _notice(bar: Progress | None) -> Callable[[Load, int], None]:
    if bar is None:
        return lambda load, done: None
    tasks: dict[str, TaskID] = {}

    def show(load: Load, done: int) -> None:
        if load.label not in tasks:
            tasks[load.label] = bar.add_task(load.label, total=load.count)
        bar.update(tasks[load.label], completed=done)

    return show
