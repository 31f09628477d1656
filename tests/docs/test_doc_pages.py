"""The pages hang together: no dead links, nothing unreachable, decisions and changelog in order."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from doc_pages import CHANGELOG, DOCS, ROOT, Page, all_pages

DECISIONS = DOCS / "decisions"


def page_id(page: Page) -> str:
    return page.path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", all_pages(), ids=page_id)
def test_links_lead_somewhere(page: Page) -> None:
    dead = []
    for link in page.links():
        if re.match(r"https://[\w.-]+", link):
            continue
        name, _, anchor = link.partition("#")
        target = (page.path.parent / name).resolve() if name else page.path
        if not target.exists() or (anchor and anchor not in Page(target).anchors()):
            dead.append(link)
    assert not dead


def test_every_page_of_docs_is_reachable_from_the_index() -> None:
    index = DOCS / "index.md"
    reached = {index}
    pending = [index]
    while pending:
        for target in Page(pending.pop()).linked_pages() - reached:
            if target.suffix == ".md" and target.is_relative_to(DOCS) and target.exists():
                reached.add(target)
                pending.append(target)
    assert set(DOCS.rglob("*.md")) - reached == set()


def test_the_index_lists_every_page_beside_it() -> None:
    beside = {path for path in DOCS.glob("*.md") if path.name != "index.md"} | {DECISIONS / "README.md"}
    assert beside <= Page(DOCS / "index.md").linked_pages()


def test_nothing_but_pages_and_their_pictures_is_in_docs() -> None:
    linked = set().union(*(page.linked_pages() for page in all_pages()))
    others = {path for path in DOCS.rglob("*") if path.is_file() and path.suffix != ".md"}
    assert others - linked == set()


def decision_pages() -> list[Path]:
    return sorted(path for path in DECISIONS.glob("*.md") if path.name != "README.md")


def test_decisions_are_numbered_without_gaps() -> None:
    numbers = [path.name[:4] for path in decision_pages()]
    assert numbers == [f"{number:04}" for number in range(1, len(numbers) + 1)]


@pytest.mark.parametrize("path", decision_pages(), ids=lambda path: path.name)
def test_a_decision_has_its_number_and_a_line_in_the_list(path: Path) -> None:
    title = path.read_text(encoding="utf-8").splitlines()[0]
    assert re.fullmatch(rf"# {path.name[:4]}: \S.*", title)
    assert f"| [{path.name[:4]}]({path.name}) |" in (DECISIONS / "README.md").read_text(encoding="utf-8")


def test_the_changelog_has_an_entry_for_this_version_on_top() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    changelog = CHANGELOG.read_text(encoding="utf-8")
    versions = re.findall(r"^## (\d+\.\d+\.\d+) \((?:unreleased|\d{4}-\d\d-\d\d)\)$", changelog, re.MULTILINE)
    assert versions[0] == version
    ordered = sorted(versions, key=lambda text: tuple(map(int, text.split("."))), reverse=True)
    assert versions == ordered
    assert len(set(versions)) == len(re.findall(r"^## ", changelog, re.MULTILINE))


def test_changelog_entries_are_sentences() -> None:
    entries = re.findall(r"^- (.*?)(?=^- |^#|\Z)", CHANGELOG.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert entries
    assert [entry for entry in entries if not entry.strip().endswith(".")] == []


def test_paths_that_the_architecture_names_exist() -> None:
    text = Page(DOCS / "architecture.md").prose
    paths = set(re.findall(r"`((?:[a-z_]+/)+(?:[a-z_]+\.(?:py|pyi|cpp|h))?)`", text))
    assert "core/" in paths
    places = [ROOT, ROOT / "src" / "shoal"]
    assert {path for path in paths if not any((place / path).exists() for place in places)} == set()


def test_the_architecture_names_every_package() -> None:
    text = (DOCS / "architecture.md").read_text(encoding="utf-8")
    packages = [path.parent.name for path in (ROOT / "src" / "shoal").glob("*/__init__.py")]
    assert packages
    assert [name for name in packages if f"`{name}/`" not in text] == []
