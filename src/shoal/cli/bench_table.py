"""An engine benchmark for the eye: the speeds, where a step's time goes, and what binds at each batch size."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shoal.perf.roofline import MEMORY

if TYPE_CHECKING:
    from rich.console import Console

    from shoal.bench.engine import EngineReport
    from shoal.bench.summary import BatchFigures, PhaseFigures

_FULL = 0.9  # of the batch; below it a step's mean batch is told
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
            f"batch {item.batch} beside {item.neighbours} busy: a step takes {item.slowdown:.2f} times as long; "
            f"fair: {item.fair.by_count:.2f}, or {item.fair.by_taken:.2f} for the {item.taken_cores:.2f} cores taken",
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
    best = {path: ceilings["peaks_ops_per_s"][path]["all_threads"]["best"] for path in paths}
    peaks = ", ".join(f"{path} {_giga(rate)} Gop/s" for path, rate in best.items())
    return (
        f"measured limits: reading {_giga(ceilings['bandwidth_bytes_per_s'])} GB/s (past the caches "
        f"{_giga(ceilings['memory_bandwidth_bytes_per_s'])}); {peaks}; products in {' and '.join(used['body'])}, "
        f"head in {' and '.join(used['head'])}, attention in {used['attention']}"
    )


def _print_speeds(console: Console, report: EngineReport, *, mixed: bool) -> None:
    from rich.table import Table

    title = "Tokens per second, in brackets the slowest and fastest round"
    table = Table(title=title, title_justify="left", padding=(0, 1, 0, 0))
    prompt, output = ("prompt", "output") if mixed else ("prefill", "decode")
    for name in ("batch", prompt, "limit", "", output, "limit", "", "p50 ms", "p99 ms"):
        table.add_column(name, justify="right")
    for item in report.results:
        table.add_row(
            str(item.batch),
            *_against_limit(item.prefill),
            *_against_limit(item.decode),
            f"{item.decode.step_ms_p50:.1f}",
            f"{item.decode.step_ms_p99:.1f}",
        )
    console.print(table)


def _print_split(console: Console, report: EngineReport) -> None:
    from rich.table import Table

    phases = [item.decode for item in report.results]
    parts = _shown_parts(phases)
    table = Table(title="Where a step's time goes, ms (mean)", title_justify="left")
    table.add_column("batch")
    for item in report.results:
        table.add_column(str(item.batch), justify="right")
    for part in parts:
        table.add_row(part.replace("_", " "), *(f"{phase.split_ms[part]:.2f}" for phase in phases))
    others = [sum(value for part, value in phase.split_ms.items() if part not in parts) for phase in phases]
    table.add_row("other kernels", *(f"{value:.2f}" for value in others))
    table.add_section()
    table.add_row("step", *(f"{phase.step_ms_mean:.2f}" for phase in phases))
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
    line = (
        f"batch {figures.batch}: bound by {by}: a {kind} of {work} can take {least:.2f} ms, took "
        f"{phase.step_ms_mean:.2f} ms"
    )
    if phase.mean_batch < _FULL * figures.batch:  # say, short outputs that end before the last prompt is in
        line += f"; {phase.mean_batch:.1f} sequences a {kind} on average"
    return line


def _against_limit(phase: PhaseFigures) -> tuple[str, str, str]:
    rate = phase.tokens_per_s
    return (
        f"{rate.median:.0f}\n({rate.lowest:.0f}-{rate.highest:.0f})",
        f"{phase.ceiling_tokens_per_s:.0f}",
        f"{phase.ceiling_fraction:.0%}",
    )


def _giga(value: float) -> str:
    return f"{value / 1e9:.3g}" if value < 1e12 else f"{value / 1e9:.0f}"
