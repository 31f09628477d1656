"""How long schedule + commit take: `python benchmarks/scheduler_speed.py [sequences] [tokens]`.

Decodes of long sequences, the case that repeats most. Prints the median and the 99th percentile of one round.
"""

from __future__ import annotations

import statistics
import sys
import time

from shoal.core.params import SamplingParams
from shoal.core.plan import CacheShape, EntryResult, StepResult
from shoal.core.request import Request
from shoal.core.scheduler import Scheduler, SchedulerConfig


def main(sequences: int = 64, tokens: int = 1024, rounds: int = 1000) -> None:
    shape = CacheShape(sequences * (tokens + rounds) // 16 + 2 * sequences, 16, 30, 3, 64, "bf16")
    scheduler = Scheduler(SchedulerConfig(max_num_seqs=sequences, token_budget=8192), shape)
    for number in range(sequences):
        prompt = tuple((number * 7919 + i * 104729) % 49152 for i in range(tokens))
        scheduler.add(
            Request(
                request_id=str(number),
                prompt_ids=prompt,
                params=SamplingParams(temperature=0.0),
                max_tokens=rounds + 100,
                stop_ids=frozenset({2}),
                seed=0,
            ),
            0.0,
        )
    times = []
    for _ in range(sequences * tokens // 8192 + 1 + rounds):
        begin = time.perf_counter()
        plan = scheduler.schedule(0.0)
        planned = time.perf_counter()
        result = StepResult(tuple(EntryResult((5,)) if entry.samples else EntryResult() for entry in plan.entries))
        resumed = time.perf_counter()
        scheduler.commit(plan, result)
        end = time.perf_counter()
        if plan.num_rows == sequences:
            times.append(planned - begin + end - resumed)
    times.sort()
    print(
        f"{sequences} sequences of {tokens} tokens, {len(times)} steps: "
        f"median {statistics.median(times) * 1e3:.3f} ms, p99 {times[len(times) * 99 // 100] * 1e3:.3f} ms"
    )


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
