"""One sequence's pages, in order: the page table that kernels walk.

It must not know what the tokens are, who asked for them or where the bytes lie. The one invariant: it holds one
reference on each page it lists, and lists exactly the pages that `num_tokens` tokens fill.

A table writes only to pages that are its own alone. Full pages are shared freely, they never change; a partial last
page that a fork shares, or whose content the prefix cache promises, is copied just before the next token goes into it.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

from .pool import PagePool

CopyPage = Callable[[int, int], None]  # (source page, destination page), all layers


class PageTable:
    """`page_ids` is an array of C ints, so an executor reads it with no copy (`numpy.frombuffer`); while such a view
    lives, the table must not grow or shrink. `num_tokens` counts reserved slots: tokens computed or about to be.
    """

    __slots__ = ("_copy_page", "_page_size", "_pool", "num_published", "num_tokens", "page_ids", "root")

    def __init__(
        self, pool: PagePool, page_size: int, copy_page: CopyPage | None, root: bytes, page_ids: Sequence[int] = ()
    ) -> None:
        """Takes over the caller's reference on each of `page_ids`: full, published pages found in the prefix cache."""
        self._pool = pool
        self._page_size = page_size
        self._copy_page = copy_page
        self.root = root  # what the chain of content keys starts from
        self.page_ids = array("i", page_ids)
        self.num_tokens = len(page_ids) * page_size
        self.num_published = len(page_ids)  # leading pages that the prefix cache indexes

    def append(self, num_tokens: int) -> None:
        """Reserve slots for `num_tokens` more tokens. Raises OutOfPages, changing nothing."""
        needed = self.pages_needed(num_tokens)
        if needed:
            self._extend(needed)
        self.num_tokens += num_tokens

    def pages_needed(self, num_tokens: int) -> int:
        """Pages that appending `num_tokens` tokens allocates, a copy of a shared last page included."""
        if num_tokens <= 0:
            if num_tokens < 0:
                raise ValueError(f"cannot append {num_tokens} tokens; rollback takes tokens away")
            return 0
        filled = -(-(self.num_tokens + num_tokens) // self._page_size)
        return filled - len(self.page_ids) + self._must_copy_last()

    def room(self) -> int:
        """The most tokens that `append` would take now."""
        pages = self._pool.num_available - self._must_copy_last()
        if pages < 0:
            return 0
        return (len(self.page_ids) + pages) * self._page_size - self.num_tokens

    def would_overflow(self, num_tokens: int) -> bool:
        """Whether appending `num_tokens` tokens would raise OutOfPages."""
        return num_tokens > self.room()

    def fork(self) -> PageTable:
        """A second table over the same pages. Costs no page until one of the two writes."""
        twin = PageTable(self._pool, self._page_size, self._copy_page, self.root)
        self._pool.retain(self.page_ids)
        twin.page_ids = self.page_ids[:]
        twin.num_tokens = self.num_tokens
        twin.num_published = self.num_published
        return twin

    def rollback(self, num_tokens: int) -> None:
        """Keep the first `num_tokens` tokens and give back the pages that held only later ones."""
        if not 0 <= num_tokens <= self.num_tokens:
            raise ValueError(f"cannot roll back to {num_tokens} tokens, the table holds {self.num_tokens}")
        kept = -(-num_tokens // self._page_size)
        dropped = self.page_ids[kept:]
        del self.page_ids[kept:]
        self._pool.release(dropped)
        self.num_tokens = num_tokens
        self.num_published = min(self.num_published, num_tokens // self._page_size)

    def release(self) -> None:
        """Give back every page. The table is then empty; releasing it again does nothing."""
        page_ids, self.page_ids = self.page_ids, array("i")
        self._pool.release(page_ids)
        self.num_tokens = 0
        self.num_published = 0

    def substitute(self, index: int, page: int) -> None:
        """List `page`, which holds the same content, in place of the page at `index`."""
        self._pool.retain((page,))
        self._pool.release((self.page_ids[index],))
        self.page_ids[index] = page

    def _must_copy_last(self) -> bool:
        return self.num_tokens % self._page_size != 0 and not self._pool.is_private(self.page_ids[-1])

    def _extend(self, needed: int) -> None:
        copies = self._must_copy_last()
        pages = self._pool.allocate(needed)
        if copies:
            self._move_last(pages.pop(0))
        self.page_ids.extend(pages)

    def _move_last(self, page: int) -> None:
        shared = self.page_ids[-1]
        if self._copy_page is not None:
            self._copy_page(shared, page)
        self.page_ids[-1] = page
        self._pool.release((shared,))
