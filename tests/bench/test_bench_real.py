"""What a step of the default model costs, against its sizes worked out by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.bench.subject import load_subject
from shoal.bench.work import Work
from shoal.config import EngineConfig
from shoal.core.params import SamplingParams
from shoal.perf.step_cost import SequenceRows, step_cost

pytestmark = pytest.mark.model
LAYERS, HIDDEN, FFN, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 30, 576, 1536, 9, 3, 64, 49152
BODY = LAYERS * (2 * HIDDEN * HIDDEN + 2 * HIDDEN * KV_HEADS * HEAD_DIM + 3 * HIDDEN * FFN)
HEAD = HIDDEN * VOCAB


@pytest.mark.parametrize(("kv_dtype", "bytes_each"), [("f32", 4), ("bf16", 2), ("int8", 1 + 4 / HEAD_DIM)])
def test_the_default_model_costs_what_its_sizes_say(model_path: Path, kv_dtype: str, bytes_each: float) -> None:
    config = EngineConfig(kv_dtype=kv_dtype, threads=1)
    loaded = load_subject(model_path, config, Work(prompt_len=16, output_len=4), [1, 2], SamplingParams())
    cost = loaded.subject.cost
    assert cost.weight_bytes == loaded.weight_bytes == loaded.subject.backend.weight_bytes  # type: ignore[attr-defined]
    assert sum(cost.body_ops.values()) == 2 * BODY
    assert sum(cost.head_ops.values()) == 2 * HEAD
    assert cost.kv_bytes_per_token == 2 * LAYERS * KV_HEADS * HEAD_DIM * bytes_each
    step = step_cost(cost, [SequenceRows(99, 1, True)])
    assert step.matmul_ops == 2 * (BODY + HEAD)
    assert step.attention_ops == 100 * 4 * LAYERS * HEADS * HEAD_DIM
    assert step.bytes == cost.weight_bytes + 101 * cost.kv_bytes_per_token
    assert loaded.subject.backend.cache_shape.num_blocks == 4, "two sequences of twenty tokens, and no more"
    loaded.subject.backend.close()


def test_float_weights_take_four_bytes_each(model_path: Path) -> None:
    work = Work(prompt_len=16, output_len=4)
    loaded = load_subject(model_path, EngineConfig(precision="f32", threads=1), work, [1], SamplingParams())
    cost = loaded.subject.cost
    assert (cost.body_bytes, cost.head_bytes) == (4 * BODY, 4 * HEAD)
    loaded.subject.backend.close()
