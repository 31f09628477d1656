"""What the llama loader takes and what it refuses, by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_writer import tiny_llama

from shoal.errors import ModelFileError, UnsupportedModelError
from shoal.models import GGUFFile, Model, describe
from shoal.models.rope import inverse_frequencies


def load(tmp_path: Path, **changes: Any) -> Model:
    path = tmp_path / "model.gguf"
    path.write_bytes(tiny_llama(**changes).build())
    return describe(GGUFFile.open(path))


def test_a_whole_model(tmp_path: Path) -> None:
    description, weights = load(tmp_path)
    assert (description.num_layers, description.hidden_size, description.ffn_size) == (1, 8, 12)
    assert (description.num_heads, description.num_kv_heads, description.head_dim) == (2, 1, 4)
    assert description.vocab_size == 5
    assert description.tied_embeddings
    assert weights.output is weights.token_embedding
    assert weights.layers[0].q_bias is None


def test_untied_output_biases_and_partial_rotation(tmp_path: Path) -> None:
    changes = {
        "output.weight": np.ones((5, 8)),
        "blk.0.attn_q.bias": np.ones(8),
        "blk.0.ffn_down.bias": np.ones(8),
        "llama.rope.dimension_count": 2,
    }
    description, weights = load(tmp_path, **changes)
    assert not description.tied_embeddings
    assert weights.output.name == "output.weight"
    assert weights.layers[0].q_bias is not None
    assert weights.layers[0].down_bias is not None
    assert description.rope.rotary_dim == 2


def frequencies(tmp_path: Path, **changes: Any) -> list[float]:
    return load(tmp_path, **changes).description.rope.inverse_frequencies.tolist()


def test_rope_variants(tmp_path: Path) -> None:
    plain = frequencies(tmp_path)
    assert plain == pytest.approx([1.0, 0.01])
    assert frequencies(tmp_path, **{"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 4.0}) == plain
    for changes in (
        {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0},
        {"llama.rope.scaling.factor": 4.0},
        {"llama.rope.scale_linear": 4.0},
    ):
        assert frequencies(tmp_path, **changes) == pytest.approx([0.25, 0.0025])
    factors = {"rope_freqs.weight": np.array([1.0, 8.0])}
    assert frequencies(tmp_path, **factors) == pytest.approx([1.0, 0.00125])


def test_frequencies_follow_the_formula() -> None:
    found = inverse_frequencies(500000.0, 64)
    np.testing.assert_allclose(found, [500000.0 ** (-2 * i / 64) for i in range(32)], rtol=1e-7)


REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"general.architecture": "gpt9"}, UnsupportedModelError, "architecture 'gpt9'; supported are llama"),
    ({"general.architecture": 5}, ModelFileError, "general.architecture: must be a string"),
    ({"llama.block_count": None}, ModelFileError, "llama.block_count: the key is missing"),
    ({"llama.block_count": 0}, ModelFileError, "llama.block_count: must be in"),
    ({"llama.block_count": "one"}, ModelFileError, "llama.block_count: must be an integer"),
    ({"llama.block_count": 2}, ModelFileError, "tensor blk.1.attn_norm.weight: the tensor is missing"),
    ({"llama.attention.head_count": 3}, ModelFileError, "head"),
    ({"llama.attention.head_count_kv": [1, 2]}, UnsupportedModelError, "differ between layers"),
    ({"llama.attention.head_count_kv": [1, 1]}, ModelFileError, "holds 2 entries for 1 layers"),
    ({"llama.attention.head_count": 4, "llama.attention.head_count_kv": 3}, ModelFileError, "does not divide"),
    ({"llama.attention.layer_norm_rms_epsilon": float("nan")}, ModelFileError, "positive and finite"),
    ({"llama.attention.layer_norm_rms_epsilon": -1.0}, ModelFileError, "positive and finite"),
    ({"llama.rope.freq_base": 0.0}, ModelFileError, "rope.freq_base"),
    ({"llama.rope.dimension_count": 6}, ModelFileError, "rope.dimension_count: must be even and at most 4"),
    ({"llama.rope.scaling.type": "yarn"}, UnsupportedModelError, "rope.scaling.type = 'yarn'"),
    ({"llama.rope.scaling.type": ["a", "b"]}, UnsupportedModelError, "rope.scaling.type"),
    ({"llama.rope.scaling.attn_factor": 2.0}, UnsupportedModelError, "attn_factor"),
    ({"llama.rope.scaling.factor": 1e-38, "llama.rope.freq_base": 1e-6}, ModelFileError, "not finite"),
    ({"rope_freqs.weight": np.array([1.0, 0.0])}, ModelFileError, "every factor must be positive"),
    ({"llama.expert_count": 8}, UnsupportedModelError, "mixtures of experts"),
    ({"llama.expert_count": [8, 8]}, UnsupportedModelError, "mixtures of experts"),
    ({"llama.attention.sliding_window": 128}, UnsupportedModelError, "sliding windows"),
    ({"llama.attention.scale": 0.5}, UnsupportedModelError, "attention.scale"),
    ({"llama.vocab_size": 7}, ModelFileError, "vocab_size: is 7"),
    ({"tokenizer.ggml.tokens": ["a"]}, ModelFileError, "holds 1 tokens, but token_embd.weight has 5 rows"),
    ({"tokenizer.ggml.tokens": 5}, ModelFileError, "tokenizer.ggml.tokens: must be an array"),
    ({"token_embd.weight": None}, ModelFileError, "tensor token_embd.weight: the tensor is missing"),
    ({"token_embd.weight": np.ones((5, 9))}, ModelFileError, r"must have shape \[vocabulary, 8\]"),
    ({"blk.0.attn_k.weight": np.ones((8, 8))}, ModelFileError, r"attn_k.weight: must have shape \[4, 8\]"),
    ({"blk.0.ffn_norm.weight": np.full(8, np.inf)}, ModelFileError, "ffn_norm.weight: holds values"),
    ({"blk.0.attn_q_norm.weight": np.ones(4)}, UnsupportedModelError, "attn_q_norm.weight has no place"),
    ({"blk.1.attn_norm.weight": np.ones(8)}, UnsupportedModelError, "blk.1.attn_norm.weight has no place"),
]


@pytest.mark.parametrize(("changes", "error", "message"), REFUSED, ids=[str(list(case[0]))[:60] for case in REFUSED])
def test_refused_by_name(tmp_path: Path, changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        load(tmp_path, **changes)


def test_every_missing_tensor_is_named(tmp_path: Path) -> None:
    for item in tiny_llama().tensors:
        with pytest.raises(ModelFileError, match=f"tensor {item.name}: the tensor is missing"):
            load(tmp_path, **{item.name: None})
