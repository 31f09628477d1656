"""The numbers at the end of ``shoal run``, as a table and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

from rich.table import Table

from shoal.core.request import FinishReason
from shoal.engine.engine import EngineStats
from shoal.engine.outputs import RequestOutput
from shoal.metrics.percentiles import percentile

_PERCENTILES = (50, 95, 99)


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """How a run went. Percentiles are in seconds, by percentage; empty when nothing was measured.

    waste: share of the KV places held that held no token, averaged over steps.
    """

    requests: int
    done: int
    failed: int
    elapsed_s: float
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    tokens_per_s: float
    ttft_s: dict[str, float]
    itl_s: dict[str, float]
    steps: int
    mean_batch: float
    kv_blocks_peak: int
    kv_blocks_total: int
    waste: float
    preemptions: int

    @classmethod
    def of(cls, outputs: Sequence[RequestOutput], requests: int, stats: EngineStats, elapsed: float) -> Self:
        """From the outputs that were done and the engine's own numbers."""
        timings = [output.timings for output in outputs if output.timings is not None]
        completion_tokens = sum(output.usage.completion_tokens for output in outputs)
        return cls(
            requests=requests,
            done=len(outputs),
            failed=sum(any(item.finish_reason is FinishReason.ERROR for item in out.completions) for out in outputs),
            elapsed_s=elapsed,
            prompt_tokens=sum(output.usage.prompt_tokens for output in outputs),
            completion_tokens=completion_tokens,
            cached_tokens=sum(output.usage.cached_tokens for output in outputs),
            tokens_per_s=completion_tokens / elapsed if elapsed > 0 else 0.0,
            ttft_s=_percentiles([item.ttft for item in timings if item.ttft is not None]),
            itl_s=_percentiles([gap for item in timings for gap in item.itl]),
            steps=stats.steps,
            mean_batch=stats.mean_batch,
            kv_blocks_peak=stats.scheduler.peak_blocks,
            kv_blocks_total=stats.scheduler.num_blocks,
            waste=stats.scheduler.waste,
            preemptions=stats.scheduler.preemptions,
        )


def summary_record(summary: Summary) -> dict[str, Any]:
    """As JSON."""
    return asdict(summary)


def summary_table(summary: Summary) -> Table:
    """For the eye."""
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    table.add_column()
    for name, value in _rows(summary):
        table.add_row(name, value)
    return table


def _rows(summary: Summary) -> list[tuple[str, str]]:
    requests = f"{summary.done} of {summary.requests} in {summary.elapsed_s:.2f} s"
    if summary.failed:
        requests += f", {summary.failed} failed"
    held = f"{summary.kv_blocks_peak} of {summary.kv_blocks_total} at the peak, {summary.waste:.1%} wasted"
    return [
        ("requests", requests),
        ("tokens", f"{summary.prompt_tokens} in, {summary.completion_tokens} out"),
        ("throughput", f"{summary.tokens_per_s:.1f} tokens/s"),
        ("TTFT", _milliseconds(summary.ttft_s)),
        ("ITL", _milliseconds(summary.itl_s)),
        ("batch", f"{summary.mean_batch:.1f} sequences per step, {summary.steps} steps"),
        ("KV blocks", held),
        ("prefix hits", f"{summary.cached_tokens} tokens"),
        ("preemptions", str(summary.preemptions)),
    ]


def _percentiles(values: Sequence[float]) -> dict[str, float]:
    return {f"p{rank}": percentile(values, rank) for rank in _PERCENTILES} if values else {}


def _milliseconds(values: dict[str, float]) -> str:
    return ", ".join(f"{name} {value * 1000:.1f} ms" for name, value in values.items()) or "nothing to measure"
