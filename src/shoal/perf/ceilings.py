"""What this machine does at best, measured in a few seconds: reading memory, and each arithmetic path.

All is measured with as many threads as will compute, and with one. The best of several repetitions counts, since
whatever disturbs a measurement only makes it slower; the worst is kept beside it, to show how calm the machine was.

Memory is read in sets of several sizes. One is several times the last-level cache (as far as memory allows), which
gives the memory's own bandwidth. Others may be asked for: weights that fit a large cache come from there in every step,
and a ceiling that leaves this out would be too low, hence flattering.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shoal.errors import KernelError
from shoal.kernels.native import _native

_MIB = 1 << 20
STREAM_CACHES = 4  # the streamed set is so many times the last-level cache
LEAST_STREAM = 256 * _MIB
MOST_STREAM = 1536 * _MIB
_CACHE_FOLDER = Path("/sys/devices/system/cpu/cpu0/cache")
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


@dataclass(frozen=True, slots=True)
class Rate:
    """Something per second: the best of several repetitions, and the worst."""

    best: float
    worst: float

    def as_record(self) -> dict[str, float]:
        """For JSON."""
        return {"best": self.best, "worst": self.worst}


@dataclass(frozen=True, slots=True)
class ScaledRate:
    """A rate with one thread and with all of them."""

    one: Rate
    all: Rate

    def as_record(self) -> dict[str, dict[str, float]]:
        """For JSON."""
        return {"one_thread": self.one.as_record(), "all_threads": self.all.as_record()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceilings:
    """The measured limits.

    threads: what "all" means.
    stream_bytes: the set that is larger than the caches, a key of ``reads``.
    reads: bytes per second by the size of the set read over and over.
    peaks: operations per second by path (see ``paths``); a multiply and an add are two.
    """

    threads: int
    stream_bytes: int
    reads: Mapping[int, ScaledRate]
    peaks: Mapping[str, ScaledRate]

    @property
    def bandwidth(self) -> float:
        """The fastest that all threads read any of the sets: nothing of at least that size is read faster."""
        return max(item.all.best for item in self.reads.values())

    @property
    def memory_bandwidth(self) -> float:
        """All threads, past the caches."""
        return self.reads[self.stream_bytes].all.best

    def peak(self, path: str) -> float:
        """Operations per second of a path on all threads. KernelError if it was not measured."""
        try:
            return self.peaks[path].all.best
        except KeyError:
            raise KernelError(f"the path {path!r} was not measured; measured were {', '.join(self.peaks)}") from None

    def raised_to(self, other: Ceilings) -> Ceilings:
        """Each limit at the higher of two measurements, with the lower worst."""

        def merged(mine: ScaledRate, theirs: ScaledRate | None) -> ScaledRate:
            return mine if theirs is None else ScaledRate(_higher(mine.one, theirs.one), _higher(mine.all, theirs.all))

        return replace(
            self,
            reads={size: merged(rate, other.reads.get(size)) for size, rate in self.reads.items()},
            peaks={path: merged(rate, other.peaks.get(path)) for path, rate in self.peaks.items()},
        )

    def change_from(self, before: Ceilings) -> dict[str, float]:
        """By how much each limit that both know moved since, as a fraction (0.1 is a tenth faster)."""
        pairs = {f"read {size / _MIB:.0f} MiB": (before.reads.get(size), rate) for size, rate in self.reads.items()}
        pairs.update({path: (before.peaks.get(path), rate) for path, rate in self.peaks.items()})
        return {name: now.all.best / old.all.best - 1 for name, (old, now) in pairs.items() if old is not None}

    def as_record(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "threads": self.threads,
            "stream_bytes": self.stream_bytes,
            "bandwidth_bytes_per_s": self.bandwidth,
            "memory_bandwidth_bytes_per_s": self.memory_bandwidth,
            "reads": [{"set_bytes": size, **rate.as_record()} for size, rate in self.reads.items()],
            "peaks_ops_per_s": {path: rate.as_record() for path, rate in self.peaks.items()},
        }


def available_paths() -> tuple[str, ...]:
    """Arithmetic paths that this processor can run."""
    return tuple(_native.probe_paths())


def measure_ceilings(
    threads: int,
    *,
    paths: Iterable[str] | None = None,
    sets: Iterable[int] = (),
    most_bytes: int | None = None,
    seconds: float = 0.04,
    repetitions: int = 5,
) -> Ceilings:
    """Measure now.

    paths: which to measure; None is all. KernelError names one that this processor cannot run.
    sets: sizes in bytes to read besides the streamed set.
    most_bytes: no set is larger (pass what memory is free); smaller sets are raised to one MiB a thread.
    seconds: of one repetition.
    """
    wanted = available_paths() if paths is None else tuple(dict.fromkeys(paths))
    stream = _whole(_stream_bytes(), threads, most_bytes)
    sizes = dict.fromkeys([stream, *(_whole(size, threads, most_bytes) for size in sets)])

    def peak(path: str) -> ScaledRate:
        return _scaled(threads, lambda count: _native.probe_compute(path, count, seconds, repetitions))

    def read(size: int) -> ScaledRate:
        return _scaled(threads, lambda count: _native.probe_read(size, count, seconds, repetitions))

    return Ceilings(
        threads=threads,
        stream_bytes=stream,
        reads={size: read(size) for size in sizes},
        peaks={path: peak(path) for path in wanted},
    )


def last_level_cache(folder: Path = _CACHE_FOLDER) -> int | None:
    """Bytes of the largest cache, or None where the system does not say."""
    sizes = []
    try:
        for entry in folder.glob("index*/size"):
            text = entry.read_text().strip()
            sizes.append(int(text[:-1]) * _UNITS[text[-1]] if text[-1:] in _UNITS else int(text))
    except (OSError, ValueError):
        return None
    return max(sizes, default=None)


def usable_cores() -> int:
    """Processors that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _higher(one: Rate, other: Rate) -> Rate:
    return Rate(max(one.best, other.best), min(one.worst, other.worst))


def _stream_bytes() -> int:
    cache = last_level_cache()
    return min(max(LEAST_STREAM, STREAM_CACHES * (cache or 0)), MOST_STREAM)


def _whole(size: int, threads: int, most: int | None) -> int:
    """Whole MiB for each thread, within bounds."""
    step = threads * _MIB
    bounded = size if most is None else min(size, most)
    return max(step, bounded // step * step)


def _scaled(threads: int, probe: Callable[[int], tuple[str, list[float]]]) -> ScaledRate:
    one = _rate(*probe(1))
    return ScaledRate(one, one if threads == 1 else _rate(*probe(threads)))


def _rate(error: str, rates: list[float]) -> Rate:
    if error:
        raise KernelError(f"probe: {error}")
    return Rate(max(rates), min(rates))
