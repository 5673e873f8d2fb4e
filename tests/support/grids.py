"""Grids of parameters: `make test` runs each pair of values once, `make grids` all combinations."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from itertools import combinations, product
from typing import Any

IS_FULL = os.environ.get("QUIRE_GRIDS") == "full"


def grid(*axes: Sequence[Any], is_full: bool = IS_FULL) -> list[tuple[Any, ...]]:
    """Return combinations of a value of each axis, in which any two values of two axes meet.

    A fault of an op depends on two parameters at most. With `is_full`, all combinations are returned.
    """
    cells = list(product(*(range(len(axis)) for axis in axes)))
    chosen = cells if is_full else _covering(cells)
    return [tuple(axis[at] for axis, at in zip(axes, cell, strict=True)) for cell in chosen]


def _covering(cells: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Return cells with all pairs of the given ones: always the first cell with the most pairs that are missing."""
    missing = {pair for cell in cells for pair in _pairs(cell)}
    chosen = []
    while missing:
        best = max(cells, key=lambda cell: sum(pair in missing for pair in _pairs(cell)))
        chosen.append(best)
        missing.difference_update(_pairs(best))
    return sorted(chosen)


def _pairs(cell: tuple[int, ...]) -> Iterator[tuple[tuple[int, int], ...]]:
    return combinations(enumerate(cell), 2)
