"""Writes small GGUF files, right ones and wrong ones. Shares nothing with the reader."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import Any

import numpy as np

UINT32, INT32, FLOAT32, BOOL, STRING, ARRAY, UINT64 = 4, 5, 6, 7, 8, 9, 10
TYPE_NUMBERS = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 8, "Q4_K": 12, "BF16": 30}


@dataclass
class Tensor:
    name: str
    dimensions: list[int]
    data: bytes
    type_number: int = 0
    offset: int | None = None


@dataclass
class Writer:
    """Fields may be set to wrong values before ``build``."""

    keys: list[tuple[str, int, Any]] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    magic: bytes = b"GGUF"
    version: int = 3
    alignment: int = 32
    key_count: int | None = None
    tensor_count: int | None = None

    def key(self, name: str, value: Any) -> Writer:
        self.keys.append((name, _kind(value), value))
        return self

    def tensor(self, name: str, values: np.ndarray, **fields: Any) -> Writer:
        values = np.ascontiguousarray(values, np.float32)
        self.tensors.append(Tensor(name, list(reversed(values.shape)), values.tobytes(), **fields))
        return self

    def build(self) -> bytes:
        counts = struct.pack(
            "<QQ",
            len(self.tensors) if self.tensor_count is None else self.tensor_count,
            len(self.keys) if self.key_count is None else self.key_count,
        )
        head = self.magic + struct.pack("<I", self.version) + counts
        head += b"".join(
            string(name) + struct.pack("<I", kind) + encode(kind, value) for name, kind, value in self.keys
        )
        data = b""
        for item in self.tensors:
            data += b"\0" * (-len(data) % self.alignment)
            offset = len(data) if item.offset is None else item.offset
            head += string(item.name) + struct.pack("<I", len(item.dimensions))
            head += struct.pack(f"<{len(item.dimensions)}Q", *item.dimensions)
            head += struct.pack("<IQ", item.type_number, offset)
            data += item.data
        return head + b"\0" * (-len(head) % self.alignment) + data


def string(text: str | bytes) -> bytes:
    raw = text if isinstance(text, bytes) else text.encode()
    return struct.pack("<Q", len(raw)) + raw


def encode(kind: int, value: Any) -> bytes:
    if kind == STRING:
        return string(value)
    if kind == BOOL:
        return struct.pack("<B", value)
    if kind == ARRAY:
        inner = _kind(value[0]) if value else UINT32
        return struct.pack("<IQ", inner, len(value)) + b"".join(encode(inner, item) for item in value)
    if isinstance(value, bytes):
        return value
    return struct.pack({UINT32: "<I", INT32: "<i", FLOAT32: "<f", UINT64: "<Q"}[kind], value)


def _kind(value: Any) -> int:
    if isinstance(value, bool):
        return BOOL
    if isinstance(value, int):
        return INT32 if value < 0 else UINT32 if value < 2**32 else UINT64
    if isinstance(value, float):
        return FLOAT32
    return ARRAY if isinstance(value, list) else STRING


def tiny_llama(**changes: Any) -> Writer:
    """A whole llama of one layer: hidden 8, two heads, one KV head, ffn 12, vocabulary 5."""
    writer = Writer()
    keys: dict[str, Any] = {
        "general.architecture": "llama",
        "llama.block_count": 1,
        "llama.context_length": 64,
        "llama.embedding_length": 8,
        "llama.feed_forward_length": 12,
        "llama.attention.head_count": 2,
        "llama.attention.head_count_kv": 1,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 10000.0,
        "tokenizer.ggml.tokens": ["a", "b", "c", "d", "e"],
    }
    rng = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (5, 8),
        "output_norm.weight": (8,),
        "blk.0.attn_norm.weight": (8,),
        "blk.0.attn_q.weight": (8, 8),
        "blk.0.attn_k.weight": (4, 8),
        "blk.0.attn_v.weight": (4, 8),
        "blk.0.attn_output.weight": (8, 8),
        "blk.0.ffn_norm.weight": (8,),
        "blk.0.ffn_gate.weight": (12, 8),
        "blk.0.ffn_up.weight": (12, 8),
        "blk.0.ffn_down.weight": (8, 12),
    }
    tensors = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    for name, value in changes.items():
        target: dict[str, Any] = tensors if name.endswith((".weight", ".bias")) else keys
        if value is None:
            del target[name]
        else:
            target[name] = value
    for name, value in keys.items():
        writer.key(name, value)
    for name, value in tensors.items():
        writer.tensor(name, value)
    return writer
