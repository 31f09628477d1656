"""Opening a model for a command: fetched on first use with a progress bar, then loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.cli.console import note
from shoal.config import EngineConfig, cache_folder

if TYPE_CHECKING:
    from shoal.engine.llm import LLM


def open_llm(model: str, config: EngineConfig) -> LLM:
    """Load a model, telling on standard error what takes time."""
    from shoal.assembly import load_model
    from shoal.engine.llm import LLM

    fetch_if_missing(model)
    return LLM.from_loaded(load_model(model, config, notify=note))


def fetch_if_missing(model: str) -> None:
    """Pull a known model that is not there yet, with a progress bar."""
    from shoal.models.catalog import find_entry
    from shoal.models.pull import installed_path

    entry = find_entry(model)
    if entry is None or installed_path(entry, cache_folder()) is not None:
        return
    from shoal.cli.pull import pull_with_progress

    note(f"{entry.title} ({entry.size / 1e6:.0f} MB, {entry.licence}) is not there yet; pulling it once")
    pull_with_progress(entry, cache_folder())
