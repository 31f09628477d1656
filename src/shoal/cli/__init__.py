"""The ``shoal`` command. ``app`` composes it of one module per subcommand."""

from __future__ import annotations


def main() -> None:
    """Entry point of the installed command."""
    from shoal.cli.app import run_app

    run_app()
