from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from types import ModuleType

import pytest
from cli_support import Shell
from engine_support import CheckedEngine


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch) -> Iterator[Shell]:
    """The command line with a fake model behind it; no native code is needed."""
    shell = Shell()
    assembly = ModuleType("shoal.assembly")
    assembly.load_model = shell.load_model  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "shoal.assembly", assembly)
    monkeypatch.setattr("shoal.cli.loading.fetch_if_missing", lambda model: None)
    monkeypatch.setattr("shoal.engine.start.Engine", CheckedEngine)
    yield shell
    assert not [thread for thread in threading.enumerate() if thread.name == "shoal-engine"]
