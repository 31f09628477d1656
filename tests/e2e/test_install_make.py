"""The Makefile's stamps and the CI script, with a Python and a pip that only write down what they were asked.

What is at stake: the second run does nothing, a change of C++ is built, a change of Python is not, and nothing
half-made passes for whole.
"""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Answers the question of scripts/make-venv, makes an "environment" holding itself, and logs calls of pip.
FAKE_PYTHON = """\
#!/bin/sh
case "$1 $2" in
"-c "*) printf '%s\\n' "{version}" "{new_enough}" "{path}" ;;
"-m venv")
    mkdir -p "$3/bin"
    [ ! -e "{trouble}/venv" ] || exit 1
    cp "{path}" "$3/bin/python" ;;
"-m pip")
    shift 3
    echo "$*" >>"{log}"
    [ ! -e "{trouble}/pip" ] || exit 1 ;;
*) exit 64 ;;
esac
"""


def write_script(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


class Checkout:
    """A copy of what the Makefile needs, and a fake Python."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "checkout"
        self.trouble = folder / "trouble"
        self._log = folder / "log"
        self._folder = folder
        for name in ("csrc", "src", "scripts"):
            (self.folder / name).mkdir(parents=True)
        self.trouble.mkdir()
        shutil.copy(ROOT / "Makefile", self.folder)
        shutil.copy(ROOT / "scripts" / "make-venv", self.folder / "scripts")
        for name in ("pyproject.toml", "CMakeLists.txt", "csrc/kernel.cpp", "src/module.py"):
            (self.folder / name).touch()
        self.python = self.make_python("3.12.1")

    def make_python(self, version: str, *, new_enough: bool = True) -> Path:
        path = self._folder / f"python{version}"
        return write_script(
            path,
            FAKE_PYTHON.format(
                version=version, new_enough=int(new_enough), path=path, log=self._log, trouble=self.trouble
            ),
        )

    def make(self, target: str, python: Path | None = None) -> subprocess.CompletedProcess[str]:
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
        return subprocess.run(
            ["make", target, f"PYTHON={python or self.python}"],
            cwd=self.folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def installs(self) -> list[str]:
        """What pip was asked since the last question."""
        lines = self._log.read_text().splitlines() if self._log.exists() else []
        self._log.unlink(missing_ok=True)
        return lines

    def touch(self, name: str) -> None:
        """Make a file newer than every stamp, whatever the clock's resolution."""
        path = self.folder / name
        path.touch()
        newest = max(stamp.stat().st_mtime_ns for stamp in (self.folder / ".venv").glob(".*"))
        os.utime(path, ns=(newest + 10**6, newest + 10**6))


BUILT = ".venv/.built"
TOOLS = ".venv/.tools"


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def editable(lines: list[str]) -> int:
    return sum("--editable ." in line for line in lines)


def test_build_happens_once(checkout: Checkout) -> None:
    assert checkout.make(BUILT).returncode == 0
    assert editable(checkout.installs()) == 1
    again = checkout.make(BUILT)
    assert again.returncode == 0
    assert checkout.installs() == []


@pytest.mark.parametrize("name", ["csrc/kernel.cpp", "csrc/new.h", "CMakeLists.txt", "pyproject.toml"])
def test_what_the_native_build_reads_causes_one(checkout: Checkout, name: str) -> None:
    checkout.make(TOOLS)
    checkout.installs()
    checkout.touch(name)
    assert checkout.make(TOOLS).returncode == 0
    assert editable(checkout.installs()) == 1


@pytest.mark.parametrize("name", ["src/module.py", "src/new.py", "README.md"])
def test_python_and_prose_cause_none(checkout: Checkout, name: str) -> None:
    checkout.make(TOOLS)
    checkout.installs()
    checkout.touch(name)
    assert checkout.make(TOOLS).returncode == 0
    assert checkout.installs() == []


def test_a_failed_build_is_tried_again(checkout: Checkout) -> None:
    checkout.make(".venv/.created")
    (checkout.trouble / "pip").touch()
    assert checkout.make(BUILT).returncode != 0
    (checkout.trouble / "pip").unlink()
    checkout.installs()
    assert checkout.make(BUILT).returncode == 0
    assert editable(checkout.installs()) == 1


@pytest.mark.parametrize("step", ["venv", "pip"])
def test_an_interrupted_environment_is_made_anew(checkout: Checkout, step: str) -> None:
    (checkout.trouble / step).touch()
    assert checkout.make(BUILT).returncode != 0
    left = checkout.folder / ".venv" / "left-over"
    left.touch()
    (checkout.trouble / step).unlink()
    done = checkout.make(BUILT)
    assert done.returncode == 0
    assert "Replacing .venv" in done.stdout
    assert not left.exists()


def test_a_moved_environment_is_made_anew(checkout: Checkout, tmp_path: Path) -> None:
    checkout.make(BUILT)
    checkout.folder = checkout.folder.rename(tmp_path / "elsewhere")
    checkout.installs()
    assert "Replacing .venv" in checkout.make(BUILT).stdout
    assert editable(checkout.installs()) == 1


def test_another_python_makes_another_environment(checkout: Checkout) -> None:
    checkout.make(BUILT)
    checkout.installs()
    done = checkout.make(BUILT, python=checkout.make_python("3.13.0"))
    assert "Python 3.13.0" in done.stdout
    assert editable(checkout.installs()) == 1


def test_an_old_python_is_refused_by_name(checkout: Checkout) -> None:
    done = checkout.make("test", python=checkout.make_python("3.10.9", new_enough=False))
    assert done.returncode != 0
    assert "is Python 3.10.9; Shoal needs 3.11 or newer" in done.stderr
    assert not (checkout.folder / ".venv").exists()


def test_a_missing_python_is_named(checkout: Checkout) -> None:
    done = checkout.make("test", python=Path("no-such-python"))
    assert done.returncode != 0
    assert "no 'no-such-python' on the PATH" in done.stderr


FAKE_MAKE = """\
#!/bin/sh
echo "ran $1"
case "$1" in
test) echo "12 passed, 3 skipped in 1.00s" ;;
test-slow) echo "4 passed in 2.00s" ;;
esac
case " {failing} " in *" $1 "*) exit 2 ;; esac
"""


@pytest.mark.parametrize("failing", ["", "check", "test", "test-slow", "check test"])
def test_ci_runs_every_part_and_fails_if_one_does(tmp_path: Path, failing: str) -> None:
    write_script(tmp_path / "make", FAKE_MAKE.format(failing=failing))
    done = subprocess.run(
        [ROOT / ".ci" / "run"],
        env={**os.environ, "CI": "true", "PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    lines = done.stdout.splitlines()
    assert [line for line in lines if line.startswith("ran ")] == ["ran check", "ran test", "ran test-slow"]
    assert lines[-1] == "12 passed, 3 skipped in 1.00s"
    assert done.returncode == (1 if failing else 0)
    assert sum("FAILED" in line for line in lines) == len(failing.split())
