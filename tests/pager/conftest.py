"""A pager with pages of 4 tokens, fake memory behind them, and a clock that tests set."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import pytest
from quire.pager import Pager, PageTable, layout
from quire.pager import table as page_table

PAGE_SIZE = 4
TILE = 8  # tile in tests of windows, so that short sequences release pages
Slot = tuple[int, int]  # (layer group, token)


class FakePageMemory:
    """Memory of token ids, written and read through page tables as a kernel does."""

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
        """Return the tokens from `first` on; None for slots that this group did not write."""
        slots = [slot for page in table.pages[group][first // PAGE_SIZE :] for slot in self.pages[page]]
        tokens = [slot[1] if slot is not None and slot[0] == group else None for slot in slots]
        return tokens[first % PAGE_SIZE : first % PAGE_SIZE + table.num_tokens - first]


class FakeStates(Protocol):
    """The memory of states."""

    of: list[list[int]]  # content of each slot


class FakePageStore:
    """A PageStore of `num_slots` slots, of which a state takes `state_slots`; nothing loads if `damaged` is set."""

    def __init__(
        self, memory: FakePageMemory, num_slots: int, states: FakeStates | None = None, state_slots: int = 0
    ) -> None:
        self._memory = memory
        self._slots: dict[int, list[Any]] = {}
        self._num_slots = num_slots
        self._states = states
        self._state_slots = state_slots
        self.damaged = False
        self.num_loaded = 0  # slots

    @property
    def num_used(self) -> int:
        return len(self._slots)

    def save(self, page_ids: Sequence[int], state: int) -> list[int] | None:
        contents: list[list[Any]] = [self._memory.pages[page][:] for page in page_ids]
        if state >= 0:
            assert self._states is not None
            contents += [self._states.of[state][part :: self._state_slots] for part in range(self._state_slots)]
        slots = [slot for slot in range(self._num_slots) if slot not in self._slots][: len(contents)]
        if len(slots) < len(contents):
            return None
        self._slots.update(zip(slots, contents, strict=True))
        return slots

    def load(self, slots: Sequence[int], page_ids: Sequence[int], state: int) -> bool:
        if self.damaged:
            return False
        for slot, page in zip(slots, page_ids, strict=False):
            self._memory.pages[page] = self._slots[slot][:]
        if state >= 0:
            assert self._states is not None
            parts = [self._slots[slot] for slot in slots[len(page_ids) :]]
            whole: list[int] = [0] * sum(map(len, parts))
            for number, part in enumerate(parts):
                whole[number :: self._state_slots] = part
            self._states.of[state] = whole
        self.num_loaded += len(slots)
        return True

    def free(self, slots: Sequence[int]) -> None:
        for slot in slots:
            del self._slots[slot]

    def seconds(self, num_pages: int, num_states: int) -> float | None:
        num_slots = num_pages + num_states * self._state_slots
        return float(num_slots) if num_slots <= self._num_slots - len(self._slots) else None


class PagerHarness:
    """A pager over fake memory, with helpers that compute tokens as a scheduler and a model runner do."""

    def __init__(
        self, num_pages: int, windows: Sequence[int] = (0,), store_pages: int | None = None, **options: Any
    ) -> None:
        self.now = 0.0
        self.memory = FakePageMemory(num_pages)
        self.store = FakePageStore(self.memory, store_pages) if store_pages is not None else None
        self.pager = Pager(
            PAGE_SIZE,
            num_pages,
            windows=windows,
            copy_page=self.memory.copy_page,
            store=self.store,
            clock=lambda: self.now,
            **options,
        )

    def compute(self, token_ids: list[int], salt: bytes = b"") -> tuple[PageTable, int]:
        """Compute a whole prompt in one step. Return its table and the number of cached tokens."""
        table = self.pager.open(token_ids, salt)
        cached = table.num_tokens
        self.extend(table, token_ids[cached:])
        self.pager.commit(table, token_ids)
        return table, cached

    def extend(self, table: PageTable, token_ids: list[int]) -> None:
        first = table.num_tokens
        table.append(len(token_ids))
        self.memory.write(table, first, token_ids)


MakeHarness = Callable[..., PagerHarness]


@pytest.fixture
def make_harness() -> MakeHarness:
    return PagerHarness


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "TILE", TILE)
    monkeypatch.setattr(page_table, "TILE", TILE)
