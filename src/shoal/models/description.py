"""What a model is, apart from where it came from: sizes, and weights by their role.

A loader (see ``llama_gguf``) fills these in; the forward pass and the backends read nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from shoal.kernels.ops import AttentionSpec, RopeSpec, WeightTensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDescription:
    """Sizes and constants of a decoder. context_length is the longest sequence it was made for."""

    architecture: str
    num_layers: int
    hidden_size: int
    ffn_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    context_length: int
    rms_eps: float
    rope: RopeSpec
    tied_embeddings: bool

    @property
    def attention(self) -> AttentionSpec:
        """Scores are scaled by 1 / sqrt(head_dim)."""
        return AttentionSpec(self.num_heads, self.num_kv_heads, self.head_dim, self.head_dim**-0.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """One decoder layer; biases are None where the model has none."""

    attn_norm: WeightTensor
    q: WeightTensor
    k: WeightTensor
    v: WeightTensor
    o: WeightTensor
    ffn_norm: WeightTensor
    gate: WeightTensor
    up: WeightTensor
    down: WeightTensor
    q_bias: WeightTensor | None = None
    k_bias: WeightTensor | None = None
    v_bias: WeightTensor | None = None
    o_bias: WeightTensor | None = None
    gate_bias: WeightTensor | None = None
    up_bias: WeightTensor | None = None
    down_bias: WeightTensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaWeights:
    """All weights; ``output`` is ``token_embedding`` itself when the two are tied."""

    token_embedding: WeightTensor
    output: WeightTensor
    final_norm: WeightTensor
    layers: tuple[LayerWeights, ...]


class Model(NamedTuple):
    """A description with the weights that go with it."""

    description: ModelDescription
    weights: LlamaWeights
