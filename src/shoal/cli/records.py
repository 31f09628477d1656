"""A request's output as JSON, the same for every command."""

from __future__ import annotations

from typing import Any

from shoal.core.plan import TokenLogprobs
from shoal.engine.outputs import CompletionOutput, RequestOutput, Timings


def output_record(output: RequestOutput) -> dict[str, Any]:
    """The output; the first completion's text stands at the top, where scripts look for it."""
    record = {
        "text": output.text,
        "finish_reason": str(output.finish_reason),
        "completions": [_completion(item) for item in output.completions],
        "usage": {
            "prompt_tokens": output.usage.prompt_tokens,
            "completion_tokens": output.usage.completion_tokens,
            "cached_tokens": output.usage.cached_tokens,
        },
        "timings": None if output.timings is None else _timings(output.timings),
        "seed": output.seed,
    }
    if output.prompt_logprobs:
        record["prompt_logprobs"] = [_logprobs(entry) for entry in output.prompt_logprobs]
    return record


def _completion(item: CompletionOutput) -> dict[str, Any]:
    record: dict[str, Any] = {
        "index": item.index,
        "text": item.text,
        "token_ids": list(item.token_ids),
        "finish_reason": str(item.finish_reason),
    }
    if item.logprobs:
        record["logprobs"] = [_logprobs(entry) for entry in item.logprobs]
    if item.error is not None:
        record["error"] = item.error
    return record


def _logprobs(entry: TokenLogprobs) -> dict[str, Any]:
    return {"logprob": entry.logprob, "top": [{"token_id": token, "logprob": value} for token, value in entry.top]}


def _timings(timings: Timings) -> dict[str, Any]:
    return {
        "queue_s": timings.queue,
        "prefill_s": timings.prefill,
        "decode_s": timings.decode,
        "ttft_s": timings.ttft,
        "total_s": timings.total,
        "tpot_s": timings.tpot,
        "compute_s": timings.compute,
        "mean_batch": timings.mean_batch,
    }
