"""A place for the pages of preempted requests that holds no bytes, only books: what spilling costs, without a disk.

It must not know whose pages they are. One invariant: a slot is taken from its `save` to its `free`, as in a file.
"""

from __future__ import annotations

from collections.abc import Sequence

from ....pager.spill import READ_BYTES_PER_S, WRITE_BYTES_PER_S


class SimulatedSpill:
    """A PageStore of `max_bytes`, as fast as a SpillFile takes a disk to be before it has measured it."""

    def __init__(self, page_bytes: int, max_bytes: int) -> None:
        self._free = list(range(max_bytes // page_bytes))
        self._write_s = page_bytes / WRITE_BYTES_PER_S  # per page
        self._read_s = page_bytes / READ_BYTES_PER_S
        self._spent_s = 0.0

    def save(self, page_ids: Sequence[int]) -> Sequence[int] | None:
        if len(page_ids) > len(self._free):
            return None
        self._spent_s += len(page_ids) * self._write_s
        return [self._free.pop() for _ in page_ids]

    def load(self, slots: Sequence[int], page_ids: Sequence[int]) -> bool:
        self._spent_s += len(slots) * self._read_s
        return True

    def free(self, slots: Sequence[int]) -> None:
        self._free.extend(slots)

    def seconds(self, num_pages: int) -> float | None:
        return num_pages * (self._write_s + self._read_s) if num_pages <= len(self._free) else None

    def take_spent_s(self) -> float:
        """Seconds spent since this was last asked: the scheduler waits for the disk."""
        spent_s, self._spent_s = self._spent_s, 0.0
        return spent_s
