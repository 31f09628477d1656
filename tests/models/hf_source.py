"""Reads a Hugging Face Llama folder for tests: config.json and safetensors, by own code.

It shares nothing with the GGUF loader, so the forward pass can be checked against the goldens by two ways in. Query
and key rows stay in their order; the rotation is told that a pair's halves are apart.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np

from shoal.kernels.ops import RopeSpec, WeightTensor
from shoal.models.description import LayerWeights, LlamaWeights, ModelDescription


def read_tensors(folder: Path) -> dict[str, WeightTensor]:
    """Every tensor of every safetensors file: 8 bytes of header length, a JSON header, then the data."""
    tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        content = path.read_bytes()
        size = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + size])
        header.pop("__metadata__", None)
        for name, item in header.items():
            begin, end = (8 + size + offset for offset in item["data_offsets"])
            shape = tuple(item["shape"])
            rows = shape[0] if len(shape) == 2 else 1
            data = np.frombuffer(content[begin:end], dtype=np.uint8).reshape(rows, -1)
            tensors[name] = WeightTensor(name, item["dtype"], shape, data)
    return tensors


def rope_spec(config: dict) -> RopeSpec:
    """Frequencies with the config's scaling, from the published formulas."""
    dim = config["hidden_size"] // config["num_attention_heads"]
    frequencies = [config["rope_theta"] ** (-2 * i / dim) for i in range(dim // 2)]
    scaling = config.get("rope_scaling") or {}
    kind = scaling.get("rope_type", scaling.get("type"))
    if kind == "linear":
        frequencies = [f / scaling["factor"] for f in frequencies]
    elif kind == "llama3":
        frequencies = [_llama3(f, scaling) for f in frequencies]
    elif kind is not None:
        raise ValueError(f"rope scaling {kind} is not known to the tests")
    return RopeSpec(np.array(frequencies, dtype=np.float32), 1.0, interleaved=False)


def _llama3(frequency: float, scaling: dict) -> float:
    turns = scaling["original_max_position_embeddings"] * frequency / (2 * math.pi)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    keep = min(max((turns - low) / (high - low), 0.0), 1.0)
    return keep * frequency + (1 - keep) * frequency / scaling["factor"]


def load_hf(folder: Path) -> tuple[ModelDescription, LlamaWeights]:
    """The model of one folder."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    tensors = read_tensors(folder)

    def layer(index: int) -> LayerWeights:
        def get(name: str) -> WeightTensor | None:
            return tensors.get(f"model.layers.{index}.{name}")

        def need(name: str) -> WeightTensor:
            return tensors[f"model.layers.{index}.{name}"]

        return LayerWeights(
            attn_norm=need("input_layernorm.weight"),
            q=need("self_attn.q_proj.weight"),
            k=need("self_attn.k_proj.weight"),
            v=need("self_attn.v_proj.weight"),
            o=need("self_attn.o_proj.weight"),
            q_bias=get("self_attn.q_proj.bias"),
            k_bias=get("self_attn.k_proj.bias"),
            v_bias=get("self_attn.v_proj.bias"),
            o_bias=get("self_attn.o_proj.bias"),
            ffn_norm=need("post_attention_layernorm.weight"),
            gate=need("mlp.gate_proj.weight"),
            up=need("mlp.up_proj.weight"),
            down=need("mlp.down_proj.weight"),
            gate_bias=get("mlp.gate_proj.bias"),
            up_bias=get("mlp.up_proj.bias"),
            down_bias=get("mlp.down_proj.bias"),
        )

    embedding = tensors["model.embed_tokens.weight"]
    description = ModelDescription(
        architecture="llama",
        num_layers=config["num_hidden_layers"],
        hidden_size=config["hidden_size"],
        ffn_size=config["intermediate_size"],
        num_heads=config["num_attention_heads"],
        num_kv_heads=config["num_key_value_heads"],
        head_dim=config["hidden_size"] // config["num_attention_heads"],
        vocab_size=config["vocab_size"],
        context_length=config["max_position_embeddings"],
        rms_eps=config["rms_norm_eps"],
        rope=rope_spec(config),
        tied_embeddings=config["tie_word_embeddings"],
    )
    weights = LlamaWeights(
        token_embedding=embedding,
        output=embedding if config["tie_word_embeddings"] else tensors["lm_head.weight"],
        final_norm=tensors["model.norm.weight"],
        layers=tuple(layer(index) for index in range(config["num_hidden_layers"])),
    )
    return description, weights
