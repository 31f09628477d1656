"""How much memory this process may still take: the system's word, or a container's limit if that is lower."""

from __future__ import annotations

from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


def available_memory(meminfo: Path = _MEMINFO, cgroup: Path = _CGROUP) -> int | None:
    """Bytes, or None where the system does not say."""
    found = [value for value in (_system_available(meminfo), _container_available(cgroup)) if value is not None]
    return min(found) if found else None


def _system_available(meminfo: Path) -> int | None:
    try:
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        return None
    return None


def _container_available(cgroup: Path) -> int | None:
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        if limit == "max":
            return None
        used = int((cgroup / "memory.current").read_text())
        # Page cache counts as used but is given back under pressure.
        inactive = 0
        for line in (cgroup / "memory.stat").read_text().splitlines():
            if line.startswith("inactive_file "):
                inactive = int(line.split()[1])
        return max(0, int(limit) - used + inactive)
    except (OSError, ValueError, IndexError):
        return None
