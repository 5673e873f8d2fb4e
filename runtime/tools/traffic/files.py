"""Text files of one record a line, read as they come.

It must not know what a line means. One invariant: what is no such file is refused with a ConfigError that names it.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from itertools import count
from pathlib import Path

from ...common.errors import ConfigError

MAX_LINE = 16 << 20  # characters


def text_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Lines that are not empty, with their numbers from 1. Raises ConfigError, also for one longer than MAX_LINE."""
    return ((number, text) for number, text in _lines(path) if text.strip())


def csv_rows(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Line numbers and fields of all lines that are not empty. Raises ConfigError."""
    reader = csv.reader(text for _, text in _lines(path))
    try:
        yield from ((reader.line_num, row) for row in reader if row)
    except csv.Error as error:
        raise ConfigError(f"{path}, line {reader.line_num}: {error}") from error


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    try:
        with path.open(encoding="utf-8-sig") as file:
            for number in count(1):
                text = file.readline(MAX_LINE)
                if not text:
                    return
                if len(text) == MAX_LINE:
                    raise ConfigError(f"{path}, line {number}: longer than {MAX_LINE} characters")
                yield number, text
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
