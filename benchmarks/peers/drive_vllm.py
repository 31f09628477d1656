"""Runs vLLM's CPU backend in its own environment: `drive_vllm.py HF_FOLDER WORK.json`.

WORK and what is printed are as for OpenVINO's driver.
"""

import json
import os
import random
import sys
import time
from pathlib import Path


def main(model: str, work: dict) -> None:
    # Read by vLLM when it is imported; all its processes log to standard output unless told otherwise.
    os.environ.update(
        VLLM_CPU_KVCACHE_SPACE="2", HF_HUB_OFFLINE="1", VLLM_LOGGING_LEVEL="ERROR", VLLM_NO_USAGE_STATS="1"
    )
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", ",".join(map(str, sorted(os.sched_getaffinity(0)))))
    from vllm import LLM, SamplingParams

    longest = work["prompt_len"] + work["output_len"]
    began = time.perf_counter()
    llm = LLM(
        model=model,
        dtype="bfloat16",
        max_model_len=longest + 16,
        max_num_seqs=max(work["batches"]),
        enable_prefix_caching=False,
    )
    print(json.dumps({"startup_s": time.perf_counter() - began}), flush=True)
    source = random.Random(work["seed"])

    def prompts(count: int) -> list[dict]:
        rows = [[source.randrange(20, work["vocab"]) for _ in range(work["prompt_len"])] for _ in range(count)]
        return [{"prompt_token_ids": row} for row in rows]

    def seconds(inputs: list[dict], tokens: int) -> float:
        params = SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=0.0)
        begin = time.perf_counter()
        results = llm.generate(inputs, params, use_tqdm=False)
        elapsed = time.perf_counter() - begin
        lengths = {len(result.outputs[0].token_ids) for result in results}
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
