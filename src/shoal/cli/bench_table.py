"""An engine benchmark for the eye: the speeds, where a step's time goes, and what binds at each batch size."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shoal.perf.roofline import MEMORY

if TYPE_CHECKING:
    from rich.console import Console

    from shoal.bench.engine import EngineReport
    from shoal.bench.summary import BatchFigures, PhaseFigures, Spread

_LEAST_SHOWN = 0.005  # of a step; smaller parts are shown together


def print_report(console: Console, report: EngineReport, record: dict[str, Any]) -> None:
    """Print all of it."""
    console.print(_headline(record), soft_wrap=True)
    console.print(_ceiling_line(record), soft_wrap=True)
    console.print()
    _print_speeds(console, report, mixed=record["mixed"])
    _print_split(console, report)
    for figures in report.results:
        console.print(_binding(figures, mixed=record["mixed"]), soft_wrap=True)
    for item in report.beside:
        console.print(
            f"batch {item.batch} beside {item.neighbours} busy: a step takes {item.slowdown:.2f} times as long; fair "
            f"would be {item.fair.by_count:.2f}, and {item.fair.by_taken:.2f} for the {item.taken_cores:.2f} cores taken",
            soft_wrap=True,
        )


def _headline(record: dict[str, Any]) -> str:
    machine = record["machine"]
    load = "mixed lengths up to " if record["mixed"] else ""
    return (
        f"{record['model']['name']}, {record['precision']}, KV cache {record['kv_dtype']}, {record['isa']}, "
        f"{record['threads']} threads on {machine['cores']} cores of {machine['cpu']}; "
        f"{load}{record['prompt_len']} + {record['output_len']} tokens, median of {record['rounds']} rounds"
    )


def _ceiling_line(record: dict[str, Any]) -> str:
    ceilings = record["ceilings"]
    used = record["instructions"]
    paths = dict.fromkeys([*used["body"], *used["head"], used["attention"]])
    peaks = ", ".join(
        f"{path} {_giga(ceilings['peaks_ops_per_s'][path]['all_threads']['best'])} Gop/s" for path in paths
    )
    return (
        f"measured limits: reading {_giga(ceilings['bandwidth_bytes_per_s'])} GB/s (past the caches "
        f"{_giga(ceilings['memory_bandwidth_bytes_per_s'])}); {peaks}; products in {' and '.join(used['body'])}, "
        f"head in {' and '.join(used['head'])}, attention in {used['attention']}"
    )


def _print_speeds(console: Console, report: EngineReport, *, mixed: bool) -> None:
    from rich.table import Table

    table = Table(title="Tokens per second (slowest to fastest round)", title_justify="left")
    for name in ("batch", "prompt" if mixed else "prefill", "of limit", "output" if mixed else "decode", "limit"):
        table.add_column(name, justify="right")
    for name in ("of limit", "step p50", "p99"):
        table.add_column(name, justify="right")
    for item in report.results:
        table.add_row(
            str(item.batch),
            _rate(item.prefill.tokens_per_s),
            f"{item.prefill.ceiling_fraction:.0%}",
            _rate(item.decode.tokens_per_s),
            f"{item.decode.ceiling_tokens_per_s:.0f}",
            f"{item.decode.ceiling_fraction:.0%}",
            f"{item.decode.step_ms_p50:.2f} ms",
            f"{item.decode.step_ms_p99:.2f} ms",
        )
    console.print(table)


def _print_split(console: Console, report: EngineReport) -> None:
    from rich.table import Table

    parts = _shown_parts([item.decode for item in report.results])
    table = Table(title="Where a step's time goes, ms (mean)", title_justify="left")
    for name in ("batch", "step", *(part.replace("_and_", "+") for part in parts), "other"):
        table.add_column(name, justify="right")
    for item in report.results:
        phase = item.decode
        other = sum(value for part, value in phase.split_ms.items() if part not in parts)
        table.add_row(
            str(item.batch),
            f"{phase.step_ms_mean:.2f}",
            *(f"{phase.split_ms[part]:.2f}" for part in parts),
            f"{other:.2f}",
        )
    console.print(table)


def _shown_parts(phases: list[PhaseFigures]) -> list[str]:
    """Parts that matter anywhere, and what is asked for by name always."""
    always = {"sampling", "scheduling", "text", "rest"}
    return [
        part
        for part in phases[0].split_ms
        if part in always or any(item.split_ms[part] > _LEAST_SHOWN * item.step_ms_mean for item in phases)
    ]


def _binding(figures: BatchFigures, *, mixed: bool) -> str:
    phase = figures.decode
    kind = "step" if mixed else "decode step"
    work = f"{phase.step_bytes / 1e6:.1f} MB and {phase.step_ops / 1e9:.2f} Gop"
    by = "reading memory" if phase.bound_by == MEMORY else f"arithmetic ({phase.bound_by})"
    least = phase.step_ms_mean * phase.ceiling_fraction
    return (
        f"batch {figures.batch}: bound by {by}: a {kind} of {work} can take {least:.2f} ms, took "
        f"{phase.step_ms_mean:.2f} ms"
    )


def _rate(value: Spread) -> str:
    return f"{value.median:.0f} ({value.lowest:.0f}-{value.highest:.0f})"


def _giga(value: float) -> str:
    return f"{value / 1e9:.3g}" if value < 1e12 else f"{value / 1e9:.0f}"
