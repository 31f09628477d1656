"""Models: files and what is in them, descriptions of architectures, forward passes written against ``Ops``."""

from __future__ import annotations

from shoal.models.description import Model
from shoal.models.gguf_file import GGUFFile
from shoal.models.registry import describe

__all__ = ["GGUFFile", "Model", "describe"]
