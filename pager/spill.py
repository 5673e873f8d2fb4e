"""Stores KV pages and states outside the pool: an unnamed file of bounded size, with slots of the size of a page.

A page takes one slot, a state as many as its bytes fill, and each slot has a checksum. Must not import tables or the
pager. Loaded bytes equal the saved ones, or `load` returns False. If the disk is full or broken nothing is raised: the
method reports failure, the caller recomputes, and the store pauses for `PAUSE_S`.
"""

from __future__ import annotations

import errno
import os
import tempfile
import time
from array import array
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol
from zlib import crc32

import numpy as np

from .arena import KVArena
from .exceptions import SpillUnavailable
from .states import NO_MEMORY, NO_STATE, StateMemory
from .table import NULL_PAGE

PAUSE_S = 60.0  # pause after a failure
SPEED_WEIGHT = 0.25  # weight of the newest measured speed
WRITE_BYTES_PER_S = 1e9  # assumption until measured
READ_BYTES_PER_S = 2e9  # assumption until measured


@dataclass(frozen=True, slots=True, eq=False)
class Spilled:
    """A handle for a sequence's pages and state in a store. It can be restored or discarded once."""

    num_tokens: int
    slots: tuple[tuple[int, ...], ...]  # [pages][groups]; NULL_PAGE before the window
    state_slots: tuple[int, ...] = ()  # slots of the state; empty without one

    @property
    def num_pages(self) -> int:
        """Pages in the store."""
        return len(self.used_slots()) - len(self.state_slots)

    def used_slots(self) -> list[int]:
        """Return the slots that hold the pages and the state."""
        return [slot for row in self.slots for slot in row if slot != NULL_PAGE] + list(self.state_slots)


class PageStore(Protocol):
    """Storage for pages and states outside the pager's memory. A state is named by its slot in the pager's memory."""

    def save(self, page_ids: Sequence[int], state: int) -> Sequence[int] | None:
        """Copy these pages, and a state unless it is NO_STATE, into the store.

        Return a slot for each page, then the slots of the state, or None if not all could be saved.
        """

    def load(self, slots: Sequence[int], page_ids: Sequence[int], state: int) -> bool:
        """Copy the slots into these pages, and those after them into a state unless it is NO_STATE.

        Return False if any cannot be read or is damaged. The slots stay in use.
        """

    def free(self, slots: Sequence[int]) -> None:
        """Mark the slots as unused."""

    def seconds(self, num_pages: int, num_states: int) -> float | None:
        """Return the predicted seconds to save and load pages and states; None if they cannot be saved now."""


class SpillFile:
    """A PageStore of at most `max_bytes` in `directory`. The file has no name, so it disappears with the process.

    Raises ValueError if `max_bytes` is less than a page and a state, SpillUnavailable if the file cannot be created.
    """

    def __init__(
        self,
        arena: KVArena,
        max_bytes: int,
        directory: str | os.PathLike[str],
        clock: Callable[[], float] = time.monotonic,
        state_memory: StateMemory = NO_MEMORY,
    ) -> None:
        state_bytes: int = state_memory.shape[1]
        self._page_bytes = arena.layout.page_bytes
        self._state_slots = -(-state_bytes // self._page_bytes)  # slots of a state
        self.num_slots = max_bytes // self._page_bytes
        if self.num_slots < 1 + self._state_slots:
            least = f"a page of {self._page_bytes:,} bytes"
            if state_bytes:
                least += f" and a state of {state_bytes:,} bytes, in {1 + self._state_slots} slots of a page's size"
            raise ValueError(f"a spill file needs at least {least}, got {max_bytes:,}")
        self._arena = arena
        self._state_memory = state_memory
        self._clock = clock
        self._buffer = np.empty(self._page_bytes, np.uint8)  # the page being copied
        self._bytes = self._buffer.data
        self._checksums = array("I")  # one per slot that was ever used: the memory grows with the file
        self._free: list[int] = []  # slots that were used before
        self._resume_at = clock()
        self._write_s = self._page_bytes / WRITE_BYTES_PER_S  # per slot
        self._read_s = self._page_bytes / READ_BYTES_PER_S
        self._file = _open_nameless(Path(directory))

    @property
    def num_free(self) -> int:
        """Slots that hold neither a page nor a part of a state."""
        return self.num_slots - len(self._checksums) + len(self._free)

    def save(self, page_ids: Sequence[int], state: int = NO_STATE) -> list[int] | None:
        parts = self._parts(state)
        if len(page_ids) + len(parts) > self.num_free or self._clock() < self._resume_at:
            return None
        slots = [self._take_slot() for _ in range(len(page_ids) + len(parts))]
        start = self._clock()
        try:
            for slot, page in zip(slots, page_ids, strict=False):
                self._write(slot, page)
            for slot, part in zip(slots[len(page_ids) :], parts, strict=True):
                self._put(slot, part)
        except OSError:
            self.free(slots)
            self._pause()
            return None
        self._write_s = self._smoothed(self._write_s, start, len(slots))
        return slots

    def load(self, slots: Sequence[int], page_ids: Sequence[int], state: int = NO_STATE) -> bool:
        start = self._clock()
        try:
            for slot, page in zip(slots, page_ids, strict=False):
                self._read(slot, page)
            for slot, part in zip(slots[len(page_ids) :], self._parts(state), strict=True):
                self._get(slot, part)
        except OSError:
            self._pause()
            return False
        self._read_s = self._smoothed(self._read_s, start, len(slots))
        return True

    def free(self, slots: Sequence[int]) -> None:
        self._free.extend(reversed(slots))

    def seconds(self, num_pages: int, num_states: int = 0) -> float | None:
        num_slots = num_pages + num_states * self._state_slots
        if num_slots > self.num_free or self._clock() < self._resume_at:
            return None
        return num_slots * (self._write_s + self._read_s)

    def close(self) -> None:
        """Close the file. Later calls of `save` and `load` fail. Idempotent."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _take_slot(self) -> int:
        """Return a slot that was used before, which keeps the file short, or else the next one of the file."""
        if self._free:
            return self._free.pop()
        self._checksums.append(0)
        return len(self._checksums) - 1

    def _parts(self, state: int) -> list[memoryview]:
        """Return the memory of a state in parts of a page's size, the last of which may be shorter."""
        if state == NO_STATE:
            return []
        memory = self._state_memory[state].data
        return [memory[start : start + self._page_bytes] for start in range(0, len(memory), self._page_bytes)]

    def _write(self, slot: int, page: int) -> None:
        self._arena.read_page(page, self._buffer)
        self._put(slot, self._bytes)

    def _read(self, slot: int, page: int) -> None:
        self._get(slot, self._bytes)
        self._arena.write_page(page, self._buffer)

    def _put(self, slot: int, data: memoryview) -> None:
        self._checksums[slot] = crc32(data)
        if os.pwrite(self._file, data, slot * self._page_bytes) != len(data):
            raise OSError(errno.ENOSPC, "short write")

    def _get(self, slot: int, data: memoryview) -> None:
        if os.preadv(self._file, [data], slot * self._page_bytes) != len(data):
            raise OSError(errno.EIO, "short read")
        if crc32(data) != self._checksums[slot]:
            raise OSError(errno.EIO, "wrong checksum")

    def _pause(self) -> None:
        self._resume_at = self._clock() + PAUSE_S

    def _smoothed(self, seconds: float, start: float, num_slots: int) -> float:
        if num_slots == 0:
            return seconds
        return seconds + SPEED_WEIGHT * ((self._clock() - start) / num_slots - seconds)


def _open_nameless(directory: Path) -> int:
    """Open a file without a name; where the system has no O_TMPFILE, create one and unlink it immediately."""
    if hasattr(os, "O_TMPFILE"):
        with suppress(OSError):
            return os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        file, name = tempfile.mkstemp(prefix="quire-spill-", dir=directory)
        os.unlink(name)
    except OSError as error:
        raise SpillUnavailable(f"cannot create a spill file in {directory} ({error.strerror})") from error
    return file
