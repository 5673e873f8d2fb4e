"""The page pool: reference counts, the free list, and unowned pages whose content can still be found.

Works on page ids and opaque content; must not import tables or anything about memory. Every page is in exactly one of
three states: *free* (no owner, no content), *cached* (no owner, content indexed by its key) or *owned* (one or more
references), so `num_free + num_cached + num_owned == num_pages`.

Allocation order is fixed:

1. free pages, least recently freed first; the pages of a new pool in ascending order;
2. then cached pages, least recently released first, each losing its content. Pinned pages come after all others.

`release` returns a sequence's pages tail first, so the tail is evicted before the head. A table that holds a page of a
prefix holds the pages before it too, so a page is never evicted before the pages that continue it: leaf first.

A pin protects content until a time, but not absolutely: if only pinned pages are left, they are evicted. A pin never
outlives the pins of the pages before it, so pinned pages are evicted leaf first too. When a pin expires, the page
counts as released at that moment.

Unowned pages can be reserved, by number and not by id: `num_reserved` of them can only be allocated by the tables that
reserved them.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from .exceptions import OutOfPages, PagerError


class Content(NamedTuple):
    """The content of a full page. `key` and `group` identify it, unless sha256 collides."""

    key: bytes
    parent: bytes  # key of the page before it, or the root of its chain
    depth: int  # pages before it
    group: int  # layer group
    token_ids: bytes  # encoded; compared on a hit, so a hash collision is a miss
    images: bytes = b""  # digest of the images that some of the tokens stand for; empty: none do


class Pin(NamedTuple):
    """A pin, ordered by expiry; pins that expire together are ordered leaf first."""

    until: float
    order: int
    holder: bytes  # root of the page's chain, so of its tenant


class PagePool:
    """Reference counts and three intrusive circular lists over page ids.

    Every operation is O(number of given pages); `pin` has an additional factor log(number of pins).
    """

    def __init__(self, num_pages: int, num_groups: int = 1, clock: Callable[[], float] = time.monotonic) -> None:
        if num_pages < 1:
            raise ValueError(f"a pool needs at least 1 page, got {num_pages}")
        self.num_pages = num_pages
        self.num_free = num_pages
        self.num_cached = 0
        self.num_reserved = 0
        self._references = [0] * num_pages
        self._contents: list[Content | None] = [None] * num_pages
        self._page_by_key: tuple[dict[bytes, int], ...] = tuple({} for _ in range(num_groups))
        self._free = num_pages  # list heads: three ids past the last page
        self._cached = num_pages + 1
        self._pinned = num_pages + 2
        self._next: list[int] = [*range(1, num_pages + 1), 0, self._cached, self._pinned]
        self._previous: list[int] = [num_pages, *range(num_pages), self._cached, self._pinned]
        self._clock = clock
        self._pins: dict[int, Pin] = {}
        self._expiries: list[tuple[Pin, int]] = []  # a heap; entries of renewed or removed pins are skipped
        self._num_pins = 0  # number of the next pin
        self._num_held: Counter[bytes] = Counter()  # pinned pages by holder
        self.on_index: list[Callable[[Content], None]] = []  # called when a page can be found by its content
        self.on_evict: list[Callable[[Content], None]] = []  # called when it no longer can

    @property
    def num_available(self) -> int:
        """Pages that can be allocated now without a reservation: free or cached, minus the reserved ones."""
        return self.num_free + self.num_cached - self.num_reserved

    @property
    def num_owned(self) -> int:
        return self.num_pages - self.num_free - self.num_cached

    @property
    def num_pinned(self) -> int:
        """Pages, owned or cached, that have a pin."""
        self._expire_pins()
        return len(self._pins)

    def num_pinned_by(self, holder: bytes) -> int:
        """Return the number of pages, owned or cached, that have a pin of this holder."""
        self._expire_pins()
        return self._num_held[holder]

    def is_pinned(self, page: int) -> bool:
        return page in self._pins

    def require(self, count: int, reserved: int = 0) -> None:
        """Raise OutOfPages unless a caller with `reserved` reserved pages can allocate `count` pages."""
        available = self.num_available + reserved
        if count > available:
            raise OutOfPages(count, available)

    def allocate(self, count: int, reserved: int = 0) -> list[int]:
        """Return `count` pages in allocation order, with one reference each and no content. Raises OutOfPages.

        The caller has reserved `reserved` pages; these are used up first.
        """
        self.require(count, reserved)
        self.num_reserved -= min(count, reserved)
        return [self._take() for _ in range(count)]

    def reserve(self, count: int) -> None:
        """Reserve `count` more pages, or fewer if `count` is negative. Raises OutOfPages."""
        self.require(count)
        self.num_reserved += count

    def retain(self, page_ids: Iterable[int]) -> None:
        """Add a reference to each page. The pages must be owned or cached."""
        for page in page_ids:
            if self._references[page] == 0:
                self._unlink(page)
                self.num_cached -= 1
            self._references[page] += 1

    def release(self, page_ids: Sequence[int]) -> None:
        """Drop a reference to each page, last page first. The pages must be owned; pass a sequence head first."""
        for page in reversed(page_ids):
            self._references[page] -= 1
            if self._references[page] == 0:
                self._park(page)

    def is_private(self, page: int) -> bool:
        """Return whether the page has one owner and no indexed content, so the owner may write to it."""
        return self._references[page] == 1 and self._contents[page] is None

    def label(self, page: int, content: Content) -> None:
        """Index an owned page by its content. A page keeps its content while it is owned; a key has one page."""
        index = self._page_by_key[content.group]
        if self._contents[page] is not None or content.key in index:
            raise PagerError(f"page {page} or its content is already indexed")
        self._contents[page] = content
        index[content.key] = page
        for listener in self.on_index:
            listener(content)

    def pin(self, page_ids: Sequence[int], until: float, holder: bytes = b"") -> None:
        """Pin these indexed pages until `until`. Pass a whole prefix, head first. A later pin is never shortened.

        `holder` must be the same for all pins of a page.
        """
        for page in reversed(page_ids):
            previous = self._pins.get(page)
            pin = Pin(max(until, previous.until) if previous else until, self._num_pins, holder)
            self._num_held[holder] += previous is None
            self._num_pins += 1
            self._pins[page] = pin
            heappush(self._expiries, (pin, page))
            if self._references[page] == 0:
                self._unlink(page)
                self._link_last(self._pinned, page)
        if len(self._expiries) > 2 * len(self._pins):
            self._expiries = [(pin, page) for page, pin in self._pins.items()]
            heapify(self._expiries)

    def find(self, key: bytes, group: int = 0) -> int | None:
        """Return the page indexed by this key, without retaining it."""
        return self._page_by_key[group].get(key)

    def content(self, page: int) -> Content | None:
        return self._contents[page]

    def references(self, page: int) -> int:
        return self._references[page]

    def free_pages(self) -> Iterator[int]:
        """Iterate over the free pages in allocation order."""
        return self._walk(self._free)

    def cached_pages(self) -> Iterator[int]:
        """Iterate over the cached pages in eviction order."""
        self._expire_pins()
        yield from self._walk(self._cached)
        yield from self._walk(self._pinned)

    def pinned_pages(self) -> Iterator[int]:
        """Iterate over the cached pages with a pin in eviction order."""
        self._expire_pins()
        return self._walk(self._pinned)

    def pins(self) -> dict[int, float]:
        """Return a copy of the pins: page -> expiry."""
        self._expire_pins()
        return {page: pin.until for page, pin in self._pins.items()}

    def indexed_pages(self, group: int = 0) -> dict[bytes, int]:
        """Return a copy of a group's index: key -> page."""
        return dict(self._page_by_key[group])

    def _take(self) -> int:
        if self.num_free:
            page = self._next[self._free]
            self.num_free -= 1
        else:
            self._expire_pins()
            page = self._next[self._cached]
            if page == self._cached:
                page = self._next[self._pinned]
            self.num_cached -= 1
            self._forget(page)
        self._unlink(page)
        self._references[page] = 1
        return page

    def _forget(self, page: int) -> None:
        content = self._contents[page]
        if content is not None:
            del self._page_by_key[content.group][content.key]
            self._contents[page] = None
            if page in self._pins:
                self._unpin(page)
            for listener in self.on_evict:
                listener(content)

    def _expire_pins(self) -> None:
        while self._expiries and self._expiries[0][0].until <= self._clock():
            pin, page = heappop(self._expiries)
            if self._pins.get(page) == pin:
                self._unpin(page)
                if self._references[page] == 0:
                    self._unlink(page)
                    self._link_last(self._cached, page)

    def _unpin(self, page: int) -> None:
        holder = self._pins.pop(page).holder
        self._num_held[holder] -= 1
        if not self._num_held[holder]:
            del self._num_held[holder]

    def _park(self, page: int) -> None:
        if self._contents[page] is None:
            self._link_last(self._free, page)
            self.num_free += 1
        else:
            self._link_last(self._pinned if page in self._pins else self._cached, page)
            self.num_cached += 1

    def _link_last(self, head: int, page: int) -> None:
        last = self._previous[head]
        self._next[last] = self._previous[head] = page
        self._previous[page] = last
        self._next[page] = head

    def _unlink(self, page: int) -> None:
        before, after = self._previous[page], self._next[page]
        self._next[before] = after
        self._previous[after] = before

    def _walk(self, head: int) -> Iterator[int]:
        page = self._next[head]
        while page != head:
            yield page
            page = self._next[page]
