"""Print each file of code with the first sentence of its docstring or header, or the files about some words.

usage: python docs/files.py [WORD ...]

The page "Architecture" of the HTML documentation has the whole list.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("pager", "scheduler", "kernels", "runtime")
SUFFIXES = {".py", ".pyx", ".c", ".h"}
_DOCSTRING = re.compile(r'\A(?:#[^\n]*\n)*"""(.*?)"""', re.DOTALL)  # docstring of a Cython module
_HEADER = re.compile(r"\A((?://.*\n)+)")  # header of a C file
_SENTENCE_END = re.compile(r"(?<=\.)\s+(?=[A-Z`*\d]|\Z)|\n\s*\n")


class CodeFile(NamedTuple):
    """A file of code."""

    path: str  # path from the root of the repository
    purpose: str  # first sentence of the file


def code_paths() -> Iterator[Path]:
    """Yield the files of the four packages, by folder."""
    for package in PACKAGES:
        paths = [path for path in (ROOT / package).rglob("*") if path.suffix in SUFFIXES]
        yield from sorted(paths, key=lambda path: (path.parent, path.name))


def code_files() -> Iterator[CodeFile]:
    """Yield the files that have a docstring or a header."""
    for path in code_paths():
        if purpose := _first_sentence(header(path)):
            yield CodeFile(path.relative_to(ROOT).as_posix(), purpose)


def header(path: Path) -> str:
    """Return the docstring of a Python or Cython module, or the comment at the top of a C file."""
    text = path.read_text("utf-8")
    if path.suffix == ".py":
        return ast.get_docstring(ast.parse(text)) or ""
    found = (_DOCSTRING if path.suffix == ".pyx" else _HEADER).match(text)
    return re.sub(r"(?m)^// ?", "", found[1]) if found else ""


def markdown() -> str:
    """Return the files as one table per folder."""
    lines: list[str] = []
    folder = ""
    for path, purpose in code_files():
        parent, _, name = path.rpartition("/")
        if parent != folder:
            folder = parent
            lines += ["", f"### {folder}/", "| file | content |", "|---|---|"]
        lines.append(f"| `{name}` | {purpose.replace('|', chr(92) + '|')} |")
    return "\n".join(lines) + "\n"


def _first_sentence(text: str) -> str:
    return " ".join(_SENTENCE_END.split(text.strip(), maxsplit=1)[0].split())


def files_about(words: Iterable[str]) -> Iterator[CodeFile]:
    """Yield the files whose path or purpose has all words, in any case."""
    wanted = [word.lower() for word in words]
    for file in code_files():
        if all(word in f"{file.path} {file.purpose}".lower() for word in wanted):
            yield file


if __name__ == "__main__":
    for path, purpose in files_about(sys.argv[1:]):
        print(f"{path}: {purpose}")
