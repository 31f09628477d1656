"""The native kernels: a recorded program in C++, and the ``Ops`` that records it.

``recorder.NativeOps`` implements ``kernels.ops.Ops``; ``formats`` decides how a weight is packed for a precision;
``_native`` is the compiled module (csrc/), one binary that holds every instruction set.
"""

from __future__ import annotations

from shoal.errors import KernelError

try:
    from shoal.kernels.native import _native
except ImportError as error:  # pragma: no cover - only a broken installation gets here
    raise KernelError(f"the native kernels are not built ({error}); install Shoal again with pip") from error


def available_isas() -> tuple[str, ...]:
    """Instruction sets that this processor can run, best first."""
    return tuple(_native.available_isas())


def choose_isa(wanted: str) -> str:
    """The instruction set to use: ``wanted``, or the best one for "auto". KernelError if this processor lacks it."""
    available = available_isas()
    if wanted == "auto":
        return available[0]
    if wanted not in available:
        raise KernelError(f"isa: this processor cannot run {wanted!r}; it can run {', '.join(available)}")
    return wanted
