"""Writes docs/cli.md: the help text of every command, as the commands themselves print it.

``python scripts/cli_reference.py`` writes the page; with ``--check`` it writes nothing and exits with status 1 when the
page is not what it would write. A test does the latter, so the page cannot fall behind the program.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import typer

PAGE = Path(__file__).resolve().parent.parent / "docs" / "cli.md"

HEADER = """\
# The command line

What each command prints for `--help`. This page is written by `make docs`; do not edit it.

Results go to standard output and everything meant for the eye to standard error, so a pipe carries results only. A
command exits with 0 when done, 1 on an error (one line says which), 2 on wrong usage, and 130 when interrupted.
`--debug` in front of a command, or `SHOAL_DEBUG=1`, shows the traceback of an error.
"""


def reference() -> str:
    """The whole page."""
    # The page must not depend on who writes it: no colours, one width, whatever the terminal or CI system.
    os.environ.update(COLUMNS="100", NO_COLOR="1", TERM="dumb", _TYPER_FORCE_DISABLE_TERMINAL="1")
    import typer.main

    from shoal.cli.app import make_app

    app = make_app()
    paths = _paths(typer.main.get_command(app))
    sections = [f"## {' '.join(['shoal', *path])}\n\n```text\n{text}\n```\n" for path, text in _helps(app, paths)]
    return "\n".join([HEADER, *sections])


def _paths(command: object, above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """A command and, if it is a group, everything below it."""
    yield above
    members: dict[str, object] = getattr(command, "commands", {})
    for name, member in members.items():
        yield from _paths(member, (*above, name))


def _helps(app: typer.Typer, paths: Iterable[tuple[str, ...]]) -> Iterator[tuple[tuple[str, ...], str]]:
    from typer.testing import CliRunner

    runner = CliRunner()
    for path in paths:
        result = runner.invoke(app, [*path, "--help"], prog_name="shoal")
        if result.exit_code != 0:
            raise RuntimeError(f"{path}: --help exits with {result.exit_code}: {result.output}")
        yield path, "\n".join(line.rstrip() for line in result.output.strip().splitlines())


def main(arguments: list[str]) -> int:
    """Write or check the page; the exit status."""
    if arguments not in ([], ["--check"]):
        print(f"usage: {Path(__file__).name} [--check]", file=sys.stderr)
        return 2
    text = reference()
    if not arguments:
        PAGE.write_text(text, encoding="utf-8")
        return 0
    if PAGE.is_file() and PAGE.read_text(encoding="utf-8") == text:
        return 0
    print(f"{PAGE.name} is not what the commands' help says; run: make docs", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
