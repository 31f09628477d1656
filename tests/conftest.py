"""Fixtures that several suites share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shoal.config import cache_folder
from shoal.models.catalog import DEFAULT_MODEL, resolve_model

GOLDEN = Path(__file__).parent / "golden" / "data"


@pytest.fixture(scope="session")
def golden() -> Path:
    """The folder of reference files; its README says what they are."""
    return GOLDEN


@pytest.fixture(scope="session")
def model_path() -> Path:
    """The default model's file: $SHOAL_TEST_MODEL, or pulled into the ordinary cache folder."""
    given = os.environ.get("SHOAL_TEST_MODEL")
    return Path(given) if given else resolve_model(DEFAULT_MODEL, cache_folder())
