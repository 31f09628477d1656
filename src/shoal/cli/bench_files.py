"""Files that the measuring commands write."""

from __future__ import annotations

from pathlib import Path

import typer

from shoal.errors import ConfigError


def check_writable(output: Path | None) -> None:
    """Before minutes are spent on something that cannot be kept."""
    if output is not None and (output.is_dir() or not output.absolute().parent.is_dir()):
        raise typer.BadParameter(f"cannot write {output}: a folder, or in none", param_hint="--output")


def write_file(field: str, output: Path, text: str) -> None:
    """Write it, or raise ConfigError about the option ``field``."""
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(field, f"cannot write {output}: {error.strerror}") from error
