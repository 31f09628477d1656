from __future__ import annotations

from pathlib import Path

import pytest

from shoal.cli.loading import fetch_if_missing
from shoal.models.catalog import CATALOG, CatalogEntry


@pytest.fixture
def pulled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[str, Path]]:
    """What would have been pulled."""
    pulls: list[tuple[str, Path]] = []

    def pull(entry: CatalogEntry, folder: Path) -> Path:
        pulls.append((entry.name, folder))
        return folder / entry.file_name

    monkeypatch.setattr("shoal.cli.pull.pull_with_progress", pull)
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path))
    return pulls


def test_a_known_model_is_pulled_once_and_said_so(
    pulled: list[tuple[str, Path]], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch_if_missing("smollm2")
    assert pulled == [("smollm2", tmp_path)]
    (line,) = capsys.readouterr().err.splitlines()
    assert CATALOG["smollm2"].title in line
    assert "pulling it once" in line
    monkeypatch.setattr("shoal.models.pull.installed_path", lambda entry, folder: folder / entry.file_name)
    fetch_if_missing("smollm2")
    assert len(pulled) == 1


def test_a_path_is_not_pulled(pulled: list[tuple[str, Path]], tmp_path: Path) -> None:
    fetch_if_missing(str(tmp_path / "model.gguf"))
    assert pulled == []
