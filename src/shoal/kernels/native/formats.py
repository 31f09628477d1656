"""How a stored weight is packed for a precision.

The numbers equal the enumerations in csrc/common.h. "native" keeps the file's own 4- and 8-bit integers: Q4_0, Q4_1
and Q4_K stay 4-bit, Q5_* ride in bytes, Q8_0 stays 8-bit. Q6_K, whose scales cover 16 values, is rounded once more to
8 bits per 32 (its step is a fraction of the original's). Float weights stay what they are, except that half precision
is widened to float32, because bfloat16 would lose three of its bits.
"""

from __future__ import annotations

from enum import IntEnum

from shoal.errors import UnsupportedModelError
from shoal.kernels.ops import WeightTensor


class TensorType(IntEnum):
    """Stored types, in the order of the native enumeration."""

    F32 = 0
    F16 = 1
    BF16 = 2
    Q8_0 = 3
    Q4_0 = 4
    Q4_1 = 5
    Q5_0 = 6
    Q5_1 = 7
    Q4_K = 8
    Q5_K = 9
    Q6_K = 10


class Format(IntEnum):
    """Packed formats, in the order of the native enumeration."""

    F32 = 0
    BF16 = 1
    Q4H = 2
    Q4F = 3
    Q8SH = 4
    Q8SF = 5
    Q8AH = 6
    Q8AF = 7


_NATIVE = {
    TensorType.F32: Format.F32,
    TensorType.F16: Format.F32,
    TensorType.BF16: Format.BF16,
    TensorType.Q8_0: Format.Q8SH,
    TensorType.Q4_0: Format.Q4F,
    TensorType.Q4_1: Format.Q4H,
    TensorType.Q5_0: Format.Q8AF,
    TensorType.Q5_1: Format.Q8AH,
    TensorType.Q4_K: Format.Q4F,
    TensorType.Q5_K: Format.Q8AF,
    TensorType.Q6_K: Format.Q8SF,
}


def tensor_type(weight: WeightTensor) -> TensorType:
    """The stored type; UnsupportedModelError names the tensor if it is not one of ours."""
    try:
        return TensorType[weight.type_name]
    except KeyError:
        raise UnsupportedModelError(
            f"tensor {weight.name} has type {weight.type_name}, which Shoal cannot run"
        ) from None


def choose_format(weight: WeightTensor, precision: str) -> Format:
    """The packed format of a weight under "f32", "bf16" or "native"."""
    kind = tensor_type(weight)
    if precision == "f32":
        return Format.F32
    if precision == "bf16":
        return Format.BF16
    return _NATIVE[kind]
