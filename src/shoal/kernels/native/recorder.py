"""``Ops`` that records instead of computing.

A model's forward function is called once with ``NativeOps``; each call appends an operation to the native program. A
matrix product is held back until its result is used, because a product that is only ever added to something else
becomes one operation: the addition happens where the product is written.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shoal.errors import KernelError, UnsupportedModelError
from shoal.kernels.native import _native
from shoal.kernels.native.formats import Format, choose_format, tensor_type
from shoal.kernels.ops import AttentionSpec, RopeSpec, WeightTensor
from shoal.kernels.reference import rope_cos_sin

Dequantize = Callable[[str, NDArray[np.uint8]], NDArray[np.float32]]


@dataclass(slots=True)
class Handle:
    """A buffer of the program: [rows, width], or [samples, width].

    ``pending`` is a product that has yet to be recorded; it takes the buffer to add, or -1.
    """

    buffer: int
    width: int
    per_sample: bool
    pending: Callable[[int], None] | None = None


class NativeOps:
    """Records a model into ``program``. ``dequantize`` expands the small vectors (norms, biases)."""

    def __init__(self, program: _native.Program, *, precision: str, max_context: int, dequantize: Dequantize) -> None:
        self._program = program
        self._precision = precision
        self._max_context = max_context
        self._dequantize = dequantize
        self._rope_tables: dict[int, tuple[RopeSpec, int]] = {}

    def embed(self, table: WeightTensor) -> Handle:
        """See ``Ops``; rows are dequantized as they are looked up."""
        out = self._buffer(table.shape[1], per_sample=False)
        _check(self._program.embed(int(tensor_type(table)), table.data, out.width, out.buffer))
        return out

    def rms_norm(self, x: Handle, weight: WeightTensor, eps: float) -> Handle:
        """See ``Ops``."""
        out = self._buffer(x.width, per_sample=x.per_sample)
        _check(self._program.rms_norm(self._written(x), out.buffer, self._vector(weight), eps))
        return out

    def linear(
        self, x: Handle, weights: tuple[WeightTensor, ...], biases: tuple[WeightTensor | None, ...] = ()
    ) -> Handle:
        """See ``Ops``; neighbouring weights of one format are packed as one."""
        return self._product(x, weights, biases or (None,) * len(weights), head=False)

    def _product(
        self,
        x: Handle,
        weights: tuple[WeightTensor, ...],
        biases: tuple[WeightTensor | None, ...],
        *,
        head: bool,
    ) -> Handle:
        source = self._written(x)
        out = self._buffer(sum(weight.shape[0] for weight in weights), per_sample=x.per_sample)
        runs = self._runs(weights, biases, head=head)

        def write(residual: int) -> None:
            for column, weight, bias in runs:
                _check(self._program.linear(source, out.buffer, column, weight, bias, residual))

        out.pending = write
        return out

    def rope_and_cache(self, qkv: Handle, layer: int, attention: AttentionSpec, rope: RopeSpec) -> Handle:
        """See ``Ops``."""
        out = self._buffer(attention.num_heads * attention.head_dim, per_sample=False)
        table = self._rope_table(rope)
        _check(
            self._program.rope_and_cache(
                self._written(qkv), out.buffer, layer, table, rope.rotary_dim, rope.interleaved
            )
        )
        return out

    def attention(self, q: Handle, layer: int, attention: AttentionSpec) -> Handle:
        """See ``Ops``."""
        out = self._buffer(q.width, per_sample=False)
        _check(self._program.attention(self._written(q), out.buffer, layer, attention.scale))
        return out

    def silu_mul(self, gate_up: Handle) -> Handle:
        """See ``Ops``."""
        out = self._buffer(gate_up.width // 2, per_sample=gate_up.per_sample)
        _check(self._program.silu_mul(self._written(gate_up), out.buffer))
        return out

    def add(self, a: Handle, b: Handle) -> Handle:
        """See ``Ops``; a held-back product is added where it is written."""
        if b.pending is not None:
            write, b.pending = b.pending, _used_up
            write(self._written(a))
            return Handle(b.buffer, b.width, b.per_sample)
        out = self._buffer(a.width, per_sample=a.per_sample)
        _check(self._program.add(self._written(a), self._written(b), out.buffer))
        return out

    def sample_rows(self, x: Handle) -> Handle:
        """See ``Ops``."""
        out = self._buffer(x.width, per_sample=True)
        _check(self._program.gather(self._written(x), out.buffer))
        return out

    def lm_head(self, x: Handle, weight: WeightTensor) -> Handle:
        """See ``Ops``."""
        out = self._product(x, (weight,), (None,), head=True)
        self._written(out)
        return out

    def seal(self, logits: Handle) -> None:
        """No more operations: plan memory, make ready to run."""
        _check(self._program.seal(self._written(logits)))

    def _buffer(self, width: int, *, per_sample: bool) -> Handle:
        return Handle(self._program.add_buffer(width, per_sample), width, per_sample)

    @staticmethod
    def _written(handle: Handle) -> int:
        if handle.pending is not None:
            write, handle.pending = handle.pending, None
            write(-1)
        return handle.buffer

    def _vector(self, weight: WeightTensor) -> int:
        return self._program.add_vector(_flat(self._dequantize(weight.type_name, weight.data)))

    def _runs(
        self, weights: tuple[WeightTensor, ...], biases: tuple[WeightTensor | None, ...], *, head: bool
    ) -> list[tuple[int, int, int]]:
        """Packed weights as (first column, weight id, bias id), neighbours of one format together."""
        runs: list[tuple[Format, list[tuple[WeightTensor, WeightTensor | None]]]] = []
        for weight, bias in zip(weights, biases, strict=True):
            kind = choose_format(weight, self._precision, head=head)
            if not runs or runs[-1][0] != kind:
                runs.append((kind, []))
            runs[-1][1].append((weight, bias))
        packed = []
        column = 0
        for kind, members in runs:
            parts = [(int(tensor_type(weight)), weight.data) for weight, _ in members]
            error, weight_id = self._program.add_weight(parts, members[0][0].shape[1], int(kind))
            if error:
                names = ", ".join(weight.name for weight, _ in members)
                raise UnsupportedModelError(f"{names}: {error}")
            packed.append((column, weight_id, self._bias(members)))
            column += sum(weight.shape[0] for weight, _ in members)
        return packed

    def _bias(self, members: list[tuple[WeightTensor, WeightTensor | None]]) -> int:
        if all(bias is None for _, bias in members):
            return -1
        values = [
            np.zeros(weight.shape[0], np.float32)
            if bias is None
            else _flat(self._dequantize(bias.type_name, bias.data))
            for weight, bias in members
        ]
        return self._program.add_vector(np.concatenate(values))

    def _rope_table(self, rope: RopeSpec) -> int:
        """Cosines and sines of every position: [context][cos..., sin...]."""
        known = self._rope_tables.get(id(rope))
        if known is None:
            positions = np.arange(self._max_context, dtype=np.int32)
            table = np.concatenate(rope_cos_sin(rope, positions), axis=1)
            # The spec is kept beside its table, so that its id stays its own.
            known = self._rope_tables[id(rope)] = (rope, self._program.add_vector(_flat(table)))
        return known[1]


def _flat(values: NDArray[np.float32]) -> NDArray[np.float32]:
    return np.ascontiguousarray(values, dtype=np.float32).reshape(-1)


def _check(error: str) -> None:
    if error:
        raise KernelError(error)


def _used_up(_: int) -> None:
    raise KernelError("a product that was added in place is used a second time")
