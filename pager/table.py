"""One sequence's pages, in order: the page tables that kernels walk, one per layer group.

It must not know what the tokens are, who asked for them or where the bytes lie. The one invariant: it holds one
reference on each page it lists, and lists exactly the pages that `num_tokens` tokens fill, less those that a sliding
group has given back.

A table writes only to pages that are its own alone. Full pages are shared freely, they never change; a partial last
page that a fork shares, or whose content the prefix cache promises, is copied just before the next token goes into it.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence

from .layout import TILE, first_kept_token
from .pool import PagePool

CopyPage = Callable[[int, int], None]  # (source page, destination page), all layers
NULL_PAGE = -1  # in the place of a page that left its window; released already


class PageTable:
    """`pages[group]` is an array of C ints, so an executor reads it with no copy (`numpy.frombuffer`); while such a
    view lives, the table must not grow or shrink. `num_tokens` counts taken slots: tokens computed or about to be.
    """

    __slots__ = (
        "_copy_page",
        "_given_back",
        "_page_size",
        "_pool",
        "_shortest",
        "_windows",
        "_writable",
        "commit_at",
        "keys",
        "num_tokens",
        "pages",
        "reserved",
        "root",
    )

    def __init__(
        self,
        pool: PagePool,
        page_size: int,
        windows: tuple[int, ...],
        copy_page: CopyPage | None,
        root: bytes,
        pages: Sequence[Sequence[int]],
        keys: Sequence[bytes],
        num_tokens: int,
    ) -> None:
        """Takes over the caller's reference on each of `pages`, the first `len(keys)` of which are indexed."""
        self._pool = pool
        self._page_size = page_size
        self._windows = windows
        self._copy_page = copy_page
        self._given_back = [each.count(NULL_PAGE) for each in pages]  # leading pages, per group
        self._shortest = 0  # tokens that it can be rolled back to: before, a window would see what was given back
        self._writable = num_tokens  # slots below need no look at the pages: beyond num_tokens, the last one is private
        self.root = root  # what the chain of content keys starts from
        self.keys = list(keys)  # of the leading pages that the prefix cache indexes
        self.pages = [array("i", each) for each in pages]  # [groups][pages]
        self.num_tokens = num_tokens
        self.reserved = 0  # pages kept for this table alone
        self.commit_at = 0  # with fewer tokens, `Pager.commit` has nothing to do

    @property
    def num_committed(self) -> int:
        """Leading pages that the prefix cache indexes."""
        return len(self.keys)

    @property
    def num_pages(self) -> int:
        """Pages that it lists, over all groups."""
        return len(self.pages) * len(self.pages[0]) - sum(self._given_back)

    def append(self, num_tokens: int) -> None:
        """Take slots for `num_tokens` more tokens. Raises OutOfPages, changing nothing."""
        end = self.num_tokens + num_tokens
        if end > self._writable:
            self._extend(end)
        elif num_tokens < 0:
            raise ValueError(f"cannot append {num_tokens} tokens; rollback takes tokens away")
        self.num_tokens = end

    def pages_needed(self, num_tokens: int) -> int:
        """Pages that appending `num_tokens` tokens allocates, copies of shared last pages included."""
        if num_tokens <= 0:
            return 0
        return self._pages_added(self.num_tokens + num_tokens) * len(self.pages) + len(self._shared_last())

    def room(self) -> int:
        """The most tokens that `append` would take now."""
        pages = self._pool.num_available + self.reserved - len(self._shared_last())
        if pages < 0:
            return 0
        return (len(self.pages[0]) + pages // len(self.pages)) * self._page_size - self.num_tokens

    def would_overflow(self, num_tokens: int) -> bool:
        """Whether appending `num_tokens` tokens would raise OutOfPages."""
        return num_tokens > self.room()

    def reserve(self, num_pages: int) -> None:
        """Have `num_pages` pages kept for this table's growth. Raises OutOfPages, changing nothing."""
        check_reservation(num_pages)
        self._pool.reserve(num_pages - self.reserved)
        self.reserved = num_pages

    def fork(self) -> PageTable:
        """A second table over the same pages. Costs no page until one of the two writes."""
        self._pool.retain(listed(self.pages))
        twin = PageTable(
            self._pool,
            self._page_size,
            self._windows,
            self._copy_page,
            self.root,
            self.pages,
            self.keys,
            self.num_tokens,
        )
        twin._given_back = self._given_back[:]
        twin._shortest = self._shortest
        twin.commit_at = self.commit_at
        self._writable = self.num_tokens
        return twin

    def pages_kept(self, num_tokens: int) -> list[array[int]]:
        """Return the pages after a rollback to `num_tokens` tokens and a commit. Raises ValueError like `rollback`."""
        self._check_length(num_tokens)
        filled = -(-num_tokens // self._page_size)
        kept = [pages[:filled] for pages in self.pages]
        for pages, window in zip(kept, self._windows, strict=True):
            first = first_kept_token(num_tokens, window) // self._page_size
            pages[:first] = array("i", [NULL_PAGE]) * first
        return kept

    def can_roll_back(self, num_tokens: int) -> bool:
        """Whether the table has so many tokens, and every sliding group still has what the next row would see."""
        return self._shortest <= num_tokens <= self.num_tokens

    def rollback(self, num_tokens: int) -> None:
        """Keep the first `num_tokens` tokens and give back the pages that held only later ones."""
        self._check_length(num_tokens)
        kept = -(-num_tokens // self._page_size)
        if kept < len(self.pages[0]):
            dropped = listed(pages[kept:] for pages in self.pages)
            for pages in self.pages:
                del pages[kept:]
            self._pool.release(dropped)
            self._writable = num_tokens
        elif self._writable == self.num_tokens:
            self._writable = num_tokens
        self.num_tokens = num_tokens
        if num_tokens // self._page_size < len(self.keys):
            del self.keys[num_tokens // self._page_size :]
            self.commit_at = 0

    def release(self) -> None:
        """Give back every page and the reservation. The table is then empty; releasing it again does nothing."""
        pages, self.pages = self.pages, [array("i") for _ in self._windows]
        self._pool.release(listed(pages))
        self.reserve(0)
        self._given_back = [0] * len(pages)
        self.num_tokens = self._shortest = self._writable = self.commit_at = 0
        self.keys = []

    def slide(self) -> None:
        """All tokens are computed: give back what left its group's window, and note when there is more to commit."""
        size = self._page_size
        self.commit_at = (self.num_tokens // size + 1) * size
        for group, window in enumerate(self._windows):
            if window:
                kept = first_kept_token(self.num_tokens, window)
                self.commit_at = min(self.commit_at, kept + TILE + window - 1)
                if kept // size > self._given_back[group]:
                    self._give_back(group, kept // size)
                if kept:
                    self._shortest = max(self._shortest, kept + window - 1)

    def substitute(self, group: int, index: int, page: int) -> None:
        """List `page`, which holds the same content, in place of the page at `index`, which nobody shares."""
        self._pool.retain((page,))
        self._pool.release((self.pages[group][index],))
        self.pages[group][index] = page

    def _check_length(self, num_tokens: int) -> None:
        if not 0 <= num_tokens <= self.num_tokens:
            raise ValueError(f"cannot roll back to {num_tokens} tokens, the table holds {self.num_tokens}")
        if num_tokens < self._shortest:
            raise ValueError(f"cannot roll back to {num_tokens} tokens, pages before them left their window")

    def _give_back(self, group: int, end: int) -> None:
        pages, begin = self.pages[group], self._given_back[group]
        self._pool.release(pages[begin:end][::-1])  # the oldest goes first, as when giving back one at a time
        pages[begin:end] = array("i", [NULL_PAGE]) * (end - begin)
        self._given_back[group] = end

    def _pages_added(self, num_tokens: int) -> int:
        """Pages per group that are missing for `num_tokens` tokens in all."""
        return -(-num_tokens // self._page_size) - len(self.pages[0])

    def _shared_last(self) -> list[int]:
        """Groups whose partial last page must be copied before it is written."""
        if self.num_tokens % self._page_size == 0:
            return []
        return [group for group, pages in enumerate(self.pages) if not self._pool.is_private(pages[-1])]

    def _extend(self, num_tokens: int) -> None:
        shared = self._shared_last()
        num_groups = len(self.pages)
        count = self._pages_added(num_tokens) * num_groups + len(shared)
        fresh = self._pool.allocate(count, self.reserved)
        self.reserved -= min(count, self.reserved)
        for group in shared:
            self._move_last(group, fresh.pop(0))
        for group, pages in enumerate(self.pages):
            pages.extend(fresh[group::num_groups])
        self._writable = len(self.pages[0]) * self._page_size

    def _move_last(self, group: int, page: int) -> None:
        shared = self.pages[group][-1]
        if self._copy_page is not None:
            self._copy_page(shared, page)
        self.pages[group][-1] = page
        self._pool.release((shared,))


def check_reservation(num_pages: int) -> None:
    if num_pages < 0:
        raise ValueError(f"cannot reserve {num_pages} pages")


def listed(tables: Iterable[Sequence[int]]) -> list[int]:
    """Page ids of parallel page tables, the heads of all groups first: in an order to release them."""
    return [page for row in zip(*tables, strict=True) for page in row if page != NULL_PAGE]
