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
    tensors = _Tensors(file)
    embedding = tensors.any_rows("token_embd.weight", hidden)
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
        rope=_rope(file, keys, tensors, head_dim),
        tied_embeddings=output is None,
    )
    weights = _weights(tensors, description, embedding)
    tensors.refuse_the_rest()
    return Model(description, weights)


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
        if isinstance(value, np.ndarray) and value.size and value.ndim == 1 and (value == value[0]).all():
            # One entry per layer, all the same.
            layers = self.get("block_count")
            if layers != value.size:
                raise self.error(key, f"holds {value.size} entries for {layers} layers")
            value = value[0].item()
        if value is None:
            raise self.error(key, "the key is missing")
        if isinstance(value, np.ndarray):
            raise UnsupportedModelError(f"{self._file.path}: {ARCHITECTURE}.{key}: sizes that differ between layers")
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(key, f"must be an integer, found {_short(value)}")
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
            raise self.error(key, f"must be a number, found {_short(value)}")
        if not math.isfinite(value) or value <= 0:
            raise self.error(key, f"must be positive and finite, found {value}")
        return float(value)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


class _Tensors:
    """Checked access to the tensors. Remembers which were used: one that is left over would be a part not run."""

    def __init__(self, file: GGUFFile) -> None:
        self._file = file
        self._used: set[str] = set()

    def refuse_the_rest(self) -> None:
        """UnsupportedModelError if the file holds a tensor that nobody asked for."""
        left = sorted(set(self._file.tensors) - self._used)
        if left:
            raise UnsupportedModelError(
                f"{self._file.path}: tensor {left[0]} has no place in architecture {ARCHITECTURE!r} as Shoal runs it"
                + (f" ({len(left)} such tensors)" if len(left) > 1 else "")
            )

    def _error(self, name: str, message: str) -> ModelFileError:
        return ModelFileError(str(self._file.path), f"tensor {name}", message)

    def get(self, name: str, shape: tuple[int, ...]) -> WeightTensor:
        tensor = self._file.tensors.get(name)
        if tensor is None:
            raise self._error(name, f"the tensor is missing; expected shape {list(shape)}")
        self._used.add(name)
        if tensor.shape != shape:
            raise self._error(name, f"must have shape {list(shape)}, has {list(tensor.shape)}")
        return tensor

    def any_rows(self, name: str, features: int) -> WeightTensor:
        tensor = self._file.tensors.get(name)
        if tensor is None:
            raise self._error(name, f"the tensor is missing; expected shape [vocabulary, {features}]")
        self._used.add(name)
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
    # Zero means the feature is off; anything else, of any type, is something Shoal does not run.
    for key, meaning in (("expert_count", "mixtures of experts"), ("attention.sliding_window", "sliding windows")):
        value = keys.get(key)
        if value is not None and not (isinstance(value, int) and value == 0):
            raise UnsupportedModelError(
                f"{file.path}: {ARCHITECTURE}.{key} = {_short(value)}: {meaning} are not supported"
            )
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
    if tokens is not None and not isinstance(tokens, list):
        raise ModelFileError(str(file.path), "tokenizer.ggml.tokens", "must be an array of strings")
    if tokens is not None and len(tokens) != rows:
        raise ModelFileError(
            str(file.path),
            "tokenizer.ggml.tokens",
            f"holds {len(tokens)} tokens, but token_embd.weight has {rows} rows",
        )
    return rows


def _rope(file: GGUFFile, keys: _Keys, tensors: _Tensors, head_dim: int) -> RopeSpec:
    rotary_dim = keys.size("rope.dimension_count", default=head_dim)
    if rotary_dim > head_dim or rotary_dim % 2:
        raise keys.error("rope.dimension_count", f"must be even and at most {head_dim}, found {rotary_dim}")
    base = keys.positive("rope.freq_base", default=10000.0)
    kind = keys.get("rope.scaling.type")
    if not (kind is None or (isinstance(kind, str) and kind in ("none", "linear"))):
        raise UnsupportedModelError(
            f"{file.path}: {ARCHITECTURE}.rope.scaling.type = {_short(kind)}; supported are none, linear and the "
            "factors of rope_freqs.weight"
        )
    if keys.positive("rope.scaling.attn_factor", default=1.0) != 1.0:
        raise UnsupportedModelError(f"{file.path}: {ARCHITECTURE}.rope.scaling.attn_factor is not supported")
    # A factor without a type means linear; the older key is what early files wrote.
    factor = keys.positive("rope.scaling.factor", default=keys.positive("rope.scale_linear", default=1.0))
    if kind == "none":
        factor = 1.0
    factors = None
    if "rope_freqs.weight" in file.tensors:
        tensor = tensors.vector("rope_freqs.weight", rotary_dim // 2)
        factors = dequantize(tensor.type_name, tensor.data).reshape(-1)
        if (factors <= 0).any():
            raise ModelFileError(str(file.path), "tensor rope_freqs.weight", "every factor must be positive")
    frequencies = inverse_frequencies(base, rotary_dim, linear_factor=factor, factors=factors)
    if not np.isfinite(frequencies).all():
        raise keys.error("rope.scaling.factor", "gives frequencies that are not finite")
    return RopeSpec(frequencies, 1.0, interleaved=True)


def _weights(tensors: _Tensors, sizes: ModelDescription, embedding: WeightTensor) -> LlamaWeights:
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
