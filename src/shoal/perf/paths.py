"""Which arithmetic a configuration multiplies with: the name of the probe whose peak is its ceiling."""

from __future__ import annotations

from shoal.kernels.native.formats import Format

_INT8_VECTORS = {"amx": "int8_vnni", "avx512": "int8_vnni", "avx2": "int8_avx2", "portable": "int8_portable"}
_INT8 = {**_INT8_VECTORS, "amx": "int8_amx"}
_FP32 = {"amx": "fp32_avx512", "avx512": "fp32_avx512", "avx2": "fp32_avx2", "portable": "fp32_portable"}
# Without a product of pairs, bfloat16 is widened to float32 first.
_BF16 = {"amx": "bf16_amx", "avx512": "bf16_avx512", "avx2": "fp32_avx2", "portable": "fp32_portable"}


def matmul_path(isa: str, kind: Format) -> str:
    """The arithmetic of a product with a weight packed in this format."""
    if kind is Format.F32:
        return _FP32[isa]
    return _BF16[isa] if kind is Format.BF16 else _INT8[isa]


def attention_path(isa: str, kv_dtype: str) -> str:
    """The arithmetic of attention: of integers over an 8-bit cache, else float32; never on tiles."""
    return _INT8_VECTORS[isa] if kv_dtype == "int8" else _FP32[isa]
