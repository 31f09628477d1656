"""Runs a few recorded operations natively and by the reference, on one set of random weights.

A harness model is a function over ``Ops`` that ends in logits. Where an operation's own output is wanted, an identity
head passes it on: a float32 product with the identity matrix changes no value.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.errors import KernelError
from shoal.kernels.native import _native
from shoal.kernels.native.recorder import NativeOps
from shoal.kernels.ops import StepInputs, WeightTensor
from shoal.kernels.reference import ReferenceCache, ReferenceOps, ReferenceWeights
from shoal.models.dequantize import dequantize

BLOCK_BYTES = {
    "F32": (1, 4),
    "F16": (1, 2),
    "BF16": (1, 2),
    "Q8_0": (32, 34),
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
}
# Where the half-precision scales stand in a block.
SCALES = {
    "Q8_0": (0,),
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
}
QUANTIZED = tuple(SCALES)
FLOATS = ("F32", "F16", "BF16")


def float_weight(values: NDArray[np.float32], name: str = "w") -> WeightTensor:
    """A float32 weight holding exactly ``values``."""
    values = np.ascontiguousarray(values, dtype=np.float32)
    rows = values.reshape(1, -1) if values.ndim == 1 else values
    return WeightTensor(name, "F32", values.shape, rows.view(np.uint8))


def random_weight(rng: np.random.Generator, type_name: str, rows: int, features: int) -> WeightTensor:
    """Random integers in every block, scales of both signs and a sensible size."""
    elements, size = BLOCK_BYTES[type_name]
    blocks = features // elements
    if type_name == "F32":
        return float_weight(rng.standard_normal((rows, features)).astype(np.float32), type_name)
    if type_name == "F16":
        data = rng.standard_normal((rows, features)).astype(np.float16).view(np.uint8)
    elif type_name == "BF16":
        bits = rng.standard_normal((rows, features)).astype(np.float32).view(np.uint32) >> 16
        data = bits.astype(np.uint16).view(np.uint8)
    else:
        raw = rng.integers(0, 256, (rows, blocks, size), dtype=np.uint8)
        for offset in SCALES[type_name]:
            scale = (rng.standard_normal((rows, blocks, 1)) * 0.01).astype(np.float16)
            raw[:, :, offset : offset + 2] = scale.view(np.uint8)
        data = raw.reshape(rows, blocks * size)
    return WeightTensor(type_name, type_name, (rows, features), np.ascontiguousarray(data))


@dataclass(frozen=True)
class Geometry:
    """Sizes of a harness model's cache and step."""

    vocab: int
    num_layers: int = 1
    num_heads: int = 1
    num_kv_heads: int = 1
    head_dim: int = 16
    num_blocks: int = 8
    block_size: int = 16
    max_rows: int = 64
    max_context: int = 128
    kv_dtype: str = "f32"


Model = Callable[[Any], Any]


class Native:
    """The model recorded once; ``run`` replays it."""

    def __init__(self, model: Model, shape: Geometry, *, isa: str, precision: str = "native", threads: int = 1) -> None:
        self.vocab = shape.vocab
        self.program = _native.Program(
            isa=isa,
            max_rows=shape.max_rows,
            max_samples=shape.max_rows,
            max_sequences=shape.max_rows,
            max_context=shape.max_context,
            vocab=shape.vocab,
            num_layers=shape.num_layers,
            num_heads=shape.num_heads,
            threads=threads,
            num_blocks=shape.num_blocks,
            block_size=shape.block_size,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            cache_type=shape.kv_dtype,
        )
        ops = NativeOps(self.program, precision=precision, max_context=shape.max_context, dequantize=dequantize)
        ops.seal(model(ops))

    def run(self, inputs: StepInputs) -> NDArray[np.float32]:
        """Logits of the sample rows; the output arrives poisoned."""
        out = np.full((len(inputs.sample_rows), self.vocab), np.nan, dtype=np.float32)
        error = self.program.logits(
            inputs.token_ids, inputs.positions, inputs.row_starts, inputs.block_tables, inputs.sample_rows, out
        )
        if error:
            raise KernelError(error)
        return out


class Reference:
    """The same model by the reference operations, with a cache that lives from step to step."""

    def __init__(self, model: Model, shape: Geometry, *, precision: str = "native") -> None:
        self.model = model
        self.cache = ReferenceCache(
            num_layers=shape.num_layers,
            num_blocks=shape.num_blocks,
            block_size=shape.block_size,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            dtype=shape.kv_dtype,
        )
        self.weights = ReferenceWeights(dequantize, precision)

    def run(self, inputs: StepInputs) -> NDArray[np.float32]:
        """Logits of the sample rows."""
        result: NDArray[np.float32] = self.model(ReferenceOps(inputs, self.cache, self.weights))
        return result


def rows_step(token_ids: list[int]) -> StepInputs:
    """Independent sequences of one token each at position 0, all rows sampled."""
    count = len(token_ids)
    return StepInputs(
        token_ids=np.array(token_ids, dtype=np.int32),
        positions=np.zeros(count, dtype=np.int32),
        row_starts=np.arange(count + 1, dtype=np.int32),
        block_tables=np.zeros((count, 1), dtype=np.int32),
        sample_rows=np.arange(count, dtype=np.int32),
    )


def chunk_step(chunks: list[tuple[int, list[int], list[int]]]) -> StepInputs:
    """Sequences as (first position, token ids, block table), all rows sampled."""
    width = max(len(table) for _, _, table in chunks)
    tables = np.full((len(chunks), width), -1, dtype=np.int32)
    for i, (_, _, table) in enumerate(chunks):
        tables[i, : len(table)] = table
    starts = np.cumsum([0] + [len(tokens) for _, tokens, _ in chunks]).astype(np.int32)
    return StepInputs(
        token_ids=np.array([token for _, tokens, _ in chunks for token in tokens], dtype=np.int32),
        positions=np.array([first + i for first, tokens, _ in chunks for i in range(len(tokens))], dtype=np.int32),
        row_starts=starts,
        block_tables=tables,
        sample_rows=np.arange(starts[-1], dtype=np.int32),
    )
