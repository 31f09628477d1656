"""Dequantization against references made elsewhere, and against twins written value by value from the formats."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.errors import UnsupportedModelError
from shoal.models.dequantize import BLOCKS, dequantize


@pytest.mark.parametrize("type_name", [name for name in BLOCKS if name != "F32"])
def test_equals_the_golden_blocks(golden: Path, type_name: str) -> None:
    with np.load(golden / "dequant.npz") as arrays:
        raw, expected = arrays[f"{type_name}_raw"], arrays[f"{type_name}_f32"]
    found = dequantize(type_name, raw.view(np.uint8))
    np.testing.assert_array_equal(found.reshape(expected.shape), expected)


def half(block: bytes, offset: int) -> np.float32:
    return np.float32(struct.unpack_from("<e", block, offset)[0])


def twin(type_name: str, block: bytes) -> list[np.float32]:
    """One block, one value at a time, each operation rounded to float32."""
    d = half(block, 208 if type_name == "Q6_K" else 0)
    out = []
    for i in range(BLOCKS[type_name].elements):
        if type_name == "Q8_0":
            out.append(d * np.float32(struct.unpack_from("<b", block, 2 + i)[0]))
            continue
        if type_name in ("Q4_0", "Q4_1", "Q5_0", "Q5_1"):
            header = {"Q4_0": 2, "Q4_1": 4, "Q5_0": 6, "Q5_1": 8}[type_name]
            q = (block[header + i % 16] >> (4 * (i // 16))) & 15
            if type_name[1] == "5":
                q |= ((int.from_bytes(block[header - 4 : header], "little") >> i) & 1) << 4
            offset = {"Q4_0": 8, "Q5_0": 16}.get(type_name, 0)
            value = d * np.float32(q - offset)
            out.append(value + half(block, 2) if type_name.endswith("_1") else value)
            continue
        if type_name == "Q6_K":
            part, place = divmod(i, 128)
            quarter, column = divmod(place, 32)
            low = (block[part * 64 + quarter % 2 * 32 + column] >> (4 * (quarter // 2))) & 15
            high = (block[128 + part * 32 + column] >> (2 * quarter)) & 3
            scale = np.float32(struct.unpack_from("<b", block, 192 + i // 16)[0])
            out.append(d * scale * np.float32((low | high << 4) - 32))
            continue
        group, column = divmod(i, 32)
        scales = block[4:16]
        if group < 4:
            scale, minimum = scales[group] & 63, scales[group + 4] & 63
        else:
            scale = (scales[group + 4] & 15) | (scales[group - 4] >> 6 << 4)
            minimum = (scales[group + 4] >> 4) | (scales[group] >> 6 << 4)
        q = (block[(48 if type_name == "Q5_K" else 16) + group // 2 * 32 + column] >> (4 * (group % 2))) & 15
        if type_name == "Q5_K":
            q |= ((block[16 + column] >> group) & 1) << 4
        out.append(d * np.float32(scale) * np.float32(q) - half(block, 2) * np.float32(minimum))
    return out


SCALED = [name for name in BLOCKS if name.startswith("Q")]


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(SCALED), st.integers(0, 2**32 - 1))
def test_equals_the_scalar_twin(type_name: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (3, BLOCKS[type_name].bytes), dtype=np.uint8)
    for offset in (208,) if type_name == "Q6_K" else (0, 2) if type_name[-1] in "1K" else (0,):
        scale = (rng.standard_normal((3, 1)) * 0.1).astype(np.float16)
        blocks[:, offset : offset + 2] = scale.view(np.uint8)
    expected = [twin(type_name, block.tobytes()) for block in blocks]
    np.testing.assert_array_equal(dequantize(type_name, blocks), np.array(expected, np.float32))


def test_shapes_and_wrong_input() -> None:
    assert dequantize("Q4_0", np.zeros((2, 3, 36), np.uint8)).shape == (2, 3, 64)
    with pytest.raises(UnsupportedModelError, match="IQ4_XS is not supported"):
        dequantize("IQ4_XS", np.zeros(8, np.uint8))
    with pytest.raises(ValueError, match="not whole blocks of 18 bytes"):
        dequantize("Q4_0", np.zeros(19, np.uint8))
