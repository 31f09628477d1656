"""From the flags of ``shoal bench serve`` to loads and bodies; what is wrong is wrong usage that names the flag."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from shoal.errors import ConfigError

if TYPE_CHECKING:
    from shoal.bench.load.sweep import Load, MakeBodies


def parse_loads(
    *,
    rate: str | None,
    concurrency: str | None,
    trace: Path | None,
    burstiness: float,
    requests: int,
    seed: int,
) -> list[Load]:
    """The loads of a sweep, of the one kind that was asked for."""
    from shoal.bench.load.arrivals import draw_arrivals
    from shoal.bench.load.sweep import Load

    if sum(given is not None for given in (rate, concurrency, trace)) != 1:
        raise typer.BadParameter("give one of --rate, --concurrency and --trace", param_hint="--rate")
    if concurrency is not None:
        sizes = [int(_number(part, "--concurrency", whole=True)) for part in concurrency.split(",")]
        return [Load(label=f"{size} at once", count=requests, at_once=size) for size in sizes]
    if rate is not None:
        loads = []
        for each in (_number(part, "--rate") for part in rate.split(",")):
            try:
                arrivals = draw_arrivals(each, requests, shape=burstiness, seed=seed)
            except ConfigError as error:
                raise typer.BadParameter(error.message, param_hint=f"--{error.field}") from None
            loads.append(Load(label=f"{each:g}/s", count=requests, arrivals=arrivals, rate=each))
        return loads
    return [_traced(trace)] if trace is not None else []


def parse_workload(
    *,
    endpoint: str,
    prompts: Path | None,
    prompt_words: int,
    shared_words: int,
    output_tokens: int,
    model: str | None,
    extra: str | None,
    seed: int,
) -> MakeBodies:
    """Gives so many bodies, always the same ones first."""
    from shoal.bench.load.workload import PATHS, MadeUp, from_items, made_up

    if endpoint not in PATHS:
        raise typer.BadParameter(f"must be one of {', '.join(PATHS)}, got {endpoint!r}", param_hint="--endpoint")
    more = _extra(model, extra)
    items = None if prompts is None else _items(prompts)
    shape = MadeUp(prompt_words=prompt_words, shared_words=shared_words, output_tokens=output_tokens)

    def make(count: int) -> list[dict[str, Any]]:
        if items is not None:
            bodies = from_items(items, count, endpoint=endpoint)
        else:
            bodies = made_up(shape, count, endpoint=endpoint, seed=seed)
        return [{**body, **more} for body in bodies]

    return make


def _traced(path: Path) -> Load:
    from shoal.bench.load.arrivals import read_trace
    from shoal.bench.load.sweep import Load

    try:
        times = read_trace(path.read_text(encoding="utf-8").splitlines(), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"cannot read {path}: {error}", param_hint="--trace") from None
    except ConfigError as error:
        raise typer.BadParameter(error.message, param_hint="--trace") from None
    span = times[-1]
    return Load(label=path.name, count=len(times), arrivals=times, rate=(len(times) - 1) / span if span else None)


def _number(text: str, flag: str, *, whole: bool = False) -> float:
    try:
        value = int(text) if whole else float(text)
    except ValueError:
        value = 0
    if not 0 < value < 1e6:
        kind = "whole numbers" if whole else "numbers"
        raise typer.BadParameter(f"must be positive {kind} with commas between, got {text!r}", param_hint=flag)
    return value


def _extra(model: str | None, extra: str | None) -> dict[str, Any]:
    more: dict[str, Any] = {} if model is None else {"model": model}
    if extra is None:
        return more
    try:
        found = json.loads(extra)
    except ValueError as error:
        raise typer.BadParameter(f"is not JSON: {error}", param_hint="--extra") from None
    if not isinstance(found, dict):
        raise typer.BadParameter("must be a JSON object", param_hint="--extra")
    return more | found


def _items(path: Path) -> list[dict[str, Any]]:
    items = []
    try:
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if not line.strip():
                continue
            item = json.loads(line)
            if not isinstance(item, dict) or not ("messages" in item or "prompt" in item):
                where = f"{path}, line {number}"
                raise typer.BadParameter(f"{where}: must hold messages or a prompt", param_hint="--prompts")
            items.append(item)
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise typer.BadParameter(f"cannot read {path}: {error}", param_hint="--prompts") from None
    if not items:
        raise typer.BadParameter(f"{path} holds no prompts", param_hint="--prompts")
    return items
