"""``shoal bench engine``: speed by batch size, held against what the machine allows."""

from __future__ import annotations

import json
import re
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shoal.cli.bench_files import check_writable, write_file
from shoal.cli.console import make_console, note
from shoal.cli.options import DEFAULT_MODEL, Json, Model, takes_some_engine_options
from shoal.config import EngineConfig
from shoal.errors import InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    from rich.progress import Progress

    from shoal.bench.engine import Notice
    from shoal.bench.subject import LoadedSubject
    from shoal.core.params import SamplingParams
    from shoal.perf.ceilings import Ceilings

MOST_BATCH = 4096


@takes_some_engine_options("precision", "kv_dtype", "isa", "threads", "block_size", "token_budget")
def engine(
    *,
    engine: EngineConfig,
    model: Model = DEFAULT_MODEL,
    batch: Annotated[
        str, typer.Option(metavar="N,N,...", help="Sequences at once; each size is measured.")
    ] = "1,4,16,64",
    prompt_len: Annotated[int, typer.Option(min=1, help="Prompt tokens of a sequence.")] = 128,
    output_len: Annotated[int, typer.Option(min=2, help="Generated tokens of a sequence.")] = 128,
    mixed: Annotated[
        bool,
        typer.Option(
            "--mixed",
            help="Draw lengths with a long tail, at most those given, and queue four requests per place of the "
            "batch, so that prompts and decodes share steps.",
        ),
    ] = False,
    rounds: Annotated[int, typer.Option(min=1, max=1000, help="Rounds over all batch sizes.")] = 3,
    seed: Annotated[int, typer.Option(help="Which prompts: same seed, same prompts.")] = 0,
    temperature: Annotated[float, typer.Option(help="Of the sampler; 0 takes the most likely token.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Of the sampler; 1 keeps all tokens.")] = 1.0,
    neighbour: Annotated[
        int,
        typer.Option(min=0, max=1024, help="Measure again beside so many busy processes, and compare."),
    ] = 0,
    as_json: Json = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write the JSON to a file, too.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress on standard error.")] = False,
) -> None:
    """Measure the engine: tokens per second, where a step's time goes, and the distance to the machine's limit.

    Random prompts run through the real scheduler, kernels, sampler and detokenizer; the end of sequence is ignored and
    no prefix is cached. The limit is measured in the same run, before and after: the speed of reading memory, and the
    peak of the instruction that multiplies. A step cannot be faster than its bytes can be read, nor than its
    operations can be computed.
    """
    from shoal.bench.engine import measure
    from shoal.bench.record import make_record
    from shoal.bench.subject import load_subject
    from shoal.bench.work import Work
    from shoal.cli.bench_table import print_report
    from shoal.cli.loading import fetch_if_missing

    batches = _batches(batch)
    work = Work(prompt_len=prompt_len, output_len=output_len, mixed=mixed)
    params = _params(temperature, top_p, seed)
    check_writable(output)
    fetch_if_missing(model)
    loaded = load_subject(model, engine, work, batches, params, notify=note)
    try:
        with _progress(quiet=quiet) as bar:
            report = measure(
                loaded.subject,
                work,
                batches,
                rounds=rounds,
                seed=seed,
                measure_ceilings=lambda paths: _ceilings(loaded, paths),
                neighbours=neighbour,
                notice=_notice(bar),
            )
    finally:
        loaded.subject.backend.close()
    record = make_record(report, loaded, work, model=model, rounds=rounds, seed=seed)
    if output is not None:
        write_file("output", output, json.dumps(record, indent=1) + "\n")
    if as_json:
        typer.echo(json.dumps(record))
    else:
        print_report(make_console(stderr=False), report, record)
    for warning in report.warnings:
        note(f"warning: {warning}")


def _batches(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch(r"[0-9]{1,9}", part) and 1 <= int(part) <= MOST_BATCH for part in parts):
        raise typer.BadParameter(
            f"must be numbers in [1, {MOST_BATCH}] with commas between, got {text!r}", param_hint="--batch"
        )
    return sorted({int(part) for part in parts})


def _params(temperature: float, top_p: float, seed: int) -> SamplingParams:
    from shoal.core.params import SamplingParams

    try:
        return SamplingParams(temperature=temperature, top_p=top_p, seed=seed)
    except InvalidRequestError as error:
        raise typer.BadParameter(error.message, param_hint=f"--{error.field.replace('_', '-')}") from None


def _ceilings(loaded: LoadedSubject, paths: Sequence[str] | None) -> Ceilings:
    from shoal.backends.memory import available_memory
    from shoal.perf.ceilings import measure_ceilings

    free = available_memory()
    return measure_ceilings(
        loaded.subject.threads,
        paths=paths,
        sets=[loaded.weight_bytes],
        most_bytes=None if free is None else free // 4,
    )


def _progress(*, quiet: bool) -> AbstractContextManager[Progress | None]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = make_console()
    if quiet or not console.is_terminal:
        return nullcontext()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    # Drawn only when a round begins: a thread that redraws would take time from what is measured.
    return Progress(*columns, console=console, auto_refresh=False, transient=True)


def _notice(bar: Progress | None) -> Notice:
    if bar is None:
        return lambda done, total, what: None
    task = bar.add_task("", total=None)

    def show(done: int, total: int, what: str) -> None:
        bar.update(task, completed=done, total=total, description=what, refresh=True)

    return show
