"""Tokens per second through the real scheduler and backend: `python benchmarks/engine_speed.py MODEL.gguf [--json]`.

Each batch size runs B sequences of 128 random prompt tokens and 128 greedy ones, end-of-sequence ignored, no prefix
cache: the work that llama.cpp's llama-batched-bench does with -npp 128 -ntg 128. Prefill is timed to the step in which
the last prompt ends, decode over the steps after it. The median of three rounds.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from dataclasses import replace

from shoal.assembly import build_backend, open_model
from shoal.backends.cpu import CpuBackend
from shoal.config import EngineConfig
from shoal.core.params import SamplingParams
from shoal.core.request import Request
from shoal.core.scheduler import Scheduler, SchedulerConfig

PROMPT, OUTPUT, ROUNDS = 128, 128, 3


def one_round(backend: CpuBackend, batch: int, seed: int) -> tuple[float, float]:
    """Prefill and decode tokens per second."""
    generator = random.Random(seed)
    scheduler = Scheduler(SchedulerConfig(max_num_seqs=64, token_budget=512, prefix_caching=False), backend.cache_shape)
    for number in range(batch):
        scheduler.add(
            Request(
                request_id=str(number),
                prompt_ids=tuple(generator.randrange(3, 40000) for _ in range(PROMPT)),
                params=SamplingParams(temperature=0.0),
                max_tokens=OUTPUT,
                stop_ids=frozenset(),
                seed=0,
            ),
            0.0,
        )
    prefill = decode = 0.0
    decoded = 0
    waiting = batch * PROMPT
    while scheduler.has_work():
        begin = time.perf_counter()
        plan = scheduler.schedule(0.0)
        deltas = scheduler.commit(plan, backend.execute(plan))
        for delta in deltas:
            if delta.finish is not None:
                backend.forget(delta.seq_id)
        elapsed = time.perf_counter() - begin
        if waiting > 0:
            prefill += elapsed
            waiting -= sum(len(entry.token_ids) for entry in plan.entries if entry.num_generated == 0)
        else:
            decode += elapsed
            decoded += len(deltas)
    return batch * PROMPT / prefill, decoded / decode


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="path of a .gguf file")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 16, 32, 64])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    model, config, _ = open_model(arguments.model, EngineConfig())
    backend = build_backend(model, replace(config, kv_tokens=64 * 288))
    one_round(backend, 4, 0)
    results = []
    for batch in arguments.batch:
        rounds = [one_round(backend, batch, seed) for seed in range(arguments.rounds)]
        prefill, decode = (statistics.median(values) for values in zip(*rounds, strict=True))
        results.append({"batch": batch, "prefill_tokens_per_s": round(prefill), "decode_tokens_per_s": round(decode)})
        if not arguments.json:
            print(f"B={batch} prefill {prefill:.0f} decode {decode:.0f} tokens/s")
    if arguments.json:
        print(json.dumps({"precision": config.precision, "threads": config.threads, "results": results}))


if __name__ == "__main__":
    main()
