"""Shoal: an LLM inference engine whose subject is batching.

Names are imported on first use, so that ``shoal.core`` (standard library only) never drags NumPy in.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal.core.params import SamplingParams
    from shoal.engine.llm import LLM
    from shoal.errors import ShoalError

_EXPORTS = {
    "LLM": "shoal.engine.llm",
    "SamplingParams": "shoal.core.params",
    "ShoalError": "shoal.errors",
}

__all__ = ["LLM", "SamplingParams", "ShoalError"]


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module 'shoal' has no attribute {name!r}")
