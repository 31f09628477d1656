"""From the tree to an sdist, from that to a wheel, from that to a fresh environment: nothing missing, nothing big."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MEGABYTE = 10**6
SOURCES = {".py", ".pyi", ".json", ".cpp", ".h"}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def run(*command: str | Path, folder: Path, path: str | None = None) -> str:
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    if path is not None:
        environment["PATH"] = path
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def source_files(*folders: str) -> set[str]:
    """Paths of all sources below the folders, relative to the root."""
    paths = (path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file())
    return {path.relative_to(ROOT).as_posix() for path in paths if path.suffix in SOURCES or path.name == "py.typed"}


@pytest.fixture(scope="module")
def bare_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A PATH with every program of this machine except CMake and Ninja."""
    folder = tmp_path_factory.mktemp("bin")
    for place in os.environ["PATH"].split(os.pathsep):
        if not Path(place).is_dir():
            continue
        for program in Path(place).iterdir():
            link = folder / program.name
            if not program.name.startswith(("cmake", "ctest", "cpack", "ninja")) and not link.is_symlink():
                link.symlink_to(program)
    return str(folder)


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sdist")
    run(sys.executable, "-m", "build", "--sdist", "--outdir", folder, ROOT, folder=folder)
    (archive,) = folder.glob("*.tar.gz")
    return archive


@pytest.fixture(scope="module")
def wheel(sdist: Path, bare_path: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the sdist alone, where the build requirements have to bring CMake and Ninja."""
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", folder, sdist, folder=folder, path=bare_path)
    (archive,) = folder.glob("*.whl")
    return archive


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", "--without-pip", folder, folder=folder)
    run(sys.executable, "-m", "pip", "--python", folder / "bin" / "python", "install", wheel, folder=folder)
    return folder


def test_sdist_holds_what_a_build_reads_and_nothing_big(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    needed = {"pyproject.toml", "CMakeLists.txt", "README.md", "LICENSE"} | source_files("csrc", "src")
    assert needed - names == set()
    assert {name.split("/")[0] for name in names} & {"tests", "docs", "benchmarks", "build", ".venv", ".git"} == set()
    assert sdist.stat().st_size < MEGABYTE


def test_wheel_holds_the_package_and_no_sources_in_cpp(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert {name.removeprefix("src/") for name in source_files("src")} - names == set()
    assert {name.split("/")[0] for name in names} == {"shoal", f"shoal-{wheel.name.split('-')[1]}.dist-info"}
    assert [name for name in names if name.endswith((".cpp", ".h"))] == []
    (module,) = (name for name in names if name.endswith(".so"))
    assert module.startswith("shoal/kernels/native/_native.")


def test_installation_is_small_and_without_a_framework(environment: Path) -> None:
    files = [path for path in environment.rglob("*") if path.is_file() and not path.is_symlink()]
    assert sum(path.stat().st_size for path in files) < 300 * MEGABYTE
    packages = {path.name.lower() for path in (environment / "lib").glob("python*/site-packages/*")}
    assert packages & {"torch", "tensorflow", "jax", "transformers", "gguf"} == set()


def test_installed_command_and_module_work(environment: Path, tmp_path: Path) -> None:
    assert run(environment / "bin" / "shoal", "--version", folder=tmp_path).startswith("shoal ")
    code = (
        "import shoal.kernels.native._native as module; print(module.__file__); from shoal import LLM, SamplingParams"
    )
    assert run(environment / "bin" / "python", "-c", code, folder=tmp_path).startswith(str(environment))
