"""Links out of a model's folder, which are refused: a checkpoint is untrusted, and could show any file of the machine.

The cache of huggingface_hub is an exception: `models--ORGANIZATION--NAME/snapshots/REVISION` has links to files in
`models--ORGANIZATION--NAME/blobs`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from os.path import basename, commonpath, dirname, isdir, join, realpath
from pathlib import Path

from ..common.errors import CorruptCheckpoint
from .weights.gguf import PART

TEXT_ENDINGS = (".json", ".jinja", ".txt")  # endings of files that are read next to a GGUF file
READ_ENDINGS = (*TEXT_ENDINGS, ".safetensors", ".gguf")  # endings of files that are read in a folder


def check_links(path: Path) -> None:
    """Raise CorruptCheckpoint if a file that a model may have is a link out of the model's folder.

    `path` is a folder or a GGUF file. It may be a link itself, because the user chose it.
    """
    folder = path if isdir(path) else path.parent
    allowed = _allowed(folder)
    for link in _links(folder, path):
        target = realpath(link)
        if not any(_is_inside(target, root) for root in allowed):
            raise CorruptCheckpoint(
                f"{link} is a link to {target}, outside of the model's folder; only a Hugging Face cache may have such "
                "links: replace it by a copy of the file"
            )


def _allowed(folder: Path) -> list[str]:
    """Return the folders that may contain the targets of links: the model's folder, and the blobs of its cache."""
    root = realpath(folder)
    found = [root]
    at = root
    while (parent := dirname(at)) != at:
        repository = dirname(parent)
        if basename(parent) == "snapshots" and basename(repository).startswith("models--"):
            found += [at, realpath(join(repository, "blobs"))]
        at = parent
    return found


def _links(folder: Path, path: Path) -> Iterator[str]:
    """Yield the links to files that may be read, and to subfolders with such files."""
    part = PART.fullmatch(path.name)
    for entry in _entries(folder):
        if entry.path == str(path):
            continue
        if not isdir(path):
            other = PART.fullmatch(entry.name)
            is_part = part is not None and other is not None and other[1] == part[1]
            if entry.is_symlink() and (is_part or entry.name.endswith(TEXT_ENDINGS)):
                yield entry.path
        elif entry.is_dir():
            inner = [each for each in _entries(entry.path) if each.name.endswith(READ_ENDINGS)]
            if inner and entry.is_symlink():
                yield entry.path
            yield from (each.path for each in inner if each.is_symlink())
        elif entry.is_symlink() and entry.name.endswith(READ_ENDINGS):
            yield entry.path


def _entries(folder: str | Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return [*entries]
    except OSError:  # the code that reads the files says what is wrong
        return []


def _is_inside(target: str, root: str) -> bool:
    return commonpath([target, root]) == root
