"""What constraints cost: whole steps of the engine with 32 sequences, free and constrained, in turn.

A step is everything: drain, schedule, execute, commit, texts, hand out. ``blocked`` is the part of it in which the
engine does nothing but make masks and follow tokens. Beside it stands what a case's median step takes beyond the free
one's of the same round; on a machine whose speed drifts from second to second that is the rougher figure.

python benchmarks/grammar_cost.py MODEL.gguf [ROUNDS]
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from shoal.assembly import LoadedModel, load_model
from shoal.config import EngineConfig
from shoal.core.params import SamplingParams
from shoal.core.request import Request
from shoal.core.scheduler import Scheduler
from shoal.engine.engine import Engine
from shoal.engine.inbox import Inbox
from shoal.engine.messages import Chunk, Submit
from shoal.engine.request import resolve
from shoal.engine.start import scheduler_config
from shoal.errors import EngineError

BATCH = 32
NEW_TOKENS = 100
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
    "sentences": {"regex": "([A-Z][a-z ,']{10,80}[.!?] ){20,}"},
}


class Nobody:
    """Takes chunks and forgets them."""

    def deliver(self, chunks: Sequence[Chunk]) -> None:
        return

    def fail(self, error: EngineError) -> None:
        raise error


def main() -> None:
    model = load_model(sys.argv[1], EngineConfig(max_num_seqs=BATCH, context_length=1024, kv_tokens=32768))
    rounds = int(sys.argv[2]) if len(sys.argv) > 2 else 3
    blocked = [0.0]
    grammars: Any = model.backend._grammars
    grammars.masks, grammars.take_all = timed(grammars.masks, blocked), timed(grammars.take_all, blocked)
    shares: dict[str, list[tuple[float, float, float]]] = {name: [] for name in CASES}
    for number in range(rounds + 1):
        free = 0.0
        for name, constraint in CASES.items():
            steps, inside = run(model, f"{name} {number}", constraint, blocked)
            middle = statistics.median(steps)
            free = free or middle
            if number:  # the first round compiles and warms up
                shares[name].append((middle, 1 - free / middle, statistics.mean(inside) / statistics.mean(steps)))
    for name, found in shares.items():
        middle, share, inside_share = (statistics.median(column) for column in zip(*found, strict=True))
        print(f"{name:14} step {middle * 1e3:5.1f} ms, beyond the free one {share:5.1%}, blocked {inside_share:5.1%}")
    model.backend.close()


def run(
    model: LoadedModel, name: str, constraint: dict[str, Any], blocked: list[float]
) -> tuple[list[float], list[float]]:
    """Seconds of each step in which nearly all sequences decode, and of those the blocked ones."""
    scheduler = Scheduler(scheduler_config(model.config), model.backend.cache_shape)
    engine = Engine(model.backend, model.tokenizer, scheduler, Inbox(BATCH), time.perf_counter)
    outbox = Nobody()
    for number in range(BATCH):
        prompt = model.tokenizer.encode(f"Animal number {number} as JSON: ")
        params = SamplingParams(seed=number, max_tokens=NEW_TOKENS, ignore_eos=True, **constraint)
        request = resolve(f"{name} {number}", prompt, params, engine.limits)
        assert isinstance(request, Request)
        engine.inbox.submit(Submit(request, outbox, 0.0))
    steps, inside = [], []
    before = engine.stats
    engine.step()
    while engine.has_work():
        before, blocked[0], began = engine.stats, 0.0, time.perf_counter()
        engine.step()
        took, after = time.perf_counter() - began, engine.stats
        rows = after.step_rows - before.step_rows
        if rows == after.step_sequences - before.step_sequences >= 3 * BATCH // 4:
            steps.append(took)
            inside.append(blocked[0])
    return steps, inside


def timed(function: Callable[..., Any], spent: list[float]) -> Callable[..., Any]:
    """The function, its time added to ``spent``."""

    def call(*arguments: Any) -> Any:
        began = time.perf_counter()
        try:
            return function(*arguments)
        finally:
            spent[0] += time.perf_counter() - began

    return call


if __name__ == "__main__":
    main()
