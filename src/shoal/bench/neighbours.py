"""Busy processes beside the measured one: what an HTTP server or anybody else on the machine does to a step.

A neighbour spins and does nothing else, the most that a process can take. What it really got is read from the system,
so that a slowdown can be held against the share of the processors that was taken away.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

_SPIN = "print(flush=True)\nwhile True: pass"


class Neighbours:
    """So many spinning processes, from entering the context to leaving it."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._running: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        for _ in range(self._count):
            process = subprocess.Popen([sys.executable, "-I", "-S", "-c", _SPIN], stdout=subprocess.PIPE)
            self._running.append(process)
        for process in self._running:
            assert process.stdout is not None
            process.stdout.readline()  # it has begun
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for process in self._running:
            process.kill()
        for process in self._running:
            process.communicate()
        self._running.clear()

    def cpu_seconds(self) -> float:
        """Processor time they took so far; 0 where the system does not say."""
        return sum(_cpu_seconds(process.pid) for process in self._running)


@dataclass(frozen=True, slots=True)
class FairShare:
    """How much slower a step may be beside neighbours.

    by_count: if every thread that wants a core gets the same.
    by_taken: given the processor time that the neighbours really took.
    """

    by_count: float
    by_taken: float


def fair_share(threads: int, cores: int, neighbours: int, taken_cores: float) -> FairShare:
    """For ``threads`` computing threads. ``taken_cores``: the neighbours' processor time over the time that passed."""
    alone = min(threads, cores)
    by_count = alone if threads + neighbours <= cores else min(alone, cores * threads / (threads + neighbours))
    left = max(cores - taken_cores, cores * 1e-3)
    return FairShare(by_count=alone / by_count, by_taken=max(1.0, alone / min(alone, left)))


def _cpu_seconds(pid: int, proc: Path = Path("/proc")) -> float:
    try:
        # The name in brackets may hold anything; user and system time are fields 14 and 15, counted from 1.
        fields = (proc / str(pid) / "stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return 0.0
