"""When requests arrive in an open loop: times that know nothing of the server, so a slow one cannot slow them.

Gaps are drawn from a gamma distribution of mean 1 / rate. Its shape says how bursty the traffic is: 1 is a Poisson
process (independent users), below 1 arrivals come in clusters with pauses between, and large ones are nearly even. The
coefficient of variation of the gaps is 1 / sqrt(shape). Same seed, same times.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterable

from shoal.errors import ConfigError

POISSON = 1.0
BURSTY = 0.25  # gaps vary twice as much as a Poisson process's


def draw_arrivals(rate: float, count: int, *, shape: float = POISSON, seed: int = 0) -> tuple[float, ...]:
    """Seconds from the start at which ``count`` requests are sent, the first at once."""
    if not (math.isfinite(rate) and rate > 0):
        raise ConfigError("rate", f"must be a positive number of requests per second, got {rate}")
    if not (math.isfinite(shape) and shape > 0):
        raise ConfigError("burstiness", f"must be a positive number, got {shape}")
    generator = random.Random(f"arrivals/{seed}")
    times, now = [], 0.0
    for _ in range(count):
        times.append(now)
        now += generator.gammavariate(shape, 1 / (shape * rate))
    return tuple(times)


def read_trace(lines: Iterable[str], name: str) -> tuple[float, ...]:
    """Arrival times from a file with a JSON number, or an object with "at", in each line; seconds, in any order.

    ConfigError names the line. The earliest becomes 0.
    """
    times = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except ValueError as error:
            raise ConfigError("trace", f"{name}, line {number}: not JSON: {error}") from None
        at = value.get("at") if isinstance(value, dict) else value
        if isinstance(at, bool) or not isinstance(at, (int, float)) or not math.isfinite(at):
            raise ConfigError("trace", f"{name}, line {number}: must be seconds, or an object with them as 'at'")
        times.append(float(at))
    if not times:
        raise ConfigError("trace", f"{name} holds no arrival times")
    first = min(times)
    return tuple(sorted(at - first for at in times))
