"""Runs OpenVINO GenAI's continuous batching in its own environment: `drive_openvino.py MODEL.gguf WORK.json`.

WORK holds batches, prompt_len, output_len, vocab and seed. Prints one JSON line per batch size. A first run of the
prompts that gives one token is the prefill; what the whole run takes beyond it is the decode.
"""

import json
import random
import sys
import time
from pathlib import Path

import numpy as np
import openvino
import openvino_genai as genai

KV_GIB = 2


def main(model: str, work: dict) -> None:
    limits = genai.SchedulerConfig()
    limits.cache_size = KV_GIB
    limits.max_num_seqs = max(work["batches"])
    limits.max_num_batched_tokens = 512
    limits.enable_prefix_caching = False
    began = time.perf_counter()
    pipeline = genai.ContinuousBatchingPipeline(model, limits, "CPU")
    print(json.dumps({"startup_s": time.perf_counter() - began}), flush=True)
    source = random.Random(work["seed"])

    def prompts(count: int) -> list[openvino.Tensor]:
        rows = [[source.randrange(20, work["vocab"]) for _ in range(work["prompt_len"])] for _ in range(count)]
        return [openvino.Tensor(np.array([row], dtype=np.int64)) for row in rows]

    def seconds(inputs: list[openvino.Tensor], tokens: int) -> float:
        config = genai.GenerationConfig()
        config.max_new_tokens = tokens
        config.ignore_eos = True
        config.do_sample = False
        begin = time.perf_counter()
        results = pipeline.generate(inputs, [config] * len(inputs))
        elapsed = time.perf_counter() - begin
        lengths = {len(result.m_generation_ids[0]) for result in results}
        if lengths != {tokens}:
            raise SystemExit(f"asked for {tokens} tokens, got {lengths}")
        return elapsed

    seconds(prompts(4), 8)
    for batch in work["batches"]:
        first, whole = seconds(prompts(batch), 1), seconds(prompts(batch), work["output_len"])
        figures = {
            "batch": batch,
            "prefill_tokens_per_s": batch * work["prompt_len"] / first,
            "decode_tokens_per_s": batch * (work["output_len"] - 1) / (whole - first),
        }
        print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], json.loads(Path(sys.argv[2]).read_text(encoding="utf-8")))
