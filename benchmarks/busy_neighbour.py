"""How a step fares beside busy processes: `python benchmarks/busy_neighbour.py MODEL.gguf [neighbours]`.

Decodes a batch of 16 alone and beside processes that do nothing but spin, in turn, and prints the ratio of the median
step times. With one neighbour on two cores the neighbour takes a third of the time there is, so a step that lost only
that would take 1.5 times as long.
"""

from __future__ import annotations

import random
import statistics
import subprocess
import sys
import time
from dataclasses import replace

from shoal.assembly import build_backend, open_model
from shoal.config import EngineConfig
from shoal.core.params import SamplingParams
from shoal.core.request import Request
from shoal.core.scheduler import Scheduler, SchedulerConfig

BATCH, STEPS, ROUNDS = 16, 40, 5


def main(path: str, neighbours: int = 1) -> None:
    """Measure and print."""
    model, config, _ = open_model(path, EngineConfig())
    backend = build_backend(model, replace(config, kv_tokens=8192))
    scheduler = Scheduler(SchedulerConfig(), backend.cache_shape)
    generator = random.Random(0)
    for number in range(BATCH):
        scheduler.add(
            Request(
                request_id=str(number),
                prompt_ids=tuple(generator.randrange(3, 40000) for _ in range(32)),
                params=SamplingParams(temperature=0.0),
                max_tokens=2 * STEPS * ROUNDS + 10,
                stop_ids=frozenset(),
                seed=0,
            ),
            0.0,
        )

    def steps(count: int) -> list[float]:
        times = []
        for _ in range(count):
            begin = time.perf_counter()
            plan = scheduler.schedule(0.0)
            scheduler.commit(plan, backend.execute(plan))
            times.append(time.perf_counter() - begin)
        return times

    steps(5)
    alone: list[float] = []
    beside: list[float] = []
    for _ in range(ROUNDS):
        alone += steps(STEPS)
        spinning = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(neighbours)]
        try:
            time.sleep(0.3)  # until they are really spinning
            beside += steps(STEPS)
        finally:
            for process in spinning:
                process.kill()
                process.wait()
    before, after = statistics.median(alone), statistics.median(beside)
    print(
        f"{neighbours} busy neighbours: step {before * 1e3:.1f} ms alone, {after * 1e3:.1f} ms beside them: "
        f"{after / before:.2f} times"
    )


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
