"""The bytes and operations of a step, counted from sizes alone.

What a step cannot avoid: reading every packed weight once, reading the keys and values of every sequence's past once,
writing those of its new rows, and the multiplications of its matrix products and its attention. What it could avoid in
principle (activations, logits, unpacking) is not counted, so the least time that follows is a lower bound.

A multiply and an add are two operations.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from shoal.core.plan import StepPlan


class SequenceRows(NamedTuple):
    """One sequence's part of a step: ``rows`` new positions after ``start`` cached ones, and those that need logits."""

    start: int
    rows: int
    samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCost:
    """What one model in one precision costs. Paths are names of arithmetic (see ``paths``).

    body_bytes: packed weights that every step reads.
    head_bytes: packed weights of the language-model head, which only a step that samples reads.
    body_ops: operations per row, by path.
    head_ops: operations per sampled row, by path.
    kv_bytes_per_token: keys and values of one token, all layers.
    attention_ops_per_pair: operations for one row and one token it attends to, all layers.
    attention_path: the arithmetic of attention.
    """

    body_bytes: int
    head_bytes: int
    body_ops: Mapping[str, float]
    head_ops: Mapping[str, float]
    kv_bytes_per_token: int
    attention_ops_per_pair: int
    attention_path: str

    @property
    def weight_bytes(self) -> int:
        """All packed weights."""
        return self.body_bytes + self.head_bytes

    @property
    def paths(self) -> tuple[str, ...]:
        """Every path used."""
        return tuple(dict.fromkeys([*self.body_ops, *self.head_ops, self.attention_path]))


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """What one step must move and compute. ``ops`` is by path, all kinds together."""

    weight_bytes: int
    kv_read_bytes: int
    kv_written_bytes: int
    matmul_ops: float
    attention_ops: float
    ops: Mapping[str, float]

    @property
    def bytes(self) -> int:
        """Everything that crosses the memory's pins."""
        return self.weight_bytes + self.kv_read_bytes + self.kv_written_bytes


class Matrix(NamedTuple):
    """One weight matrix: outputs times inputs, and the path that multiplies by it."""

    rows: int
    columns: int
    path: str

    @property
    def elements(self) -> int:
        """Weights in it."""
        return self.rows * self.columns


def model_cost(
    *,
    body: Iterable[Matrix],
    head: Matrix,
    weight_bytes: int,
    kv_bytes_per_token: int,
    num_layers: int,
    num_heads: int,
    head_dim: int,
    attention_path: str,
) -> ModelCost:
    """The cost of a model whose packed weights take ``weight_bytes``, which are shared out by number of weights."""
    body_ops: dict[str, float] = {}
    elements = 0
    for matrix in body:
        elements += matrix.elements
        body_ops[matrix.path] = body_ops.get(matrix.path, 0.0) + 2.0 * matrix.elements
    head_bytes = weight_bytes * head.elements // (elements + head.elements)
    return ModelCost(
        body_bytes=weight_bytes - head_bytes,
        head_bytes=head_bytes,
        body_ops=body_ops,
        head_ops={head.path: 2.0 * head.elements},
        kv_bytes_per_token=kv_bytes_per_token,
        # A score and a weighted sum, each a multiply and an add per dimension.
        attention_ops_per_pair=4 * num_layers * num_heads * head_dim,
        attention_path=attention_path,
    )


def step_cost(model: ModelCost, sequences: Iterable[SequenceRows]) -> StepCost:
    """The cost of a step that runs these sequences' rows together."""
    rows = samples = past = pairs = 0
    for start, count, sampled in sequences:
        rows += count
        samples += sampled
        past += start + count
        pairs += attended_pairs(start, count)
    attention_ops = float(model.attention_ops_per_pair) * pairs
    ops: dict[str, float] = {}
    for per_row, times in ((model.body_ops, rows), (model.head_ops, samples)):
        for path, each in per_row.items():
            ops[path] = ops.get(path, 0.0) + each * times
    matmul_ops = sum(ops.values())
    ops[model.attention_path] = ops.get(model.attention_path, 0.0) + attention_ops
    return StepCost(
        weight_bytes=(model.body_bytes if rows else 0) + (model.head_bytes if samples else 0),
        kv_read_bytes=past * model.kv_bytes_per_token,
        kv_written_bytes=rows * model.kv_bytes_per_token,
        matmul_ops=matmul_ops,
        attention_ops=attention_ops,
        ops=ops,
    )


def attended_pairs(start: int, rows: int) -> int:
    """Pairs of a row and a token it attends to: row i of [start, start + rows) attends to i + 1 tokens."""
    return rows * start + rows * (rows + 1) // 2


def plan_rows(plan: StepPlan) -> tuple[SequenceRows, ...]:
    """What a plan runs."""
    return tuple(
        SequenceRows(entry.start, len(entry.token_ids), entry.samples + entry.num_scored) for entry in plan.entries
    )
