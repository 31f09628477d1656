"""What the contenders print, and what several rounds of it come to. Pure.

Every contender prints JSON, one object per line or one for all, among whatever else it has to say.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any


@dataclass(frozen=True)
class Speed:
    """Of one batch size, in tokens per second."""

    prefill: float
    decode: float


@dataclass(frozen=True)
class Run:
    """One contender's round. ``error`` says why batch sizes may be missing."""

    speeds: Mapping[int, Speed]
    startup_s: float | None = None
    error: str | None = None


@dataclass(frozen=True)
class Spread:
    """A figure over rounds."""

    median: float
    lowest: float
    highest: float


@dataclass(frozen=True)
class Outcome:
    """A contender's rounds together. ``error`` is why there is nothing, or not everything."""

    prefill: Mapping[int, Spread]
    decode: Mapping[int, Spread]
    startup_s: float | None = None
    error: str | None = None

    @property
    def best_prefill(self) -> float | None:
        """Over batch sizes."""
        return max((value.median for value in self.prefill.values()), default=None)


def parse_driver(output: str) -> Run:
    """What the drivers of OpenVINO and vLLM print."""
    speeds, startup = {}, None
    for item in _objects(output):
        if "startup_s" in item:
            startup = float(item["startup_s"])
        elif "batch" in item:
            speeds[int(item["batch"])] = _speed(item)
    return Run(speeds, startup)


def parse_llama_cpp(output: str) -> Run:
    """What ``llama-batched-bench --output-format jsonl`` prints."""
    found = [item for item in _objects(output) if {"pl", "speed_pp", "speed_tg"} <= item.keys()]
    return Run({int(item["pl"]): Speed(float(item["speed_pp"]), float(item["speed_tg"])) for item in found})


def parse_shoal(output: str) -> Run:
    """What ``shoal bench engine --json`` prints."""
    for record in _objects(output):
        if "results" in record:
            return Run({int(item["batch"]): _speed(item) for item in record["results"]})
    return Run({})


def combine(runs: Sequence[Run]) -> Outcome:
    """Medians over rounds; of the errors the first."""
    startups = [run.startup_s for run in runs if run.startup_s is not None]
    return Outcome(
        prefill={batch: _spread([speed.prefill for speed in speeds]) for batch, speeds in _by_batch(runs).items()},
        decode={batch: _spread([speed.decode for speed in speeds]) for batch, speeds in _by_batch(runs).items()},
        startup_s=median(startups) if startups else None,
        error=next((run.error for run in runs if run.error is not None), None),
    )


def describe_exit(status: int, stderr: str) -> str:
    """Why a program failed, in a line."""
    if status < 0:
        names = {-4: "an illegal instruction", -6: "an abort", -9: "being killed", -11: "a segmentation fault"}
        return f"died of {names.get(status, f'signal {-status}')}"
    # Some draw a box around their last words.
    lines = [line.strip(" \t│|") for line in stderr.splitlines() if any(map(str.isalpha, line))]
    return f"exit status {status}" + (f": {lines[-1][:200]}" if lines else "")


def _by_batch(runs: Sequence[Run]) -> dict[int, list[Speed]]:
    found: dict[int, list[Speed]] = {}
    for run in runs:
        for batch, speed in run.speeds.items():
            found.setdefault(batch, []).append(speed)
    return dict(sorted(found.items()))


def _spread(values: Sequence[float]) -> Spread:
    return Spread(median(values), min(values), max(values))


def _speed(item: Mapping[str, Any]) -> Speed:
    return Speed(float(item["prefill_tokens_per_s"]), float(item["decode_tokens_per_s"]))


def _objects(output: str) -> Iterator[dict[str, Any]]:
    for line in output.splitlines():
        if not line.lstrip().startswith("{"):
            continue
        try:
            item = json.loads(line)
        except ValueError:
            continue
        if isinstance(item, dict):
            yield item
