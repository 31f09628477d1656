"""Counting a step's bytes and operations, against counting one by one."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.core.params import SamplingParams
from shoal.core.plan import StepEntry, StepPlan
from shoal.core.request import Request
from shoal.perf.ceilings import Ceilings, Rate, ScaledRate
from shoal.perf.roofline import MEMORY, step_bound
from shoal.perf.step_cost import Matrix, ModelCost, SequenceRows, attended_pairs, model_cost, plan_rows, step_cost

LAYERS, HEADS, HEAD_DIM = 2, 3, 4
SIZES = [(7, 5, "int8"), (5, 7, "int8"), (3, 5, "fp32")]
HEAD = (11, 5, "int8")
COST = model_cost(
    body=[Matrix(*size) for size in SIZES],
    head=Matrix(*HEAD),
    weight_bytes=1000,
    kv_bytes_per_token=48,
    num_layers=LAYERS,
    num_heads=HEADS,
    head_dim=HEAD_DIM,
    attention_path="fp32",
)
sequences = st.lists(
    st.builds(SequenceRows, st.integers(0, 20), st.integers(1, 9), st.booleans()), min_size=1, max_size=6
)


def one_by_one(steps: list[SequenceRows]) -> dict[str, float]:
    """The slow twin: every product counted where a naive program would do it."""
    ops = {"int8": 0.0, "fp32": 0.0}
    for start, rows, samples in steps:
        for position in range(start, start + rows):
            for outputs, inputs, path in SIZES:
                for _ in range(outputs):
                    ops[path] += 2 * inputs
            for _ in range(LAYERS * HEADS):
                for _attended in range(position + 1):
                    ops["fp32"] += 2 * HEAD_DIM + 2 * HEAD_DIM  # a score, and its part of the sum
        if samples:
            ops[HEAD[2]] += 2 * HEAD[0] * HEAD[1]
    return ops


@given(sequences)
def test_operations_equal_those_counted_one_by_one(steps: list[SequenceRows]) -> None:
    cost = step_cost(COST, steps)
    assert cost.ops == one_by_one(steps)
    assert cost.matmul_ops + cost.attention_ops == sum(cost.ops.values())


@given(sequences)
def test_bytes_are_weights_once_and_every_past_once(steps: list[SequenceRows]) -> None:
    cost = step_cost(COST, steps)
    sampled = any(item.samples for item in steps)
    assert cost.weight_bytes == (COST.weight_bytes if sampled else COST.body_bytes)
    assert cost.kv_read_bytes == 48 * sum(item.start + item.rows for item in steps)
    assert cost.kv_written_bytes == 48 * sum(item.rows for item in steps)
    assert cost.bytes == cost.weight_bytes + cost.kv_read_bytes + cost.kv_written_bytes


@given(st.integers(0, 50), st.integers(1, 50), st.integers(1, 50))
def test_chunks_attend_to_as_much_as_the_whole(start: int, first: int, second: int) -> None:
    assert attended_pairs(start, first) + attended_pairs(start + first, second) == attended_pairs(start, first + second)
    assert attended_pairs(start, first) == sum(start + row + 1 for row in range(first))


@given(sequences, sequences)
def test_a_shared_step_computes_as_much_as_two_and_reads_the_weights_once(
    left: list[SequenceRows], right: list[SequenceRows]
) -> None:
    both, one, other = (step_cost(COST, item) for item in (left + right, left, right))
    for path in ("int8", "fp32"):
        assert both.ops[path] == one.ops[path] + other.ops[path]
    assert both.kv_read_bytes == one.kv_read_bytes + other.kv_read_bytes
    assert both.weight_bytes == max(one.weight_bytes, other.weight_bytes)


def test_weights_are_shared_out_by_number() -> None:
    assert COST.weight_bytes == 1000
    assert COST.head_bytes == 1000 * 55 // (35 + 35 + 15 + 55)
    assert COST.paths == ("int8", "fp32")
    assert step_cost(COST, []).bytes == 0


def test_a_plan_gives_its_rows() -> None:
    request = Request(
        request_id="a", prompt_ids=(1, 2, 3), params=SamplingParams(), max_tokens=4, stop_ids=frozenset(), seed=0
    )
    entries = (
        StepEntry(0, request, 0, 0, (1, 2), (0,), False, 0, ()),
        StepEntry(1, request, 0, 5, (9,), (1,), True, 2, ()),
    )
    assert plan_rows(StepPlan(1, entries, 3, ())) == (SequenceRows(0, 2, False), SequenceRows(5, 1, True))


def machine(bandwidth: float, int8: float, fp32: float) -> Ceilings:
    def same(value: float) -> ScaledRate:
        return ScaledRate(Rate(value, value), Rate(value, value))

    return Ceilings(
        threads=1, stream_bytes=1, reads={1: same(bandwidth)}, peaks={"int8": same(int8), "fp32": same(fp32)}
    )


@given(sequences, st.floats(1, 1e6), st.floats(1, 1e6), st.floats(1, 1e6))
def test_the_bound_is_the_longer_of_memory_and_arithmetic(
    steps: list[SequenceRows], bandwidth: float, int8: float, fp32: float
) -> None:
    cost = step_cost(COST, steps)
    bound = step_bound(cost, machine(bandwidth, int8, fp32))
    arithmetic = cost.ops["int8"] / int8 + cost.ops["fp32"] / fp32
    assert bound.seconds == pytest.approx(max(cost.bytes / bandwidth, arithmetic))
    assert (bound.binding == MEMORY) == (cost.bytes / bandwidth >= sum(bound.compute.values()))
    faster = step_bound(cost, machine(2 * bandwidth, 2 * int8, 2 * fp32))
    assert faster.seconds == pytest.approx(bound.seconds / 2)


def test_what_binds_is_named() -> None:
    cost = step_cost(COST, [SequenceRows(0, 1, True)])
    assert step_bound(cost, machine(1.0, 1e9, 1e9)).binding == MEMORY
    assert step_bound(cost, machine(1e12, 1.0, 1e9)).binding == "int8"
    assert step_bound(cost, machine(1e12, 1e9, 1.0)).binding == "fp32"


def test_a_path_without_work_needs_no_ceiling() -> None:
    cost = ModelCost(
        body_bytes=10,
        head_bytes=0,
        body_ops={"int8": 1.0},
        head_ops={"never": 1.0},
        kv_bytes_per_token=0,
        attention_ops_per_pair=1,
        attention_path="fp32",
    )
    bound = step_bound(step_cost(cost, [SequenceRows(0, 1, False)]), machine(1.0, 1.0, 1.0))
    assert math.isfinite(bound.seconds)
    assert set(bound.compute) == {"int8", "fp32"}
