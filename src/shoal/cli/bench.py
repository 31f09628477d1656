"""``shoal bench``: the measuring commands."""

from __future__ import annotations

import typer

from shoal.cli.bench_engine import engine
from shoal.cli.bench_serve import serve
from shoal.cli.console import guarded


def make_bench_app() -> typer.Typer:
    """The group."""
    app = typer.Typer(no_args_is_help=True, rich_markup_mode="markdown")
    app.callback()(bench)
    app.command("engine")(guarded(engine))
    app.command("serve")(guarded(serve))
    return app


def bench() -> None:
    """Measure how fast Shoal is here, and how fast it could be; or any server, from its clients' side."""
