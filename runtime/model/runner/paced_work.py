"""Work that is done in parts: each step does as much as its time allows.

Must not import models or kernels. A part is some of the equal items of a piece of work. Its duration is predicted from
earlier parts of the same kind, so that a step ends in time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

RATE_MEMORY = 0.7  # weight of earlier parts in the seconds that a kind of work takes


@dataclass(frozen=True, slots=True)
class WorkPiece:
    """Equal items, which are done in order."""

    kind: str  # items of one kind take time in proportion to their size
    num_items: int
    size: float  # work of one item
    part_items: int  # each part is a multiple of this number of items, except the last
    do: Callable[[int, int], None]  # does the items [first, end)


class PacedWork:
    """Pieces of work in order, of which each step does some."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._pieces: Iterator[WorkPiece] = iter(())  # pieces after `_piece`
        self._piece: WorkPiece | None = None  # piece of the next part
        self._num_done = 0  # finished items of the piece
        self._pace: dict[str, float] = {}  # kind -> seconds of an item of size 1

    def begin(self, pieces: Iterable[WorkPiece]) -> None:
        """Take the next work, and drop unfinished work. `pieces` yields a piece after all earlier pieces are done."""
        self._pieces = iter(pieces)
        self._take_next()

    def advance(self, seconds: float) -> bool:
        """Do at least one part, then others that are predicted to end within `seconds`. Return whether all is done."""
        end = self._clock() + seconds
        has_begun = False
        while (piece := self._piece) is not None:
            num_items = self._num_fitting(piece, end - self._clock())
            if not num_items and has_begun:
                return False
            self._do(piece, num_items or min(piece.part_items, piece.num_items - self._num_done))
            has_begun = True
        return True

    def _num_fitting(self, piece: WorkPiece, seconds: float) -> int:
        """Return how many of the next items are predicted to take at most `seconds`: whole parts, or all."""
        num_left = piece.num_items - self._num_done
        if seconds <= 0:
            return 0
        if piece.kind not in self._pace:
            return min(piece.part_items, num_left)
        item_s = self._pace[piece.kind] * piece.size
        if item_s * num_left <= seconds:
            return num_left
        return int(seconds / item_s) // piece.part_items * piece.part_items

    def _do(self, piece: WorkPiece, num_items: int) -> None:
        start = self._clock()
        piece.do(self._num_done, self._num_done + num_items)
        pace = (self._clock() - start) / (num_items * piece.size)
        self._pace[piece.kind] = RATE_MEMORY * self._pace.get(piece.kind, pace) + (1 - RATE_MEMORY) * pace
        self._num_done += num_items
        if self._num_done == piece.num_items:
            self._take_next()

    def _take_next(self) -> None:
        self._piece = next(self._pieces, None)
        self._num_done = 0
