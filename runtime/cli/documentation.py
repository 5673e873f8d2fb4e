"""The sections of the documentation, which `quire demo` searches and the bundled embedding model is trained on.

Must not import other modules of Quire: the training script reads this file alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MAX_PASSAGE_CHARACTERS = 1000  # longest passage
MIN_WORDS = 8  # shortest passage: fewer words are useless for a search
_HEADING = re.compile(r"(#{1,6}) +(.+?)[ #]*$")
_LINK = re.compile(r"\[([^]]*)\]\([^)]*\)")


@dataclass(frozen=True, slots=True)
class Passage:
    """A section, or a part of a long one."""

    page: str  # path of the file
    title: str  # the headings above the text, the page's first: "Embeddings and reranking: Metrics"
    text: str  # passage without the title


def read_documentation(folder: Path) -> list[Passage]:
    """Return the passages of all Markdown files in and below a folder, in the order of their paths."""
    pages = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*.md")}
    return [passage for page in sorted(pages) for passage in read_page(page, pages[page].read_text("utf-8"))]


def read_page(page: str, markdown: str) -> Iterator[Passage]:
    """Yield the passages of a page. A line in a fenced block is not a heading."""
    headings: list[tuple[int, str]] = []  # level, text
    lines: list[str] = []
    is_fenced = False
    for line in markdown.splitlines():
        is_fenced ^= line.lstrip().startswith("```")
        heading = None if is_fenced else _HEADING.match(line)
        if heading is None:
            lines.append(line)
            continue
        yield from _passages(page, headings, lines)
        level = len(heading[1])
        headings = [*((other, text) for other, text in headings if other < level), (level, _plain(heading[2]))]
        lines = []
    yield from _passages(page, headings, lines)


def _passages(page: str, headings: list[tuple[int, str]], lines: list[str]) -> Iterator[Passage]:
    """Yield the passages of a section, of at most about `MAX_PASSAGE_CHARACTERS`, without passages of too few words."""
    title = ": ".join(text for _, text in headings) or page
    texts = [""]
    for line in map(_plain, lines):
        if texts[-1] and len(texts[-1]) + len(line) > MAX_PASSAGE_CHARACTERS:
            texts.append("")
        texts[-1] += f"{line}\n"
    yield from (Passage(page, title, text.strip()) for text in texts if len(text.split()) >= MIN_WORDS)


def _plain(line: str) -> str:
    """Return a line without the addresses of links; empty for the rule of a table."""
    return "" if set(line) <= set("|-: ") else _LINK.sub(r"\1", line)
