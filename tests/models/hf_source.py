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
