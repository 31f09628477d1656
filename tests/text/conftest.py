"""The default model's tokenizer and chat template."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.models import GGUFFile
from shoal.text.tokenizer import Tokenizer, TokenizerSpec


@pytest.fixture(scope="session")
def model_file(model_path: Path) -> GGUFFile:
    return GGUFFile.open(model_path)


@pytest.fixture(scope="session")
def tokenizer(model_file: GGUFFile) -> Tokenizer:
    return Tokenizer(TokenizerSpec.from_gguf(model_file.metadata, path=str(model_file.path)))
