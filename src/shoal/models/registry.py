"""From a file's architecture name to the loader that understands it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from shoal.errors import ModelFileError, UnsupportedModelError
from shoal.models.description import Model
from shoal.models.gguf_file import GGUFFile
from shoal.models.llama_gguf import ARCHITECTURE as LLAMA
from shoal.models.llama_gguf import describe_llama

LOADERS: Mapping[str, Callable[[GGUFFile], Model]] = MappingProxyType({LLAMA: describe_llama})


def describe(file: GGUFFile) -> Model:
    """The model in a file. UnsupportedModelError names an architecture that is not known, and those that are."""
    name = file.metadata.get("general.architecture")
    if not isinstance(name, str):
        raise ModelFileError(str(file.path), "general.architecture", f"must be a string, found {name!r}")
    if name not in LOADERS:
        raise UnsupportedModelError(f"{file.path}: architecture {name!r}; supported are {', '.join(LOADERS)}")
    return LOADERS[name](file)
