"""Helpers of the pager's tests: pages of 4 tokens, and a memory that a pager's pages stand for."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from quire.pager import Pager, PageTable

PAGE_SIZE = 4


class Cells:
    """What a kernel would do: write a token into its slot of its page, and read a sequence back by its table."""

    def __init__(self, num_pages: int) -> None:
        self.pages: list[list[int | None]] = [[None] * PAGE_SIZE for _ in range(num_pages)]
        self.copies: list[tuple[int, int]] = []

    def copy_page(self, source: int, destination: int) -> None:
        self.copies.append((source, destination))
        self.pages[destination] = list(self.pages[source])

    def write(self, table: PageTable, first: int, token_ids: list[int]) -> None:
        for position, token in enumerate(token_ids, first):
            self.pages[table.page_ids[position // PAGE_SIZE]][position % PAGE_SIZE] = token

    def read(self, table: PageTable) -> list[int | None]:
        slots = [slot for page in table.page_ids for slot in self.pages[page]]
        return slots[: table.num_tokens]


class World:
    """A pager over cells, and the operations in the order a scheduler and an executor do them."""

    def __init__(self, num_pages: int, enable_prefix_caching: bool = True) -> None:
        self.cells = Cells(num_pages)
        self.pager = Pager(PAGE_SIZE, num_pages, self.cells.copy_page, enable_prefix_caching)

    def compute(self, token_ids: list[int], salt: bytes = b"") -> tuple[PageTable, int]:
        """Open, grow, write and publish: a whole prompt in one step."""
        table, cached = self.pager.open(token_ids, salt)
        self.extend(table, token_ids[cached:])
        self.pager.publish(table, token_ids)
        return table, cached

    def extend(self, table: PageTable, token_ids: list[int]) -> None:
        first = table.num_tokens
        self.pager.grow(table, len(token_ids))
        self.cells.write(table, first, token_ids)


@pytest.fixture
def make_world() -> Callable[..., World]:
    return World
