"""What all commands share: two consoles, the one-line error, and the exit statuses.

Results go to standard output, everything for the eye goes to standard error, so that a pipe carries results only.
Exit status: 0 done, 1 an error of Shoal's, 2 wrong usage, 130 interrupted.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import typer

from shoal.errors import ShoalError

if TYPE_CHECKING:
    from rich.console import Console

FAILED = 1
INTERRUPTED = 130


def make_console(*, stderr: bool = True) -> Console:
    """A rich console that prints text as it is: no markup, no emoji codes, no guessed colours."""
    from rich.console import Console

    return Console(stderr=stderr, markup=False, emoji=False, highlight=False)


def note(message: str) -> None:
    """A line for the eye; also the ``notify`` of loading a model."""
    typer.echo(message, err=True)


def complain(message: str) -> None:
    """One error line."""
    typer.echo(f"error: {message}", err=True)


def guarded(command: Callable[..., None]) -> Callable[..., None]:
    """The command with its errors turned into a line and an exit status.

    Adds the context parameter, by which typer hands over the root command's ``--debug``.
    """
    signature = inspect.signature(command, eval_str=True)
    context = inspect.Parameter("ctx", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)

    @functools.wraps(command)
    def run(ctx: typer.Context, **arguments: Any) -> None:
        try:
            command(**arguments)
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None
        except BrokenPipeError:
            # The reader has left (`shoal generate ... | head`): nothing to say, and nobody to say it to. Standard
            # output must not be flushed at exit, which would raise again.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(FAILED) from None
        except ShoalError as error:
            if ctx.obj is not None and ctx.obj.debug:
                raise
            complain(str(error))
            raise typer.Exit(FAILED) from None

    run.__signature__ = signature.replace(parameters=[context, *signature.parameters.values()])  # type: ignore[attr-defined]
    run.__annotations__ = {}
    return run
