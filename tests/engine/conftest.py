from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from engine_support import CheckedEngine


@pytest.fixture(autouse=True)
def checked_engines(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Engines behind an ``LLM`` check themselves too, and no engine thread outlives its test."""
    monkeypatch.setattr("shoal.engine.start.Engine", CheckedEngine)
    yield
    left = [thread for thread in threading.enumerate() if thread.name == "shoal-engine"]
    assert not left, "a test left an engine running"
