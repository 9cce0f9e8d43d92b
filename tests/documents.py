"""Code blocks of our Markdown pages, and what to do with each.

A comment before a block says it: `<!-- run -->` (against the shared server), `<!-- run: dry -->` (`headrace
serve` lines with --dry-run), `<!-- not run: REASON -->`. Every bash and python block must carry one of them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")])

_BLOCK = re.compile(
    r"(?:^<!-- (?P<mark>(?:not )?run(?:: [^>]*)?) -->\n)?^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.M | re.S
)
_LINK = re.compile(r"\]\((?!https?:)([^)#\s]+)(?:#[^)]*)?\)")


@dataclass(frozen=True)
class Block:
    page: str
    line: int
    language: str
    mark: str | None
    text: str

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"


def blocks() -> list[Block]:
    found = []
    for page in PAGES:
        content = page.read_text()
        for match in _BLOCK.finditer(content):
            line = content.count("\n", 0, match.start("text")) + 1
            name = str(page.relative_to(ROOT))
            found.append(Block(name, line, match["language"], match["mark"], match["text"]))
    return found


def runnable(mark: str) -> list[Block]:
    """Blocks with this mark; of those that say exactly the same (in two languages) the first."""
    return list({block.text: block for block in reversed(blocks()) if block.mark == mark}.values())[::-1]


def relative_links() -> list[tuple[Path, str]]:
    """(page, target) of every link to a file of the repository."""
    return [(page, target) for page in PAGES for target in _LINK.findall(page.read_text())]
