"""The operations in NumPy, one eager call each: the specification that other implementations are tested against.

``ReferenceWeights`` owns the dequantized weights and says what precision means; ``ReferenceCache`` owns the paged keys
and values; ``ReferenceOps`` is made anew for every step from the two and the step's arrays.

Five precisions, all accumulated in float32:

- ``f32``: weights as the file's blocks stand for them, nothing rounded;
- ``bf16``: weights and inputs of every linear operation rounded to bfloat16;
- ``native``: weights as the file's blocks stand for them, but for Q6_K: its scales cover 16 features, and its values
  are rounded to 8 bits in groups of 32. A quantized weight sees its input rounded to 8 bits in groups of 32
  (``activation_groups``), a BF16 weight sees it rounded to bfloat16, any other sees it as it is;
- ``int8``: weights rounded to 8 bits with one scale per output feature, inputs to 8 bits in groups of 64;
- ``int4``: as ``native``, but weights of more than 4 bits are rounded to 4 bits in groups of 32 (``weight_rounding``).
  The matrix that gives the logits is spared: quantized, it stays as it is; float, it is treated as in ``int8``.

Embeddings, norms, biases, rotation and residuals are float32 in all of them. Attention follows the cache's type, not
the precision: it reads keys and values as they were stored, and computes in float32. An ``int8`` cache keeps each
token's key and value of a head in 8 bits with one scale, and a query meets it rounded in the same way; softmax weights,
with the values' scales multiplied in, are rounded to 8 bits without a sign, with one scale per 16 positions.

A row's result does not depend on its neighbours, nor on its place among them. BLAS libraries choose kernels, and with
them the order of a sum, by shape, and some treat the rows at the edge of a product differently. So matrix products see
tiles of a fixed number of rows, filled up with zeros, and that number is found by trying: the largest at which this
machine's library gives a row the same bits in every place (``equal_rows``). Attention works row by row over exactly the
positions that the row may see.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shoal.errors import KernelError
from shoal.kernels.activation_groups import round_to_groups
from shoal.kernels.bfloat16 import round_to_bfloat16
from shoal.kernels.ops import AttentionSpec, RopeSpec, StepInputs, WeightTensor
from shoal.kernels.weight_rounding import round_to_four_bits, round_to_rows

FloatArray = NDArray[np.float32]
Dequantize = Callable[[str, NDArray[np.uint8]], FloatArray]
"""(type name, uint8 [rows, bytes per row]) -> float32 [rows, features]."""

ROW_TILES = (16, 8, 4, 2)
"""Rows of a matrix product, the fastest first; one row at a time is right on every library."""
PROBES = 16
PRECISIONS = ("f32", "bf16", "int8", "int4", "native")
KV_DTYPES = ("f32", "bf16", "int8")
UNQUANTIZED = ("F32", "F16", "BF16")
FOUR_BITS = ("Q4_0", "Q4_1", "Q4_K")
WIDE_GROUP = 64
WEIGHT_TILE = 16


class Treatment(NamedTuple):
    """What a precision does to a weight when it is stored and to the input that it sees."""

    stored: Callable[[FloatArray], FloatArray]
    seen: Callable[[FloatArray], FloatArray]


def _same(x: FloatArray) -> FloatArray:
    return x


AS_IT_IS = Treatment(_same, _same)


class ReferenceWeights:
    """Dequantized weights, each made on first use and kept as long as this object lives."""

    def __init__(self, dequantize: Dequantize, precision: str = "f32") -> None:
        if precision not in PRECISIONS:
            raise KernelError(f"precision must be one of {', '.join(PRECISIONS)}, got {precision!r}")
        self.precision = precision
        self._dequantize = dequantize
        # Keyed by identity, as a WeightTensor holds an array and so has no hash; the tensor is kept beside the
        # result so that its id stays taken.
        self._kept: dict[tuple[int, bool], tuple[WeightTensor, FloatArray]] = {}
        self._tiles: dict[tuple[int, ...], int] = {}

    def vector(self, weight: WeightTensor) -> FloatArray:
        """A norm's weight or a bias, [features]."""
        return self._keep(weight).reshape(-1)

    def matrix(self, weight: WeightTensor, *, head: bool = False) -> FloatArray:
        """A linear operation's weight in this precision, [out, in]; ``head`` if it gives the logits."""
        return self._keep(weight, head=head)

    def product(self, x: FloatArray, weight: WeightTensor, *, head: bool = False) -> FloatArray:
        """``x`` [rows, in] @ weight.T in this precision, [rows, out]; a row's bits depend on that row alone."""
        matrix = self.matrix(weight, head=head)
        if x.shape[1] != matrix.shape[1]:
            raise KernelError(f"{weight.name}: takes {matrix.shape[1]} features, got {x.shape[1]}")
        size = self._tiles.get(matrix.shape)
        if size is None:
            size = self._tiles[matrix.shape] = equal_rows(matrix)
        seen = self._treatment(weight.type_name, head=head).seen(x)
        out = np.empty((len(x), len(matrix)), dtype=np.float32)
        for start in range(0, len(x), size):
            rows = seen[start : start + size]
            tile = np.zeros((size, x.shape[1]), dtype=np.float32)
            tile[: len(rows)] = rows
            out[start : start + size] = (tile @ matrix.T)[: len(rows)]
        return out

    def rows(self, table: WeightTensor, indices: NDArray[np.int32]) -> FloatArray:
        """Some rows of an embedding table; the whole table is never expanded for it."""
        return self._dequantize(table.type_name, table.data[indices])

    def _treatment(self, type_name: str, *, head: bool) -> Treatment:
        if self.precision == "f32":
            return AS_IT_IS
        if self.precision == "bf16":
            return Treatment(round_to_bfloat16, round_to_bfloat16)
        if self.precision == "int8" or (self.precision == "int4" and head and type_name in UNQUANTIZED):
            return Treatment(round_to_rows, lambda x: round_to_groups(x, WIDE_GROUP))
        if self.precision == "int4" and not head and type_name not in FOUR_BITS:
            return Treatment(round_to_four_bits, round_to_groups)
        if type_name == "BF16":
            return Treatment(_same, round_to_bfloat16)
        if type_name in UNQUANTIZED:
            return AS_IT_IS
        return Treatment(round_to_groups if type_name == "Q6_K" else _same, round_to_groups)

    def _keep(self, weight: WeightTensor, *, head: bool = False) -> FloatArray:
        key = (id(weight), head)
        kept = self._kept.get(key)
        if kept is None:
            values = self._dequantize(weight.type_name, weight.data)
            if values.size != np.prod(weight.shape):
                raise KernelError(
                    f"{weight.name}: shape {weight.shape} wants {int(np.prod(weight.shape))} values, "
                    f"its {weight.type_name} data holds {values.size}"
                )
            if len(weight.shape) == 2:
                values = self._treatment(weight.type_name, head=head).stored(values)
            kept = self._kept[key] = (weight, values)
        return kept[1]


def equal_rows(matrix: FloatArray) -> int:
    """The largest of ``ROW_TILES`` at which a product with ``matrix`` [out, in] gives every place the same bits.

    Tried, not derived: which sums a library reorders is its own affair and changes with the machine, the shape and the
    number of threads. Several rows are tried, each repeated, as two orders of one short sum may well agree.
    """
    rows = np.random.default_rng(0).standard_normal((PROBES, 1, matrix.shape[1]), dtype=np.float32)
    for size in ROW_TILES:
        products = [np.repeat(row, size, axis=0) @ matrix.T for row in rows]
        if all(np.array_equal(product, product[:1].repeat(size, axis=0), equal_nan=True) for product in products):
            return size
    return 1


class ReferenceCache:
    """Keys and values in blocks: two float32 arrays [layers, blocks, block_size, kv_heads, head_dim].

    What was never written is NaN, so that reading it cannot go unnoticed.
    """

    def __init__(
        self, *, num_layers: int, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: str = "f32"
    ) -> None:
        if dtype not in KV_DTYPES:
            raise KernelError(f"the cache's type must be one of {', '.join(KV_DTYPES)}, got {dtype!r}")
        shape = (num_layers, num_blocks, block_size, num_kv_heads, head_dim)
        self.block_size = block_size
        self.dtype = dtype
        self.keys = np.full(shape, np.nan, dtype=np.float32)
        self.values = np.full(shape, np.nan, dtype=np.float32)

    def rounded(self, x: FloatArray) -> FloatArray:
        """``x`` [..., head_dim] as this cache's type can hold it."""
        if self.dtype == "int8":
            return round_to_groups(x.reshape(-1, x.shape[-1]), x.shape[-1]).reshape(x.shape)
        return round_to_bfloat16(x) if self.dtype == "bf16" else x

    def met_by(self, query: FloatArray) -> FloatArray:
        """The query [..., head_dim] as it meets this cache's keys."""
        return self.rounded(query) if self.dtype == "int8" else query

    def weighing(self, weights: FloatArray, values: FloatArray) -> FloatArray:
        """Softmax weights [kv_heads, queries, tokens] as they meet values [tokens, kv_heads, head_dim]."""
        if self.dtype != "int8":
            return weights
        scales = np.abs(values).max(axis=2).T[:, None, :] / np.float32(127.0)
        scaled = weights * scales
        rounded = np.empty_like(scaled)
        for start in range(0, scaled.shape[2], WEIGHT_TILE):
            tile = scaled[:, :, start : start + WEIGHT_TILE]
            top = tile.max(axis=2, keepdims=True)
            with np.errstate(divide="ignore", invalid="ignore"):
                inverse = np.where(top > 0, np.float32(255.0) / top, np.float32(0.0))
            rounded[:, :, start : start + WEIGHT_TILE] = np.rint(tile * inverse) * (top / np.float32(255.0))
        unscaled: FloatArray = np.divide(rounded, scales, out=np.zeros_like(rounded), where=scales > 0)
        return unscaled

    def write(
        self, layer: int, table: NDArray[np.int32], positions: NDArray[np.int32], keys: FloatArray, values: FloatArray
    ) -> None:
        """Store keys and values [rows, kv_heads, head_dim] of one sequence at ``positions``."""
        blocks, offsets = table[positions // self.block_size], positions % self.block_size
        self.keys[layer, blocks, offsets] = self.rounded(keys)
        self.values[layer, blocks, offsets] = self.rounded(values)

    def read(self, layer: int, table: NDArray[np.int32], length: int) -> tuple[FloatArray, FloatArray]:
        """Keys and values [length, kv_heads, head_dim] of one sequence's positions [0, length)."""
        blocks = table[: -(-length // self.block_size)]
        shape = (-1, *self.keys.shape[3:])
        return self.keys[layer, blocks].reshape(shape)[:length], self.values[layer, blocks].reshape(shape)[:length]


def rope_cos_sin(rope: RopeSpec, positions: NDArray[np.int32]) -> tuple[FloatArray, FloatArray]:
    """Cosines and sines [rows, rotary_dim / 2], with the spec's scale in them.

    The angle is a float32 product, as in the models' own training code; its cosine and sine are then correctly rounded.
    """
    angles = (positions.astype(np.float32)[:, None] * rope.inverse_frequencies[None, :]).astype(np.float64)
    return (np.cos(angles) * rope.scale).astype(np.float32), (np.sin(angles) * rope.scale).astype(np.float32)


def rotate(heads: FloatArray, rope: RopeSpec, positions: NDArray[np.int32]) -> FloatArray:
    """Rotate ``heads`` [rows, heads, head_dim] by position; dimensions past ``rotary_dim`` stay as they are."""
    half = len(rope.inverse_frequencies)
    cos, sin = (part[:, None, :] for part in rope_cos_sin(rope, positions))
    if rope.interleaved:
        first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    else:
        first, second = slice(0, half), slice(half, 2 * half)
    rotated = heads.copy()
    rotated[:, :, first] = heads[:, :, first] * cos - heads[:, :, second] * sin
    rotated[:, :, second] = heads[:, :, second] * cos + heads[:, :, first] * sin
    return rotated


class ReferenceOps:
    """``Ops`` over arrays: one object per step."""

    def __init__(self, inputs: StepInputs, cache: ReferenceCache, weights: ReferenceWeights) -> None:
        self._inputs = inputs
        self._cache = cache
        self._weights = weights

    def embed(self, table: WeightTensor) -> FloatArray:
        """Rows of the table for the step's token ids."""
        token_ids = self._inputs.token_ids
        outside = (token_ids < 0) | (token_ids >= table.shape[0])
        if outside.any():
            raise KernelError(f"{table.name}: has {table.shape[0]} rows, got token {token_ids[outside][0]}")
        return self._weights.rows(table, token_ids)

    def rms_norm(self, x: FloatArray, weight: WeightTensor, eps: float) -> FloatArray:
        """Divide each row by its root mean square; the mean is taken in float64."""
        mean_square = np.mean(np.square(x, dtype=np.float64), axis=1, keepdims=True)
        inverse: FloatArray = (1.0 / np.sqrt(mean_square + eps)).astype(np.float32)
        return x * inverse * self._weights.vector(weight)

    def linear(
        self, x: FloatArray, weights: tuple[WeightTensor, ...], biases: tuple[WeightTensor | None, ...] = ()
    ) -> FloatArray:
        """One product per weight, side by side."""
        if biases and len(biases) != len(weights):
            raise KernelError(f"linear: {len(weights)} weights but {len(biases)} biases; give () or one per weight")
        parts = []
        for weight, bias in zip(weights, biases or (None,) * len(weights), strict=True):
            part = self._weights.product(x, weight)
            parts.append(part if bias is None else part + self._weights.vector(bias))
        return np.concatenate(parts, axis=1)

    def rope_and_cache(self, qkv: FloatArray, layer: int, attention: AttentionSpec, rope: RopeSpec) -> FloatArray:
        """Rotate q and k, store k and v, give q."""
        dim, query_width = attention.head_dim, attention.num_heads * attention.head_dim
        key_width = attention.num_kv_heads * dim
        positions = self._inputs.positions
        q, k, v = (
            part.reshape(len(qkv), -1, dim) for part in np.split(qkv, [query_width, query_width + key_width], axis=1)
        )
        q, k = rotate(q, rope, positions), rotate(k, rope, positions)
        for sequence, rows in self._sequences():
            self._cache.write(layer, self._inputs.block_tables[sequence], positions[rows], k[rows], v[rows])
        return q.reshape(len(qkv), query_width)

    def attention(self, q: FloatArray, layer: int, attention: AttentionSpec) -> FloatArray:
        """Softmax-weighted mean of the values, row by row."""
        kv_heads, dim = attention.num_kv_heads, attention.head_dim
        out = np.empty_like(q)
        for sequence, rows in self._sequences():
            lengths = self._inputs.positions[rows] + 1
            keys, values = self._cache.read(layer, self._inputs.block_tables[sequence], int(lengths[-1]))
            for row, length in zip(range(rows.start, rows.stop), lengths, strict=True):
                grouped = self._cache.met_by(q[row].reshape(kv_heads, -1, dim))
                scores = (grouped @ keys[:length].transpose(1, 2, 0)) * np.float32(attention.scale)
                weights = np.exp(scores - scores.max(axis=2, keepdims=True))
                total = weights.sum(axis=2, keepdims=True)
                weights = self._cache.weighing(weights, values[:length])
                out[row] = (weights @ values[:length].transpose(1, 0, 2) / total).reshape(-1)
        return out

    def silu_mul(self, gate_up: FloatArray) -> FloatArray:
        """silu(gate) * up."""
        half = gate_up.shape[1] // 2
        gate, up = gate_up[:, :half], gate_up[:, half:]
        with np.errstate(over="ignore"):  # exp(-gate) may be infinite: the quotient is then 0, as it should be
            falling: FloatArray = np.exp(-gate)
            return gate / (falling + np.float32(1.0)) * up

    def add(self, a: FloatArray, b: FloatArray) -> FloatArray:
        """a + b."""
        return a + b

    def sample_rows(self, x: FloatArray) -> FloatArray:
        """Only the rows whose logits are wanted."""
        return x[self._inputs.sample_rows]

    def lm_head(self, x: FloatArray, weight: WeightTensor) -> FloatArray:
        """Logits: a linear operation like the others, but for a precision that spares it."""
        return self._weights.product(x, weight, head=True)

    def _sequences(self) -> list[tuple[int, slice]]:
        starts = self._inputs.row_starts.tolist()
        return [(index, slice(*bounds)) for index, bounds in enumerate(pairwise(starts))]
