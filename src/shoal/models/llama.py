"""Llama (Touvron et al. 2023): attention and a gated feed-forward network, each after a norm, added to the stream."""

from __future__ import annotations

from shoal.kernels.ops import Ops, T
from shoal.models.description import LlamaWeights, ModelDescription


def forward(ops: Ops[T], model: ModelDescription, weights: LlamaWeights) -> T:
    """Logits [samples, vocab] of the step that ``ops`` was made for."""
    x = ops.embed(weights.token_embedding)
    for index, layer in enumerate(weights.layers):
        normed = ops.rms_norm(x, layer.attn_norm, model.rms_eps)
        qkv = ops.linear(normed, (layer.q, layer.k, layer.v), (layer.q_bias, layer.k_bias, layer.v_bias))
        q = ops.rope_and_cache(qkv, index, model.attention, model.rope)
        attended = ops.attention(q, index, model.attention)
        x = ops.add(x, ops.linear(attended, (layer.o,), (layer.o_bias,)))

        normed = ops.rms_norm(x, layer.ffn_norm, model.rms_eps)
        gate_up = ops.linear(normed, (layer.gate, layer.up), (layer.gate_bias, layer.up_bias))
        x = ops.add(x, ops.linear(ops.silu_mul(gate_up), (layer.down,), (layer.down_bias,)))

    last = ops.rms_norm(ops.sample_rows(x), weights.final_norm, model.rms_eps)
    return ops.lm_head(last, weights.output)
