"""Reading Shoal's own Markdown: pages, fenced blocks and links."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
CHANGELOG = ROOT / "CHANGELOG.md"
DOCS = ROOT / "docs"

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_INLINE_CODE = re.compile(r"`[^`\n]*`")
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ +(.+)$", re.MULTILINE)


@dataclass(frozen=True)
class Page:
    """One Markdown file."""

    path: Path

    @property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @property
    def prose(self) -> str:
        """Without fenced blocks."""
        return _FENCE.sub("", self.text)

    def blocks(self, language: str) -> list[str]:
        """The fenced blocks of one language."""
        return [body for name, body in _FENCE.findall(self.text) if name == language]

    def commands(self) -> list[str]:
        """The commands in ``sh`` blocks, without their comments."""
        lines = (line.split(" # ")[0].strip() for block in self.blocks("sh") for line in block.splitlines())
        return [line for line in lines if line]

    def links(self) -> list[str]:
        """Targets of links, code left aside."""
        return _LINK.findall(_INLINE_CODE.sub("", self.prose))

    def anchors(self) -> set[str]:
        """What a link into the page may name, as GitHub makes it of headings."""
        return {
            re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")
            for heading in _HEADING.findall(self.prose)
        }

    def linked_pages(self) -> set[Path]:
        """Files that the page links to, relative links only."""
        targets = (link.split("#")[0] for link in self.links() if "://" not in link)
        return {(self.path.parent / target).resolve() for target in targets if target}


def all_pages() -> list[Page]:
    """README, changelog and everything in docs."""
    return [Page(path) for path in [README, CHANGELOG, *sorted(DOCS.rglob("*.md"))]]
