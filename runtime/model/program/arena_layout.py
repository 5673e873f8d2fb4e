"""The layout of a step's arena: an offset for each value, from its lifetime, as a compiler assigns registers.

Independent of ops and models. Two values that are live at the same op never share a byte.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass

from ....kernels.ops import aligned


@dataclass(frozen=True, slots=True)
class Lifetime:
    """A value of `nbytes` that is live from op `first` to op `last`, both included."""

    nbytes: int
    first: int
    last: int

    @property
    def steps(self) -> int:
        return self.last - self.first + 1

    def overlaps(self, other: Lifetime) -> bool:
        return self.first <= other.last and other.first <= self.last


@dataclass(frozen=True, slots=True)
class ArenaLayout:
    """One offset per value, in the order of the values, and the bytes of the whole arena."""

    offsets: tuple[int, ...]
    nbytes: int


def lay_out(values: Sequence[Lifetime]) -> ArenaLayout:
    """Place the values, longest lifetime first, then largest, each in the smallest gap between overlapping lifetimes.

    This is Pisarchyk and Lee's greedy by size (2020), except that long lifetimes come first: they overlap most other
    values, which would fragment the space if they were placed before. Offsets are aligned for every plane of a region.
    The result is deterministic: equal values are placed in order of their first op.
    """
    offsets = [0] * len(values)
    placed: list[tuple[int, int, int]] = []  # (offset, end, index), sorted: neighbors are found in order
    for index in sorted(range(len(values)), key=lambda i: (-values[i].steps, -values[i].nbytes, values[i].first)):
        neighbors = [(start, end) for start, end, other in placed if values[index].overlaps(values[other])]
        offsets[index] = _tightest_gap(neighbors, aligned(values[index].nbytes))
        insort(placed, (offsets[index], offsets[index] + aligned(values[index].nbytes), index))
    return ArenaLayout(tuple(offsets), max((end for _, end, _ in placed), default=0))


def _tightest_gap(neighbors: Sequence[tuple[int, int]], size: int) -> int:
    """Return the offset of the smallest gap that fits, or the end of all `neighbors`, which are sorted by offset."""
    best = -1
    best_size = end = 0
    for start, stop in neighbors:
        if size <= start - end and (best < 0 or start - end < best_size):
            best = end
            best_size = start - end
        end = max(end, stop)
    return best if best >= 0 else end
