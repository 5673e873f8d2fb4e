"""Where each value of a step lies in the arena: intervals to offsets, as a compiler assigns registers.

It must not know ops or models; a value is a name, a size and the ops that first and last touch it. The one invariant:
two values that are alive at the same op never share a byte.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass

from ....kernels.ops import aligned


@dataclass(frozen=True, slots=True)
class Lifetime:
    """A value of `nbytes`, alive from op `first` to op `last`, both included."""

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
    """An offset per value, in the order given, and the bytes that hold them all."""

    offsets: tuple[int, ...]
    nbytes: int


def lay_out(values: Sequence[Lifetime]) -> ArenaLayout:
    """Longest-lived first, then biggest, each into the tightest gap between the values it meets.

    As Pisarchyk and Lee's greedy by size (2020), but what lives long meets most others, so it comes before they cut the
    space up. Offsets are aligned for every plane of a region. Deterministic: equals go by first op.
    """
    offsets = [0] * len(values)
    placed: list[tuple[int, int, int]] = []  # (offset, end, index), sorted: neighbours are found in order
    for index in sorted(range(len(values)), key=lambda i: (-values[i].steps, -values[i].nbytes, values[i].first)):
        neighbours = [(start, end) for start, end, other in placed if values[index].overlaps(values[other])]
        offsets[index] = _tightest_gap(neighbours, aligned(values[index].nbytes))
        insort(placed, (offsets[index], offsets[index] + aligned(values[index].nbytes), index))
    return ArenaLayout(tuple(offsets), max((end for _, end, _ in placed), default=0))


def _tightest_gap(neighbours: Sequence[tuple[int, int]], size: int) -> int:
    """The offset of the smallest gap that fits; behind all of them where none does. `neighbours` come by offset."""
    best, best_size, end = -1, 0, 0
    for start, stop in neighbours:
        if size <= start - end and (best < 0 or start - end < best_size):
            best, best_size = end, start - end
        end = max(end, stop)
    return best if best >= 0 else end


def live_bytes(values: Sequence[Lifetime]) -> int:
    """The most bytes alive at one op: no layout can need less."""
    changes: dict[int, int] = {}
    for value in values:
        changes[value.first] = changes.get(value.first, 0) + aligned(value.nbytes)
        changes[value.last + 1] = changes.get(value.last + 1, 0) - aligned(value.nbytes)
    now = most = 0
    for op in sorted(changes):
        now += changes[op]
        most = max(most, now)
    return most
