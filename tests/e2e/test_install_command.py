"""The installed ``shoal`` command as a subprocess: it starts, knows its version and says what wrong usage is."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

COMMANDS = ("run", "chat", "generate", "pull", "models", "verify", "eval", "info")


@pytest.fixture(scope="module")
def installed_version() -> str:
    try:
        return version("shoal")
    except PackageNotFoundError:
        pytest.skip("shoal is not installed in this environment; make test installs it")


@pytest.fixture
def shoal(installed_version: str, tmp_path: Path) -> ShoalCommand:
    return ShoalCommand(tmp_path)


class ShoalCommand:
    """Runs the command somewhere else, with an empty cache and nothing on standard input."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path = Path(sys.executable).parent / "shoal"

    def __call__(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        environment |= {"SHOAL_CACHE": str(self._folder / "cache"), "NO_COLOR": "1", "COLUMNS": "100", "TERM": "dumb"}
        return subprocess.run(
            [self._path, *arguments],
            cwd=self._folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )


def test_version(shoal: ShoalCommand, installed_version: str) -> None:
    done = shoal("--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"shoal {installed_version}\n", "")


def test_help_names_every_command(shoal: ShoalCommand) -> None:
    done = shoal("--help")
    assert (done.returncode, done.stderr) == (0, "")
    words = done.stdout.split()
    assert [name for name in COMMANDS if name not in words] == []


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(shoal: ShoalCommand, command: str) -> None:
    done = shoal(command, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert f"Usage: shoal {command}" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["no-such-command"], "no-such-command"),
        (["--no-such-option"], "--no-such-option"),
        (["generate"], "PROMPT"),
        (["generate", "Hello", "--no-such-option"], "--no-such-option"),
        (["generate", "Hello", "--max-tokens", "many"], "--max-tokens"),
        (["generate", "Hello", "extra"], "extra"),
    ],
)
def test_wrong_usage_exits_with_2_and_says_what_is_wrong(shoal: ShoalCommand, arguments: list[str], named: str) -> None:
    done = shoal(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert named in done.stderr
    assert "Traceback" not in done.stderr


def test_an_error_is_one_line_and_exits_with_1(shoal: ShoalCommand) -> None:
    done = shoal("generate", "Hello", "--model", "no-such-file.gguf")
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    assert "no-such-file.gguf" in line
