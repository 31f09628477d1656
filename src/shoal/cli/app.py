"""The root command: one line per subcommand, the global options, and how the process ends.

Modules of commands import what is heavy (NumPy, the native code, the tokenizer) inside their functions, so that
``shoal --help`` answers at once.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated

import typer

from shoal.cli.bench import make_bench_app
from shoal.cli.console import INTERRUPTED, guarded

# Name, module and function, in the order of --help.
_COMMANDS = (
    ("serve", "shoal.cli.serve", "serve"),
    ("run", "shoal.cli.run", "run"),
    ("chat", "shoal.cli.chat", "chat"),
    ("generate", "shoal.cli.generate", "generate"),
    ("pull", "shoal.cli.pull", "pull"),
    ("models", "shoal.cli.models", "models"),
    ("verify", "shoal.cli.verify", "verify"),
    ("eval", "shoal.cli.eval", "evaluate"),
    ("info", "shoal.cli.info", "info"),
)


@dataclass(frozen=True, slots=True)
class Settings:
    """What the root command hands to subcommands."""

    debug: bool


def make_app() -> typer.Typer:
    """The whole command line."""
    app = typer.Typer(
        name="shoal",
        help="Run language models on the CPU, many requests at once.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode="markdown",
        context_settings={"help_option_names": ["--help", "-h"]},
    )
    app.callback()(_root)
    for name, module, function in _COMMANDS:
        app.command(name)(guarded(getattr(import_module(module), function)))
    app.add_typer(make_bench_app(), name="bench")
    return app


def run_app() -> None:
    """Run the command line of this process and exit."""
    try:
        make_app()(prog_name="shoal")
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


def _version(wanted: bool) -> None:
    if not wanted:
        return
    try:
        typer.echo(f"shoal {version('shoal')}")
    except PackageNotFoundError:
        typer.echo("shoal (not installed)")
    raise typer.Exit


def _root(
    ctx: typer.Context,
    *,
    debug: Annotated[
        bool, typer.Option("--debug", envvar="SHOAL_DEBUG", help="Show the traceback of an error.")
    ] = False,
    show_version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_version, help="Show the version.")
    ] = False,
) -> None:
    ctx.obj = Settings(debug=debug)
