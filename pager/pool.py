"""Which pages are owned, which are free, and which free ones still hold content worth keeping.

Page ids and opaque content only: it must not know sequences, what content means, or memory. The one invariant: every
page is in exactly one of three places, *free* (no owner, no content), *cached* (no owner, content indexed by its key)
or *owned* (one or more references), so `num_free + num_cached + num_owned == num_pages`.

Allocation order is fixed, and the tests spell it out:

1. free pages, least recently freed first; a new pool counts as freed in ascending order;
2. then cached pages, least recently released first, each losing its content: those that are pinned after all others.

`release` gives pages back tail first, so of one sequence the tail is evicted before the head. Whoever owns a page of a
prefix owns the pages before it too, hence a page is never evicted before the pages that continue it: leaf-first.

A pin keeps content until a time. It is soft, because memory that nobody can have is worth less than content that may
be asked for again; and it never outlives the pins of the pages before, so among pinned pages, too, leaves go first.
When it expires, the page counts as released just then.

Pages without owner may be reserved, by number and not by id: `num_reserved` of them are kept for whoever reserved them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from .exceptions import OutOfPages, PagerError


class Content(NamedTuple):
    """What a full page holds. With its group, `key` identifies it among all pages of all time, as far as sha256 can."""

    key: bytes
    parent: bytes  # what the key continues: key of the page before it, or the root of its chain
    depth: int  # pages before it
    group: int  # of layers
    token_ids: bytes  # encoded; compared on a hit, so that a hash collision is a miss


class Pin(NamedTuple):
    """Ordered by when it expires: of equal ones, the leaf's first."""

    until: float
    order: int


class PagePool:
    """Reference counts and three intrusive circular lists over page ids. Every operation is O(pages named in it), times
    the logarithm of the pins for those that pin.
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
        self._expiries: list[tuple[Pin, int]] = []  # a heap; pins renewed or gone are skipped
        self._num_pins = 0  # ever made

    @property
    def num_available(self) -> int:
        """Pages that `allocate` could hand out now to somebody without a reservation."""
        return self.num_free + self.num_cached - self.num_reserved

    @property
    def num_owned(self) -> int:
        return self.num_pages - self.num_free - self.num_cached

    @property
    def num_pinned(self) -> int:
        """Pages, owned or cached, whose content a pin keeps now."""
        self._expire_pins()
        return len(self._pins)

    def require(self, count: int, reserved: int = 0) -> None:
        """Raise OutOfPages unless somebody with this reservation could have `count` pages."""
        available = self.num_available + reserved
        if count > available:
            raise OutOfPages(count, available)

    def allocate(self, count: int, reserved: int = 0) -> list[int]:
        """`count` pages in allocation order, with one reference each and no content. Raises OutOfPages.

        The caller holds a reservation of `reserved` pages; it is used up first.
        """
        self.require(count, reserved)
        self.num_reserved -= min(count, reserved)
        return [self._take() for _ in range(count)]

    def reserve(self, count: int) -> None:
        """Keep `count` more pages for the caller, or, if negative, so many fewer. Raises OutOfPages."""
        self.require(count)
        self.num_reserved += count

    def retain(self, page_ids: Iterable[int]) -> None:
        """One more reference on each. The pages must be owned or cached."""
        for page in page_ids:
            if self._references[page] == 0:
                self._unlink(page)
                self.num_cached -= 1
            self._references[page] += 1

    def release(self, page_ids: Sequence[int]) -> None:
        """One reference less on each, in reverse order: pass a sequence's pages head first. The pages must be owned."""
        for page in reversed(page_ids):
            self._references[page] -= 1
            if self._references[page] == 0:
                self._park(page)

    def is_private(self, page: int) -> bool:
        """Whether its only owner may write to it: nobody else reads it and no key promises its content."""
        return self._references[page] == 1 and self._contents[page] is None

    def label(self, page: int, content: Content) -> None:
        """Index an owned page by its content. A page has one content for as long as it is owned, a key one page."""
        index = self._page_by_key[content.group]
        if self._contents[page] is not None or content.key in index:
            raise PagerError(f"page {page} or its content is already indexed")
        self._contents[page] = content
        index[content.key] = page

    def pin(self, page_ids: Sequence[int], until: float) -> None:
        """Keep the content of these indexed pages until then; pass a whole prefix, head first. Shortens no pin."""
        for page in reversed(page_ids):
            previous = self._pins.get(page)
            pin = Pin(max(until, previous.until) if previous else until, self._num_pins)
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
        """The page indexed by this key. Finding it does not keep it: `retain` does."""
        return self._page_by_key[group].get(key)

    def content(self, page: int) -> Content | None:
        return self._contents[page]

    def references(self, page: int) -> int:
        return self._references[page]

    def free_pages(self) -> Iterator[int]:
        """In allocation order."""
        return self._walk(self._free)

    def cached_pages(self) -> Iterator[int]:
        """In eviction order."""
        self._expire_pins()
        yield from self._walk(self._cached)
        yield from self._walk(self._pinned)

    def pinned_pages(self) -> Iterator[int]:
        """Those that are cached, in eviction order."""
        self._expire_pins()
        return self._walk(self._pinned)

    def pins(self) -> dict[int, float]:
        """A copy: until when each pinned page is kept."""
        self._expire_pins()
        return {page: pin.until for page, pin in self._pins.items()}

    def indexed_pages(self, group: int = 0) -> dict[bytes, int]:
        """A copy of a group's index: key to page."""
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
            self._pins.pop(page, None)

    def _expire_pins(self) -> None:
        while self._expiries and self._expiries[0][0].until <= self._clock():
            pin, page = heappop(self._expiries)
            if self._pins.get(page) == pin:
                del self._pins[page]
                if self._references[page] == 0:
                    self._unlink(page)
                    self._link_last(self._cached, page)

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
