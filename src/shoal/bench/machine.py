"""Where a benchmark ran, and whether somebody else was busy there meanwhile."""

from __future__ import annotations

import os
import platform
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from shoal.perf.ceilings import last_level_cache, usable_cores

MOST_STEAL = 0.02  # of all processor time
MOST_OTHERS = 0.05
MOST_LOAD = 0.5  # waiting or running per core, in the minute before
_PROC = Path("/proc")
_IDLE_FIELDS = (3, 4)  # idle and waiting for input or output, in /proc/stat
_STEAL_FIELD = 7


def machine_facts(isas: tuple[str, ...], proc: Path = _PROC) -> dict[str, Any]:
    """For a record: what was measured on."""
    return {
        "cpu": _cpu_model(proc),
        "architecture": platform.machine(),
        "system": platform.system(),
        "cores": usable_cores(),
        "last_level_cache_bytes": last_level_cache(),
        "instruction_sets": list(isas),
    }


class _Reading(NamedTuple):
    at: float
    busy: float  # all processes, in processor seconds
    steal: float
    own: float


@dataclass(frozen=True, slots=True)
class Disturbance:
    """What others took while something was measured, as shares of all processor time; None where unknown."""

    load_before: float | None
    steal: float | None
    others: float | None

    def warnings(self, cores: int) -> list[str]:
        """What a reader should know; empty when the machine was calm."""
        found = []
        if self.load_before is not None and self.load_before > MOST_LOAD * cores:
            found.append(f"the machine was busy before: load {self.load_before:.2f} on {cores} cores")
        if self.steal is not None and self.steal > MOST_STEAL:
            found.append(f"the hypervisor took {self.steal:.0%} of the processor time")
        if self.others is not None and self.others > MOST_OTHERS:
            found.append(f"other processes took {self.others:.0%} of the processor time")
        return found


class MachineWatch:
    """Reads the system's counters now and at each ``report``."""

    def __init__(self, proc: Path = _PROC, clock: Callable[[], float] = time.monotonic) -> None:
        self._proc = proc
        self._clock = clock
        self._load = _load()
        self._begin = self._read()

    def report(self, own_children: float = 0.0) -> Disturbance:
        """Since the beginning. ``own_children`` is processor time of processes that belong to the measurement."""
        begin, end = self._begin, self._read()
        if begin is None or end is None:
            return Disturbance(self._load, None, None)
        whole = max((end.at - begin.at) * (os.cpu_count() or 1), 1e-9)
        others = end.busy - begin.busy - (end.own - begin.own) - own_children
        return Disturbance(self._load, (end.steal - begin.steal) / whole, max(0.0, others / whole))

    def _read(self) -> _Reading | None:
        try:
            line = (self._proc / "stat").read_text().splitlines()[0]
            ticks = [int(word) for word in line.split()[1:9]]
            hertz = os.sysconf("SC_CLK_TCK")
            steal = ticks[_STEAL_FIELD] / hertz
            idle = sum(ticks[field] for field in _IDLE_FIELDS) / hertz
        except (OSError, ValueError, IndexError):
            return None
        used = resource.getrusage(resource.RUSAGE_SELF)
        return _Reading(self._clock(), sum(ticks) / hertz - idle - steal, steal, used.ru_utime + used.ru_stime)


def _cpu_model(proc: Path) -> str:
    try:
        for line in (proc / "cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _load() -> float | None:
    try:
        return os.getloadavg()[0]
    except (OSError, AttributeError):
        return None
