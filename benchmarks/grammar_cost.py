"""What constraints cost: step times of 32 sequences, free and constrained, and the part of them that masks take.

python benchmarks/grammar_cost.py MODEL.gguf
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

from shoal.assembly import load_model
from shoal.config import EngineConfig
from shoal.core.params import SamplingParams
from shoal.core.scheduler import Scheduler
from shoal.engine.request import Limits, resolve
from shoal.engine.start import scheduler_config

BATCH = 32
ITEM = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "kind": {"enum": ["cat", "dog", "bird"]}},
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}
SCHEMA = {"type": "array", "minItems": 40, "items": ITEM}
CASES: dict[str, dict[str, Any]] = {
    "free": {},
    "schema": {"response_format": {"type": "json_schema", "json_schema": {"name": "list", "schema": SCHEMA}}},
    "any object": {"response_format": {"type": "json_object"}},
    "counted class": {"regex": "[a-zA-Z ,.]{200,}"},
}


def main() -> None:
    model = load_model(sys.argv[1], EngineConfig(max_num_seqs=BATCH, context_length=1024, kv_tokens=32768))
    backend = model.backend
    limits = Limits(
        context_length=1024,
        vocab_size=backend.vocab_size,
        pool_tokens=32768,
        max_waiting=BATCH,
        eos_ids=model.tokenizer.eos_ids,
        check_grammar=backend.check_grammar,
    )
    spent = [0.0]

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*arguments)
            finally:
                spent[0] += time.perf_counter() - began

        return call

    grammars: Any = backend._grammars
    grammars.masks, grammars.take = timed(grammars.masks), timed(grammars.take)
    for name, constraint in CASES.items():
        scheduler = Scheduler(scheduler_config(model.config), backend.cache_shape)
        for number in range(BATCH):
            prompt = model.tokenizer.encode(f"Animal number {number} as JSON: ")
            params = SamplingParams(seed=number, max_tokens=100, ignore_eos=True, **constraint)
            scheduler.add(resolve(f"{name} {number}", prompt, params, limits), 0.0)  # type: ignore[arg-type]
        steps, total, masks = 0, 0.0, 0.0
        while scheduler.has_work():
            plan = scheduler.schedule(0.0)
            spent[0], began = 0.0, time.perf_counter()
            result = backend.execute(plan)
            if plan.num_rows == len(plan.entries) >= 3 * BATCH // 4:
                steps, total, masks = steps + 1, total + time.perf_counter() - began, masks + spent[0]
            for delta in scheduler.commit(plan, result):
                if delta.finish is not None:
                    backend.forget(delta.seq_id)
        print(f"{name:14} {steps:3} steps, {total / steps * 1e3:5.1f} ms each, masks {masks / total:.1%}")


if __name__ == "__main__":
    main()
