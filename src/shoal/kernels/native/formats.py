"""How a stored weight is packed for a precision.

The numbers equal the enumerations in csrc/common.h. "native" keeps the file's own 4- and 8-bit integers: Q4_0, Q4_1
and Q4_K stay 4-bit, Q5_* ride in bytes, Q8_0 stays 8-bit. Q6_K, whose scales cover 16 values, is rounded once more to
8 bits per 32 (its step is a fraction of the original's). Float weights stay what they are, except that half precision
is widened to float32, because bfloat16 would lose three of its bits.

"int4" is "native" with every matrix of more than four bits rounded to four, asymmetric, in groups of 32, but for the
one that gives the logits: it stays as it is, or becomes 8 bits if it was float. "int8" rounds every matrix to 8 bits
with one scale per output feature; its activations come in groups of 64.
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
    Q8C = 8


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


_FLOATS = frozenset({TensorType.F32, TensorType.F16, TensorType.BF16})
_FOUR_BITS = frozenset({TensorType.Q4_0, TensorType.Q4_1, TensorType.Q4_K})


def choose_format(weight: WeightTensor, precision: str, *, head: bool = False) -> Format:
    """The packed format of a weight under "f32", "bf16", "int8", "int4" or "native".

    ``head``: the matrix gives the logits. UnsupportedModelError for a float matrix whose width is no multiple of 32
    under "int4".
    """
    kind = tensor_type(weight)
    if precision == "f32":
        return Format.F32
    if precision == "bf16":
        return Format.BF16
    if precision == "int8":
        return Format.Q8C
    if precision == "int4" and kind not in _FOUR_BITS:
        if head:
            return Format.Q8C if kind in _FLOATS else _NATIVE[kind]
        if weight.shape[1] % 32:
            raise UnsupportedModelError(
                f"tensor {weight.name} has {weight.shape[1]} features, and int4 needs a multiple of 32; "
                "choose another precision"
            )
        return Format.Q4H
    return _NATIVE[kind]
