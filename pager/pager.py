"""The pager: opens page tables over a shared pool, and commits, spills, restores and pins their pages.

Takes token ids and returns page tables; must not import the scheduler, asyncio or kernels. Every operation either
happens completely or raises before it has changed anything, so `invariants.check` holds between any two.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Container, Sequence

from .layout import first_kept_token, pages_held
from .pool import PagePool
from .prefix import PrefixCache, PrefixHit, root_key
from .spill import PageStore, Spilled
from .state_cache import NoStateCache, StateCache
from .states import NO_STATE, NoStates, StatePool
from .table import NULL_PAGE, CopyPage, ImageSpan, PageTable, listed_pages

STATE_INTERVAL = 512  # tokens of a long prompt between two states that are kept: a chunk of prefill ends at each


class Pager:
    """Page tables for many sequences, with pages of `page_size` tokens from one pool.

    Each layer group has its own table; `windows` holds each group's attention window in tokens, 0 for full attention.
    `copy_page(source, destination)` copies a page's memory before a shared page is written; None where there is no
    memory, as in a simulation. `store` takes spilled pages and states; None switches spilling off. `states` are the
    slots of a model with states, of which the prefix cache keeps `num_cached_states`: without one, there is no prefix
    cache. It keeps one every `state_interval` tokens of a prompt and where a prompt's first message ends with one of
    the tokens `message_ends`.
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
        states: StatePool | None = None,
        num_cached_states: int = 0,
        state_interval: int = STATE_INTERVAL,
        message_ends: Collection[int] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if page_size < 1:
            raise ValueError(f"page_size must be at least 1 token, got {page_size}")
        if not windows or min(windows) < 0:
            raise ValueError(f"every layer group needs a window of 0 (full attention) or more tokens, got {windows}")
        self.page_size = page_size
        self.windows = tuple(windows)
        self.pool = PagePool(num_pages, len(windows), clock)
        self.states: StatePool | NoStates = states or NoStates()
        has_prefix = enable_prefix_caching and (states is None or num_cached_states > 0)
        self.prefix = PrefixCache(self.pool, page_size, self.windows) if has_prefix else None
        self.cached_states: StateCache | NoStateCache = NoStateCache()
        if states is not None and has_prefix:
            self.cached_states = StateCache(
                states, self.pool, page_size, num_cached_states, state_interval, message_ends
            )
        self.prefix_queried_tokens = 0  # prompt tokens of every `open` that succeeded
        self.prefix_hit_tokens = 0
        self.stateless_tokens = 0  # prompt tokens whose pages were found, behind the last state that was found
        self.num_spilled = 0  # pages in the store
        self.num_spilled_states = 0  # states in the store
        self._copy_page = copy_page
        self._store = store
        self._handles: set[Spilled] = set()

    def open(
        self,
        token_ids: Sequence[int],
        tenant_salt: bytes = b"",
        spare_pages: int | None = None,
        images: Sequence[ImageSpan] = (),
    ) -> PageTable:
        """Return a table that holds the longest cached prefix of `token_ids`, always without the last token.

        `images` are the images that some of the tokens stand for, in order: a cached page has the same ones.
        With `spare_pages`, raises OutOfPages unless the pool could also supply the remaining tokens and `spare_pages`
        pages for others. Without it, raises OutOfPages only if other tables have reserved the cached pages themselves.
        """
        root = root_key(tenant_salt)
        hit = self._match(root, token_ids, (len(token_ids) - 1) // self.page_size, images, self.cached_states)
        needed = self._num_unowned(hit.page_ids())
        if spare_pages is not None:
            needed = max(needed, self._pages_taken(len(token_ids), hit)) + spare_pages
        self.pool.require(needed)
        self.pool.retain(hit.page_ids())
        table = self._table(root, hit, len(hit.keys) * self.page_size, images)
        table.shared_end = hit.num_shared * self.page_size
        table.num_known = len(token_ids)
        table.message_end = self.cached_states.first_message_end(token_ids)
        if hit.keys:
            self.cached_states.continue_from(hit.keys[-1], table)
        table.slide()
        if self.prefix:
            self.prefix_queried_tokens += len(token_ids)
            self.prefix_hit_tokens += table.num_tokens
            self.stateless_tokens += table.shared_end - table.num_tokens
        return table

    def commit(self, table: PageTable, token_ids: Sequence[int]) -> None:
        """Record that all tokens of `table` are computed; `token_ids` starts with them.

        Adds the full pages to the prefix cache and releases the pages that left their group's window. Returns
        immediately if neither has changed.
        """
        is_due = table.num_tokens >= table.commit_at
        full = table.num_tokens // self.page_size
        is_kept = is_due and full > 0 and table.has_state(full * self.page_size)
        if self.states.num_slots:
            table.keep_state()
        if not is_due:
            return
        if len(token_ids) < table.num_tokens:
            raise ValueError(f"the table holds {table.num_tokens} tokens, token_ids has only {len(token_ids)}")
        if self.prefix:
            self.prefix.index(table, token_ids)
            if is_kept and table.num_committed == full:
                self.cached_states.keep(table)
        table.slide()

    def next_end(self, table: PageTable, first: int, num_known: int) -> int:
        """Return where a chunk of prefill should end that begins at token `first` of `num_known` known tokens."""
        return self.cached_states.next_end(table, first, num_known)

    def spill_seconds(self, num_pages: int) -> float | None:
        """Return the predicted seconds to spill and restore a sequence; None if the store cannot take it."""
        return self._store.seconds(num_pages, 1 if self.states.num_slots else 0) if self._store else None

    def spill(self, table: PageTable, num_tokens: int) -> Spilled | None:
        """Write the first `num_tokens` tokens, all computed, and their state to the store, and release the table.

        Returns a handle, or None, changing nothing, if there is no store, the store is full or the disk fails. Raises
        ValueError where `table.rollback(num_tokens)` would.
        """
        pages = table.pages_kept(num_tokens)
        page_ids = listed_pages(pages)
        state = table.state if num_tokens else NO_STATE
        slots = self._store.save(page_ids, state) if self._store else None
        if slots is None:
            return None
        remaining = iter(slots)
        spilled = Spilled(
            num_tokens,
            tuple(
                tuple(page if page == NULL_PAGE else next(remaining) for page in row)
                for row in zip(*pages, strict=True)
            ),
            tuple(remaining),
        )
        self._handles.add(spilled)
        self.num_spilled += len(page_ids)
        self.num_spilled_states += state != NO_STATE
        table.release()
        return spilled

    def restore(
        self,
        spilled: Spilled,
        token_ids: Sequence[int],
        tenant_salt: bytes = b"",
        spare_pages: int = 0,
        images: Sequence[ImageSpan] = (),
    ) -> PageTable | None:
        """Return a committed table with the spilled tokens, which `token_ids` starts with, and use up the handle.

        Takes pages that the prefix cache still holds from there, and reads the others and the state back. Raises
        OutOfPages or OutOfStates, changing nothing, unless all can be allocated and `spare_pages` stay available.
        Returns None if stored bytes cannot be read or are damaged: the handle is discarded and the tokens must be
        computed again.
        """
        if spilled not in self._handles or self._store is None:
            raise ValueError("this handle is used up or belongs to another pager")
        if len(token_ids) < spilled.num_tokens:
            raise ValueError(f"{spilled.num_tokens} tokens were spilled, token_ids has only {len(token_ids)}")
        root = root_key(tenant_salt)
        pages, missing = self._find_spilled(spilled, root, token_ids, images)
        found = listed_pages(pages)
        self.pool.require(len(missing) + self._num_unowned(found) + spare_pages)
        state = self.states.own(NO_STATE) if spilled.state_slots else NO_STATE
        self.pool.retain(found)
        fresh = self.pool.allocate(len(missing))
        for (depth, group), page in zip(missing, fresh, strict=True):
            pages[group][depth] = page
        slots = [spilled.slots[depth][group] for depth, group in missing]
        intact = self._store.load([*slots, *spilled.state_slots], fresh, state)
        self.discard(spilled)
        if not intact:
            self.pool.release(listed_pages(pages))
            self.states.release(state)
            return None
        table = self._table(root, PrefixHit([], pages), spilled.num_tokens, images)
        table.num_known = len(token_ids)
        table.message_end = self.cached_states.first_message_end(token_ids)
        if state != NO_STATE:
            table.continue_from(state)
        self.commit(table, token_ids)
        return table

    def discard(self, spilled: Spilled) -> None:
        """Free the store's slots of a handle. A second call does nothing."""
        if spilled in self._handles and self._store is not None:
            self._handles.remove(spilled)
            self.num_spilled -= spilled.num_pages
            self.num_spilled_states -= bool(spilled.state_slots)
            self._store.free(spilled.used_slots())

    def pin(self, token_ids: Sequence[int], tenant_salt: bytes, until: float, images: Sequence[ImageSpan] = ()) -> int:
        """Pin the cached pages of this prefix until `until`, in seconds of the clock. Return the number of tokens.

        Pinned pages are evicted after all others, so a pin is a preference and not a reservation.
        """
        root = root_key(tenant_salt)
        hit = self._match(root, token_ids, len(token_ids) // self.page_size, images)
        self.pool.pin(hit.page_ids(), until, root)
        return len(hit.keys) * self.page_size

    def pages_to_pin(
        self, token_ids: Sequence[int], tenant_salt: bytes, images: Sequence[ImageSpan] = ()
    ) -> tuple[int, int]:
        """Return how many pages `pin` would pin that are not pinned yet, and how many the tenant has pinned."""
        root = root_key(tenant_salt)
        num_pages = len(token_ids) // self.page_size
        pinned = self.pool.num_pinned_by(root)
        known = sum(map(self.pool.is_pinned, self._match(root, token_ids, num_pages, images).page_ids()))
        firsts = (first_kept_token(num_pages * self.page_size, window) // self.page_size for window in self.windows)
        return sum(num_pages - first for first in firsts) - known, pinned

    def pages_for(self, num_tokens: int) -> int:
        """Return the most pages that a sequence of `num_tokens` tokens holds at once, committed after each token."""
        return pages_held(num_tokens, self.page_size, self.windows)

    def _match(
        self,
        root: bytes,
        token_ids: Sequence[int],
        limit: int,
        images: Sequence[ImageSpan],
        ends: Container[object] | None = None,
    ) -> PrefixHit:
        if self.prefix is None:
            return PrefixHit([], [[] for _ in self.windows])
        return self.prefix.match(root, token_ids, limit, images, ends)

    def _find_spilled(
        self, spilled: Spilled, root: bytes, token_ids: Sequence[int], images: Sequence[ImageSpan]
    ) -> tuple[list[list[int]], list[tuple[int, int]]]:
        """Return page tables with the pages that are still cached, and the (depth, group) of each missing page."""
        full = spilled.num_tokens // self.page_size
        hit = self.prefix.find(root, token_ids, full, images) if self.prefix else PrefixHit([], [])
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

    def _table(self, root: bytes, hit: PrefixHit, num_tokens: int, images: Sequence[ImageSpan]) -> PageTable:
        return PageTable(
            self.pool,
            self.page_size,
            self.windows,
            self._copy_page,
            root,
            hit.pages,
            hit.keys,
            num_tokens,
            images,
            self.states,
        )

    def _pages_taken(self, num_tokens: int, hit: PrefixHit) -> int:
        """Return how many available pages a sequence of `num_tokens` uses up at most.

        A cached page that another table owns costs nothing as long as it is inside its group's window.
        """
        shared = 0
        for window, pages in zip(self.windows, hit.pages, strict=True):
            kept = pages[first_kept_token(num_tokens, window) // self.page_size :]
            shared += sum(1 for page in kept if page >= 0 and self.pool.references(page))
        return self.pages_for(num_tokens) - shared
