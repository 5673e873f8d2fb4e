"""The door of the pager: the named operations through which a scheduler gets, shares and returns pages.

Integers and token ids in, page ids out; it must not know requests, asyncio or kernels. The one invariant: each
operation either fully happens or raises before touching anything, so the books (`invariants.check`) balance between
any two.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from .layout import first_kept_token, pages_held
from .pool import PagePool
from .prefix import Hit, PrefixCache, root_key
from .spill import PageStore, Spilled
from .table import NULL_PAGE, CopyPage, PageTable, check_reservation, listed


class Pager:
    """Pages of `page_size` tokens for many sequences.

    Each layer group has a page table of its own, all from one pool; `windows` has each group's attention window in
    tokens, 0 for a full group. `copy_page(source, destination)` copies a page's memory when a shared one is about to be
    written; None where there is no memory, as in simulation. `store` takes pages that are spilled; None: none can be.
    """

    def __init__(
        self,
        page_size: int,
        num_pages: int,
        *,
        windows: Sequence[int] = (0,),
        copy_page: CopyPage | None = None,
        enable_prefix_caching: bool = True,
        store: PageStore | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if page_size < 1:
            raise ValueError(f"a page holds at least 1 token, got {page_size}")
        if not windows or min(windows) < 0:
            raise ValueError(f"every layer group has a window of 0 (full) or more tokens, got {windows}")
        self.page_size = page_size
        self.windows = tuple(windows)
        self.pool = PagePool(num_pages, len(windows), clock)
        self.prefix = PrefixCache(self.pool, page_size, self.windows) if enable_prefix_caching else None
        self.prefix_queried_tokens = 0  # by every successful `open`
        self.prefix_hit_tokens = 0
        self.num_spilled = 0  # pages in the store
        self.spilled_pages_total = 0
        self.restored_pages_total = 0  # read back, not those found in the prefix cache
        self._copy_page = copy_page
        self._store = store
        self._handles: set[Spilled] = set()

    def open(
        self, token_ids: Sequence[int], tenant_salt: bytes = b"", spare_pages: int | None = None, reserve: int = 0
    ) -> tuple[PageTable, int]:
        """A table for a sequence that starts with `token_ids`, and how many of them the prefix cache already holds.

        At least the last token is left to compute. With `spare_pages`, raises OutOfPages, changing nothing, unless all
        the rest of `token_ids` could be allocated now and leave `spare_pages` to others. Without, it raises OutOfPages
        only where the cached pages themselves, or those to `reserve` (see there), are reserved by others.
        """
        check_reservation(reserve)
        root = root_key(tenant_salt)
        hit = self._match(root, token_ids, (len(token_ids) - 1) // self.page_size)
        cached = self._num_unowned(hit.page_ids())
        growth = 0 if spare_pages is None else self._pages_taken(len(token_ids), hit) - cached
        self.pool.require(cached + max(growth, reserve) + (spare_pages or 0))
        self.pool.retain(hit.page_ids())
        table = self._table(root, hit, len(hit.keys) * self.page_size)
        table.slide()
        table.reserve(reserve)
        if self.prefix:
            self.prefix_queried_tokens += len(token_ids)
            self.prefix_hit_tokens += table.num_tokens
        return table, table.num_tokens

    def grow(self, table: PageTable, num_tokens: int) -> None:
        """Take slots for `num_tokens` more tokens, from the table's reservation first. Raises OutOfPages."""
        table.append(num_tokens)

    def fork(self, table: PageTable) -> PageTable:
        """A second table that continues the same tokens; pages are copied when one of the two writes."""
        return table.fork()

    def can_roll_back(self, table: PageTable, num_tokens: int) -> bool:
        """Whether `rollback` would accept it."""
        return table.can_roll_back(num_tokens)

    def rollback(self, table: PageTable, num_tokens: int) -> None:
        """Forget all but the first `num_tokens` tokens.

        Raises ValueError if a sliding group has already given back what the shorter sequence needs.
        """
        table.rollback(num_tokens)

    def release(self, table: PageTable) -> None:
        """Give back every page and the reservation; indexed pages stay findable until their memory is needed."""
        table.release()

    def commit(self, table: PageTable, token_ids: Sequence[int]) -> None:
        """All `table.num_tokens` tokens have been computed; `token_ids` starts with them. Lets later sequences find
        the full pages, and gives back those that left their group's window. Costs nothing unless either has changed.
        """
        if table.num_tokens < table.commit_at:
            return
        if len(token_ids) < table.num_tokens:
            raise ValueError(f"the table holds {table.num_tokens} tokens, only {len(token_ids)} were named")
        if self.prefix:
            self.prefix.index(table, token_ids)
        table.slide()

    def reserve(self, table: PageTable, num_pages: int) -> None:
        """Set the table's reservation: pages that nobody else can allocate and that its own growth uses up first.

        Absolute: 0 clears it, nothing but this refills it. Raises OutOfPages, changing nothing.
        """
        table.reserve(num_pages)

    def spill_seconds(self, num_pages: int) -> float | None:
        """Predicted time to spill and restore so many pages; None if they cannot be spilled now."""
        return self._store.seconds(num_pages) if self._store else None

    def spill(self, table: PageTable, num_tokens: int) -> Spilled | None:
        """Write the first `num_tokens` tokens, all computed, to the store, and release the table.

        None if there is no store, no room in it or the disk fails; then nothing has changed. Raises ValueError where
        `rollback` to `num_tokens` would.
        """
        pages = table.pages_kept(num_tokens)
        slots = self._store.save(listed(pages)) if self._store else None
        if slots is None:
            return None
        left = iter(slots)
        spilled = Spilled(
            num_tokens,
            tuple(tuple(page if page == NULL_PAGE else next(left) for page in row) for row in zip(*pages, strict=True)),
        )
        self._handles.add(spilled)
        self.num_spilled += len(slots)
        self.spilled_pages_total += len(slots)
        table.release()
        return spilled

    def restore(
        self,
        spilled: Spilled,
        token_ids: Sequence[int],
        tenant_salt: bytes = b"",
        spare_pages: int = 0,
        reserve: int = 0,
    ) -> PageTable | None:
        """A table that holds what was spilled, committed; the handle is used up. `token_ids` starts with its tokens.

        Pages found in the prefix cache are taken from there, the others are read back. Raises OutOfPages, changing
        nothing, unless all could be allocated now, `reserve` more be reserved, and `spare_pages` be left to others.
        None: what was stored is damaged or unreadable, the handle is discarded; compute the tokens again.
        """
        check_reservation(reserve)
        if spilled not in self._handles or self._store is None:
            raise ValueError("this handle is used up, or another pager's")
        if len(token_ids) < spilled.num_tokens:
            raise ValueError(f"{spilled.num_tokens} tokens were spilled, only {len(token_ids)} were named")
        root = root_key(tenant_salt)
        pages, missing = self._find_spilled(spilled, root, token_ids)
        found = listed(pages)
        self.pool.require(len(missing) + self._num_unowned(found) + reserve + spare_pages)
        self.pool.retain(found)
        fresh = self.pool.allocate(len(missing))
        for (depth, group), page in zip(missing, fresh, strict=True):
            pages[group][depth] = page
        intact = self._store.load([spilled.slots[depth][group] for depth, group in missing], fresh)
        self.discard(spilled)
        if not intact:
            self.pool.release(listed(pages))
            return None
        self.restored_pages_total += len(missing)
        table = self._table(root, Hit([], pages), spilled.num_tokens)
        table.reserve(reserve)
        self.commit(table, token_ids)
        return table

    def discard(self, spilled: Spilled) -> None:
        """Forget what was spilled; its room in the store can be used again. Idempotent."""
        if spilled in self._handles and self._store is not None:
            self._handles.remove(spilled)
            self.num_spilled -= spilled.num_pages
            self._store.free(spilled.used())

    def pin(self, token_ids: Sequence[int], tenant_salt: bytes, until: float) -> int:
        """Keep what the prefix cache holds of this prefix until then, in seconds of the clock. Returns the tokens kept.

        Pinned pages without owner are evicted only when no others are left, so a pin is a wish and not a reservation.
        """
        hit = self._match(root_key(tenant_salt), token_ids, len(token_ids) // self.page_size)
        self.pool.pin(hit.page_ids(), until)
        return len(hit.keys) * self.page_size

    def pages_for(self, num_tokens: int) -> int:
        """The most pages that one sequence of `num_tokens` tokens holds at once, committed after every token."""
        return pages_held(num_tokens, self.page_size, self.windows)

    def pages_needed(self, table: PageTable, num_tokens: int) -> int:
        """Pages that growing by `num_tokens` would allocate."""
        return table.pages_needed(num_tokens)

    @property
    def num_pages(self) -> int:
        return self.pool.num_pages

    @property
    def num_free(self) -> int:
        """Pages with neither owner nor content."""
        return self.pool.num_free

    @property
    def num_cached(self) -> int:
        """Pages without owner whose content can still be found; evicted when needed."""
        return self.pool.num_cached

    @property
    def num_owned(self) -> int:
        return self.pool.num_owned

    @property
    def num_reserved(self) -> int:
        """Free or cached pages that are kept for the tables that reserved them."""
        return self.pool.num_reserved

    @property
    def num_pinned(self) -> int:
        """Indexed pages, owned or cached, that a pin keeps now."""
        return self.pool.num_pinned

    @property
    def num_available(self) -> int:
        """Pages that could be allocated now without a reservation: free or cached, less those reserved."""
        return self.pool.num_available

    def _match(self, root: bytes, token_ids: Sequence[int], limit: int) -> Hit:
        return self.prefix.match(root, token_ids, limit) if self.prefix else Hit([], [[] for _ in self.windows])

    def _find_spilled(
        self, spilled: Spilled, root: bytes, token_ids: Sequence[int]
    ) -> tuple[list[list[int]], list[tuple[int, int]]]:
        """Page tables with what the prefix cache holds of it, and the (depth, group) of pages it does not hold."""
        full = spilled.num_tokens // self.page_size
        hit = self.prefix.find(root, token_ids, full) if self.prefix else Hit([], [])
        pages = [[NULL_PAGE] * len(spilled.slots) for _ in self.windows]
        missing = []
        for depth, row in enumerate(spilled.slots):
            for group, slot in enumerate(row):
                if slot != NULL_PAGE:
                    if depth < len(hit.keys):
                        pages[group][depth] = hit.pages[group][depth]
                    if pages[group][depth] == NULL_PAGE:
                        missing.append((depth, group))
        return pages, missing

    def _num_unowned(self, page_ids: Sequence[int]) -> int:
        return sum(1 for page in page_ids if self.pool.references(page) == 0)

    def _table(self, root: bytes, hit: Hit, num_tokens: int) -> PageTable:
        return PageTable(
            self.pool, self.page_size, self.windows, self._copy_page, root, hit.pages, hit.keys, num_tokens
        )

    def _pages_taken(self, num_tokens: int, hit: Hit) -> int:
        """Available pages that a sequence of `num_tokens` uses up at most: a hit that someone owns costs nothing while
        it is in its group's window.
        """
        shared = 0
        for window, pages in zip(self.windows, hit.pages, strict=True):
            kept = pages[first_kept_token(num_tokens, window) // self.page_size :]
            shared += sum(1 for page in kept if page >= 0 and self.pool.references(page))
        return self.pages_for(num_tokens) - shared
