"""Helpers of the pager's tests: pages of 4 tokens, and a memory that a pager's pages stand for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from quire.pager import Pager, PageTable, layout
from quire.pager import table as page_table

PAGE_SIZE = 4
TILE = 8  # in tests of windows, so that short sequences slide
Slot = tuple[int, int]  # (layer group, token)


class Cells:
    """What a kernel would do: write a token into its slot of each group's page, read a sequence back by its table."""

    def __init__(self, num_pages: int) -> None:
        self.pages: list[list[Slot | None]] = [[None] * PAGE_SIZE for _ in range(num_pages)]
        self.copies: list[tuple[int, int]] = []

    def copy_page(self, source: int, destination: int) -> None:
        self.copies.append((source, destination))
        self.pages[destination] = list(self.pages[source])

    def write(self, table: PageTable, first: int, token_ids: list[int]) -> None:
        for group, pages in enumerate(table.pages):
            for position, token in enumerate(token_ids, first):
                self.pages[pages[position // PAGE_SIZE]][position % PAGE_SIZE] = (group, token)

    def read(self, table: PageTable, group: int = 0, first: int = 0) -> list[int | None]:
        """The tokens from `first` on; None where another group wrote, or nobody."""
        slots = [slot for page in table.pages[group][first // PAGE_SIZE :] for slot in self.pages[page]]
        tokens = [slot[1] if slot is not None and slot[0] == group else None for slot in slots]
        return tokens[first % PAGE_SIZE : first % PAGE_SIZE + table.num_tokens - first]


class CellStore:
    """A PageStore of so many pages that knows two tricks: to be full, and to find everything damaged."""

    def __init__(self, cells: Cells, num_slots: int) -> None:
        self._cells = cells
        self._slots: dict[int, list[Slot | None]] = {}
        self._num_slots = num_slots
        self.damaged = False

    @property
    def num_used(self) -> int:
        return len(self._slots)

    def save(self, page_ids: Sequence[int]) -> list[int] | None:
        if self.seconds(len(page_ids)) is None:
            return None
        slots = [slot for slot in range(self._num_slots) if slot not in self._slots][: len(page_ids)]
        self._slots.update({slot: self._cells.pages[page][:] for slot, page in zip(slots, page_ids, strict=True)})
        return slots

    def load(self, slots: Sequence[int], page_ids: Sequence[int]) -> bool:
        if self.damaged:
            return False
        for slot, page in zip(slots, page_ids, strict=True):
            self._cells.pages[page] = self._slots[slot][:]
        return True

    def free(self, slots: Sequence[int]) -> None:
        for slot in slots:
            del self._slots[slot]

    def seconds(self, num_pages: int) -> float | None:
        return float(num_pages) if num_pages <= self._num_slots - len(self._slots) else None


class World:
    """A pager over cells, and the operations in the order a scheduler and an executor do them."""

    def __init__(
        self, num_pages: int, windows: Sequence[int] = (0,), store_pages: int | None = None, **options: Any
    ) -> None:
        self.now = 0.0
        self.cells = Cells(num_pages)
        self.store = CellStore(self.cells, store_pages) if store_pages is not None else None
        self.pager = Pager(
            PAGE_SIZE,
            num_pages,
            windows=windows,
            copy_page=self.cells.copy_page,
            store=self.store,
            clock=lambda: self.now,
            **options,
        )

    def compute(self, token_ids: list[int], salt: bytes = b"") -> tuple[PageTable, int]:
        """Open, grow, write and commit: a whole prompt in one step."""
        table = self.pager.open(token_ids, salt)
        cached = table.num_tokens
        self.extend(table, token_ids[cached:])
        self.pager.commit(table, token_ids)
        return table, cached

    def extend(self, table: PageTable, token_ids: list[int]) -> None:
        first = table.num_tokens
        table.append(len(token_ids))
        self.cells.write(table, first, token_ids)


@pytest.fixture
def make_world() -> Callable[..., World]:
    return World


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "TILE", TILE)
    monkeypatch.setattr(page_table, "TILE", TILE)
