"""A run as one JSON object: what was measured, where, with what, and how calm it was."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Any

from shoal.bench.engine import EngineReport
from shoal.bench.machine import machine_facts
from shoal.bench.subject import LoadedSubject
from shoal.bench.work import Work
from shoal.kernels.native import available_isas


def make_record(
    report: EngineReport, loaded: LoadedSubject, work: Work, *, model: str, rounds: int, seed: int
) -> dict[str, Any]:
    """Everything that somebody else needs to judge or repeat the figures. Speeds are per second, sizes in bytes."""
    config, cost = loaded.config, loaded.subject.cost
    beside = {item.batch: item.as_record() for item in report.beside}
    results = []
    for figures in report.results:
        record = figures.as_record()
        if figures.batch in beside:
            record["beside"] = beside[figures.batch]
        results.append(record)
    return {
        "shoal": shoal_version(),
        "date": report.started.isoformat(timespec="seconds"),
        "seconds": report.seconds,
        "machine": machine_facts(available_isas()),
        "model": {"name": model, "file": loaded.path.name},
        "precision": config.precision,
        "kv_dtype": config.kv_dtype,
        "isa": config.isa,
        "threads": config.threads,
        "block_size": config.block_size,
        "token_budget": config.token_budget,
        "prompt_len": work.prompt_len,
        "output_len": work.output_len,
        "mixed": work.mixed,
        "rounds": rounds,
        "seed": seed,
        "sampling": {"temperature": loaded.subject.params.temperature, "top_p": loaded.subject.params.top_p},
        "weight_bytes": loaded.weight_bytes,
        "kv_bytes_per_token": cost.kv_bytes_per_token,
        "instructions": {
            "body": sorted(cost.body_ops),
            "head": sorted(cost.head_ops),
            "attention": cost.attention_path,
        },
        "ceilings": report.ceilings.as_record(),
        "results": results,
        "disturbance": {
            "load_before": report.disturbance.load_before,
            "steal": report.disturbance.steal,
            "others": report.disturbance.others,
        },
        "warnings": list(report.warnings),
    }


def shoal_version() -> str:
    """As installed."""
    try:
        return version("shoal")
    except PackageNotFoundError:
        return "unknown"
