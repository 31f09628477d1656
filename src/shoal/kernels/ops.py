"""The operations a model is written in.

A model's forward pass is one Python function over ``Ops``. Two implementations exist: ``reference`` runs each call at
once in NumPy float32 and is the specification; ``native`` *records* the calls, once, into a flat program that replays
for any step. So tensors are opaque handles of type ``T`` to the model, and shapes are given per row: a tensor is
[rows, width] where ``rows`` is whatever the step brings.

Weights come as ``WeightTensor``: the bytes as the file stores them plus the type's name; an implementation
dequantizes or packs them as it likes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class WeightTensor:
    """A weight as stored.

    name: as in the file, for error messages.
    type_name: ggml type name: "F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K".
    shape: (out_features, in_features) or (features,), row-major: in_features contiguous.
    data: uint8 [out_features, bytes per row] (or [1, bytes] for vectors), usually a view of the mapped file.
    """

    name: str
    type_name: str
    shape: tuple[int, ...]
    data: NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary position embedding (Su et al. 2021) of the first ``rotary_dim`` dimensions of each head.

    inverse_frequencies: float32 [rotary_dim / 2], all scaling of frequencies already applied.
    scale: multiplies cos and sin (yarn's attention factor), else 1.
    interleaved: pairs are (2i, 2i + 1) as GGUF's llama stores them; else (i, i + rotary_dim / 2).
    """

    inverse_frequencies: NDArray[np.float32]
    scale: float
    interleaved: bool

    @property
    def rotary_dim(self) -> int:
        """Dimensions of a head that are rotated."""
        return 2 * len(self.inverse_frequencies)


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Grouped-query attention (Ainslie et al. 2023).

    Query head h reads KV head h // (num_heads / num_kv_heads); scores are multiplied by ``scale``.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float


@dataclass(frozen=True, slots=True)
class StepInputs:
    """One step as arrays. Rows of a sequence are consecutive and in position order.

    token_ids, positions: int32 [rows].
    row_starts: int32 [sequences + 1]; sequence s has rows [row_starts[s], row_starts[s + 1]).
    block_tables: int32 [sequences, max blocks]; entries past a sequence's last block are not read.
    sample_rows: int32 [samples]; the rows whose logits are wanted, ascending.
    """

    token_ids: NDArray[np.int32]
    positions: NDArray[np.int32]
    row_starts: NDArray[np.int32]
    block_tables: NDArray[np.int32]
    sample_rows: NDArray[np.int32]


class Ops(Protocol[T]):
    """What a model may ask for. Every method returns a new handle; none changes its arguments."""

    def embed(self, table: WeightTensor) -> T:
        """Rows of ``table`` [vocab, width] for the step's token ids."""
        ...

    def rms_norm(self, x: T, weight: WeightTensor, eps: float) -> T:
        """x / sqrt(mean(x^2) + eps) * weight, over each row (Zhang & Sennrich 2019)."""
        ...

    def linear(self, x: T, weights: tuple[WeightTensor, ...], biases: tuple[WeightTensor | None, ...] = ()) -> T:
        """x @ concat(weights).T (+ concat(biases)): several weights over one input give one wide output.

        ``biases`` is () or one per weight.
        """
        ...

    def rope_and_cache(self, qkv: T, layer: int, attention: AttentionSpec, rope: RopeSpec) -> T:
        """Split [q heads | k heads | v heads]; rotate q and k by position; store k and v; give the rotated q."""
        ...

    def attention(self, q: T, layer: int, attention: AttentionSpec) -> T:
        """Causal attention of each row over its sequence's cached positions [0, its own position]."""
        ...

    def silu_mul(self, gate_up: T) -> T:
        """Split [gate | up] in halves: silu(gate) * up."""
        ...

    def add(self, a: T, b: T) -> T:
        """a + b."""
        ...

    def sample_rows(self, x: T) -> T:
        """Only the rows whose logits are wanted."""
        ...

    def lm_head(self, x: T, weight: WeightTensor) -> T:
        """Logits [samples, vocab], float32: x @ weight.T."""
        ...
