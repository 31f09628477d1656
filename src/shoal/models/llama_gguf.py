"""Architecture ``llama`` out of a GGUF file: which keys and tensors it has, and what they must look like.

Everything is checked here, once, so that a wrong file is an error with a name and never a wrong weight: each key's type
and range, each tensor's presence and shape. Things this architecture can carry but Shoal does not run (experts, rope
scalings other than linear and per-frequency factors) are refused by name.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from shoal.errors import ModelFileError, UnsupportedModelError
from shoal.kernels.ops import RopeSpec, WeightTensor
from shoal.models.dequantize import dequantize
from shoal.models.description import LayerWeights, LlamaWeights, Model, ModelDescription
from shoal.models.gguf_file import GGUFFile
from shoal.models.rope import inverse_frequencies

ARCHITECTURE = "llama"
FLOAT_TYPES = ("F32", "F16", "BF16")
MOST = 1 << 24  # no size of a model that fits a machine is larger


def describe_llama(file: GGUFFile) -> Model:
    """Sizes and weights, checked."""
    keys = _Keys(file)
    _refuse(file, keys)
    hidden = keys.size("embedding_length")
    heads = keys.size("attention.head_count")
    kv_heads = keys.size("attention.head_count_kv", default=heads)
    if heads % kv_heads:
        raise keys.error("attention.head_count_kv", f"{kv_heads} does not divide the {heads} heads")
    head_dim = _head_dim(keys, hidden, heads)
    embedding = _Tensors(file).any_rows("token_embd.weight", hidden)
    output = file.tensors.get("output.weight")
    description = ModelDescription(
        architecture=ARCHITECTURE,
        num_layers=keys.size("block_count"),
        hidden_size=hidden,
        ffn_size=keys.size("feed_forward_length"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=_vocab_size(file, keys, embedding),
        context_length=keys.size("context_length"),
        rms_eps=keys.positive("attention.layer_norm_rms_epsilon"),
        rope=_rope(file, keys, head_dim),
        tied_embeddings=output is None,
    )
    return Model(description, _weights(file, description, embedding))


class _Keys:
    """Typed access to the architecture's metadata."""

    def __init__(self, file: GGUFFile) -> None:
        self._file = file

    def error(self, key: str, message: str) -> ModelFileError:
        return ModelFileError(str(self._file.path), f"{ARCHITECTURE}.{key}", message)

    def get(self, key: str) -> Any:
        return self._file.metadata.get(f"{ARCHITECTURE}.{key}")

    def size(self, key: str, default: int | None = None) -> int:
        value = self.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, np.ndarray) and value.size and (value == value[0]).all():
            value = value[0].item()  # one entry per layer, all the same
        if value is None:
            raise self.error(key, "the key is missing")
        if isinstance(value, np.ndarray):
            raise UnsupportedModelError(f"{self._file.path}: {ARCHITECTURE}.{key}: sizes that differ between layers")
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(key, f"must be an integer, found {value!r}")
        if not 1 <= value <= MOST:
            raise self.error(key, f"must be in [1, {MOST}], found {value}")
        return value

    def positive(self, key: str, default: float | None = None) -> float:
        value = self.get(key)
        if value is None and default is not None:
            return default
        if value is None:
            raise self.error(key, "the key is missing")
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.error(key, f"must be a number, found {value!r}")
        if not math.isfinite(value) or value <= 0:
            raise self.error(key, f"must be positive and finite, found {value}")
        return float(value)


class _Tensors:
    """Checked access to the tensors."""

    def __init__(self, file: GGUFFile) -> None:
        self._file = file

    def _error(self, name: str, message: str) -> ModelFileError:
        return ModelFileError(str(self._file.path), f"tensor {name}", message)

    def get(self, name: str, shape: tuple[int, ...]) -> WeightTensor:
        tensor = self._file.tensors.get(name)
        if tensor is None:
            raise self._error(name, f"the tensor is missing; expected shape {list(shape)}")
        if tensor.shape != shape:
            raise self._error(name, f"must have shape {list(shape)}, has {list(tensor.shape)}")
        return tensor

    def any_rows(self, name: str, features: int) -> WeightTensor:
        tensor = self._file.tensors.get(name)
        if tensor is None:
            raise self._error(name, f"the tensor is missing; expected shape [vocabulary, {features}]")
        if len(tensor.shape) != 2 or tensor.shape[1] != features:
            raise self._error(name, f"must have shape [vocabulary, {features}], has {list(tensor.shape)}")
        return tensor

    def vector(self, name: str, size: int) -> WeightTensor:
        """A norm or bias: a float type, every value finite."""
        tensor = self.get(name, (size,))
        if tensor.type_name not in FLOAT_TYPES:
            raise self._error(name, f"must be one of {', '.join(FLOAT_TYPES)}, is {tensor.type_name}")
        if not np.isfinite(dequantize(tensor.type_name, tensor.data)).all():
            raise self._error(name, "holds values that are not finite")
        return tensor

    def optional_vector(self, name: str, size: int) -> WeightTensor | None:
        return self.vector(name, size) if name in self._file.tensors else None


def _refuse(file: GGUFFile, keys: _Keys) -> None:
    experts = keys.get("expert_count")
    if experts:
        raise UnsupportedModelError(f"{file.path}: {ARCHITECTURE}.expert_count = {experts}: mixtures of experts")
    if keys.get("attention.sliding_window"):
        raise UnsupportedModelError(f"{file.path}: {ARCHITECTURE}.attention.sliding_window: sliding-window attention")
    for key in ("attention.key_length_mla", "attention.scale", "logit_scale", "residual_scale", "embedding_scale"):
        if keys.get(key) is not None:
            raise UnsupportedModelError(f"{file.path}: {ARCHITECTURE}.{key} is not supported")


def _head_dim(keys: _Keys, hidden: int, heads: int) -> int:
    if keys.get("attention.key_length") is None and hidden % heads:
        raise keys.error("attention.head_count", f"{heads} heads do not divide the embedding length {hidden}")
    head_dim = keys.size("attention.key_length", default=max(1, hidden // heads))
    value_dim = keys.size("attention.value_length", default=head_dim)
    if value_dim != head_dim:
        raise keys.error("attention.value_length", f"must equal the key length {head_dim}, found {value_dim}")
    if head_dim % 2 or head_dim > 512:
        raise keys.error("attention.key_length", f"a head's dimension must be even and at most 512, found {head_dim}")
    return head_dim


def _vocab_size(file: GGUFFile, keys: _Keys, embedding: WeightTensor) -> int:
    rows = embedding.shape[0]
    claimed = keys.size("vocab_size", default=rows)
    if claimed != rows:
        raise keys.error("vocab_size", f"is {claimed}, but token_embd.weight has {rows} rows")
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    if tokens is not None and len(tokens) != rows:
        raise ModelFileError(
            str(file.path),
            "tokenizer.ggml.tokens",
            f"holds {len(tokens)} tokens, but token_embd.weight has {rows} rows",
        )
    return rows


def _rope(file: GGUFFile, keys: _Keys, head_dim: int) -> RopeSpec:
    rotary_dim = keys.size("rope.dimension_count", default=head_dim)
    if rotary_dim > head_dim or rotary_dim % 2:
        raise keys.error("rope.dimension_count", f"must be even and at most {head_dim}, found {rotary_dim}")
    base = keys.positive("rope.freq_base", default=10000.0)
    kind = keys.get("rope.scaling.type")
    factor = 1.0
    if kind == "linear":
        factor = keys.positive("rope.scaling.factor")
    elif kind not in (None, "none"):
        raise UnsupportedModelError(
            f"{file.path}: {ARCHITECTURE}.rope.scaling.type = {kind!r}; supported are none, linear and the factors of "
            "rope_freqs.weight"
        )
    elif keys.get("rope.scale_linear") is not None:
        factor = keys.positive("rope.scale_linear")
    factors = None
    if "rope_freqs.weight" in file.tensors:
        tensor = _Tensors(file).vector("rope_freqs.weight", rotary_dim // 2)
        factors = dequantize(tensor.type_name, tensor.data).reshape(-1)
        if (factors <= 0).any():
            raise ModelFileError(str(file.path), "tensor rope_freqs.weight", "every factor must be positive")
    frequencies = inverse_frequencies(base, rotary_dim, linear_factor=factor, factors=factors)
    return RopeSpec(frequencies, 1.0, interleaved=True)


def _weights(file: GGUFFile, sizes: ModelDescription, embedding: WeightTensor) -> LlamaWeights:
    tensors = _Tensors(file)
    hidden, ffn = sizes.hidden_size, sizes.ffn_size
    queries, keys = sizes.num_heads * sizes.head_dim, sizes.num_kv_heads * sizes.head_dim

    def layer(index: int) -> LayerWeights:
        prefix = f"blk.{index}."
        return LayerWeights(
            attn_norm=tensors.vector(f"{prefix}attn_norm.weight", hidden),
            q=tensors.get(f"{prefix}attn_q.weight", (queries, hidden)),
            k=tensors.get(f"{prefix}attn_k.weight", (keys, hidden)),
            v=tensors.get(f"{prefix}attn_v.weight", (keys, hidden)),
            o=tensors.get(f"{prefix}attn_output.weight", (hidden, queries)),
            ffn_norm=tensors.vector(f"{prefix}ffn_norm.weight", hidden),
            gate=tensors.get(f"{prefix}ffn_gate.weight", (ffn, hidden)),
            up=tensors.get(f"{prefix}ffn_up.weight", (ffn, hidden)),
            down=tensors.get(f"{prefix}ffn_down.weight", (hidden, ffn)),
            q_bias=tensors.optional_vector(f"{prefix}attn_q.bias", queries),
            k_bias=tensors.optional_vector(f"{prefix}attn_k.bias", keys),
            v_bias=tensors.optional_vector(f"{prefix}attn_v.bias", keys),
            o_bias=tensors.optional_vector(f"{prefix}attn_output.bias", hidden),
            gate_bias=tensors.optional_vector(f"{prefix}ffn_gate.bias", ffn),
            up_bias=tensors.optional_vector(f"{prefix}ffn_up.bias", ffn),
            down_bias=tensors.optional_vector(f"{prefix}ffn_down.bias", hidden),
        )

    return LlamaWeights(
        token_embedding=embedding,
        output=embedding if sizes.tied_embeddings else tensors.get("output.weight", (sizes.vocab_size, hidden)),
        final_norm=tensors.vector("output_norm.weight", hidden),
        layers=tuple(layer(index) for index in range(sizes.num_layers)),
    )
