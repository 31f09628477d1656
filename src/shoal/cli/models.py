"""``shoal models``: which models are known and which are here."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from shoal.cli.console import make_console


def models(*, as_json: Annotated[bool, typer.Option("--json", help="Print JSON on standard output.")] = False) -> None:
    """List the known models and whether they are in the cache folder."""
    from shoal.config import cache_folder
    from shoal.models.pull import list_installed

    folder = cache_folder()
    rows = [
        {
            "name": entry.name,
            "title": entry.title,
            "licence": entry.licence,
            "size": entry.size,
            "package": entry.requirement,
            "path": None if path is None else str(path),
        }
        for entry, path in list_installed(folder)
    ]
    if as_json:
        typer.echo(json.dumps({"folder": str(folder), "models": rows}))
        return
    from rich.table import Table

    table = Table(title=f"Models in {folder}", title_justify="left")
    for name in ("name", "model", "size", "licence", "here"):
        table.add_column(name)
    for row in rows:
        here = str(row["path"]) if row["path"] else f"no; `shoal pull {row['name']}`"
        table.add_row(
            str(row["name"]), str(row["title"]), f"{entry_megabytes(row['size'])} MB", str(row["licence"]), here
        )
    make_console(stderr=False).print(table)


def entry_megabytes(size: object) -> str:
    """Bytes as whole megabytes."""
    return f"{size / 1e6:.0f}" if isinstance(size, int) else "?"
