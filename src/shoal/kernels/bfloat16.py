"""bfloat16 in NumPy, which has no such type: a float32 cut to its upper 16 bits, rounded to nearest, ties to even.

Values are carried either as ``uint16`` bits or as float32 arrays whose values are all representable.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def to_bits(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """The bfloat16 bits nearest to each value; infinities stay, too large values become infinite, NaN stays NaN."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    # Adding 0x7FFF carries into the kept half when the cut half is above its middle; the kept half's own last bit
    # settles a tie. A NaN could carry into the sign or lose all its mantissa, so it is cut and made quiet instead.
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    quiet = (bits >> np.uint32(16)) | np.uint32(0x0040)
    is_nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    return np.where(is_nan, quiet, rounded).astype(np.uint16).reshape(np.shape(values))


def from_bits(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """The float32 values of bfloat16 bits, exactly."""
    wide: NDArray[Any] = bits.astype(np.uint32) << np.uint32(16)
    return wide.view(np.float32)


def round_to_bfloat16(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Each value replaced by the nearest bfloat16, still as float32."""
    return from_bits(to_bits(values))
