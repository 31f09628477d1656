"""README and first steps keep their word: commands exist, the cheap ones run, the examples give answers."""

from __future__ import annotations

import contextlib
import io
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer.main
from doc_pages import DOCS, README, ROOT, Page

from shoal.cli.app import make_app

COMMANDS = Page(README).commands()
ALL_COMMANDS = list(dict.fromkeys([*COMMANDS, *Page(DOCS / "getting-started.md").commands()]))
EXAMPLES = [code for path in (README, DOCS / "getting-started.md") for code in Page(path).blocks("python")]
PLACEHOLDERS = {"FILE": str(README)}


def run_make(*arguments: str) -> subprocess.CompletedProcess[str]:
    # The suite may itself run under make, whose flags must not reach this one.
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    return subprocess.run(
        ["make", *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False
    )


def test_the_first_command_runs_shoal_and_the_second_tests_it() -> None:
    assert COMMANDS[:2] == ["make serve", "make test"]


def test_ci_runs_the_test_command() -> None:
    assert COMMANDS[1] in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


def test_both_commands_and_the_example_are_on_the_first_screen() -> None:
    first_screen = README.read_text(encoding="utf-8").splitlines()[:30]
    for wanted in ("make serve", "make test", "curl http", "from shoal import LLM, SamplingParams"):
        assert any(line.startswith(wanted) for line in first_screen)


def test_every_command_is_of_make_or_shoal() -> None:
    assert {command.split()[0] for command in COMMANDS} == {"make", "shoal"}


@pytest.mark.parametrize("command", [command for command in ALL_COMMANDS if command.startswith("make ")])
def test_make_target_exists(command: str) -> None:
    done = run_make("--dry-run", *shlex.split(command)[1:])
    assert done.returncode == 0, done.stderr


def test_make_alone_lists_every_target() -> None:
    done = run_make()
    assert done.returncode == 0, done.stderr
    assert done.stdout == run_make("help").stdout
    listed = {line.split()[1] for line in done.stdout.splitlines()}
    phony = next(line for line in (ROOT / "Makefile").read_text().splitlines() if line.startswith(".PHONY:"))
    assert listed == set(phony.split()[1:]) - {"FORCE"}


@pytest.mark.parametrize("command", [command for command in ALL_COMMANDS if command.startswith("shoal ")])
def test_shoal_command_is_understood(command: str) -> None:
    arguments = [PLACEHOLDERS.get(word, word) for word in shlex.split(command)[1:]]
    group = typer.main.get_command(make_app())
    # Parses everything, runs nothing; unknown commands, options and missing values raise.
    with group.make_context("shoal", arguments.copy()) as context:
        name, subcommand, rest = group.resolve_command(context, arguments)
        with subcommand.make_context(name, rest, parent=context):
            pass


def test_every_command_of_shoal_is_named() -> None:
    named = {command.split()[1] for command in COMMANDS if command.startswith("shoal ")}
    assert named == set(typer.main.get_command(make_app()).commands)


def test_listing_models_runs_without_any(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from shoal.cli import main; main()", "models"],
        env={**os.environ, "SHOAL_CACHE": str(tmp_path)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "smollm2" in done.stdout


@pytest.mark.model
@pytest.mark.parametrize("example", EXAMPLES, ids=range(len(EXAMPLES)))
def test_python_example_prints_answers(example: str, model_path: Path) -> None:
    assert 'LLM("smollm2")' in example
    code = compile(example.replace('"smollm2"', repr(str(model_path))), "example", "exec")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code, {"__name__": "example"})
    assert len(printed.getvalue().split()) > 10
