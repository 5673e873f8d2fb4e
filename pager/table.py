"""The pages of one sequence, in order: one page table per layer group, as the kernels read them.

Must not import requests or anything about memory layout beyond page sizes. A table holds one reference on each page it
lists. It lists exactly the pages that `num_tokens` tokens fill, except the pages that left a sliding group's window.

A table writes only to pages that no other table lists and that the prefix cache does not index. Full pages never change
and are shared freely. A partial last page that is shared or indexed is copied before the next token is written to it.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeVar

from .layout import TILE, first_kept_token
from .pool import PagePool
from .states import NO_STATE, NoStates, StatePool

CopyPage = Callable[[int, int], None]  # (source page, destination page), all layers
NULL_PAGE = -1  # stands for a page that left its group's window and was released


class ImageSpan(Protocol):
    """Consecutive tokens that stand for an image: a page that has some of them depends on the image, too."""

    @property
    def position(self) -> int:
        """The first of the tokens, counted from the start of the sequence."""

    @property
    def tokens(self) -> int:
        """The number of tokens."""

    @property
    def digest(self) -> bytes:
        """The sha256 of the image."""


SpanT = TypeVar("SpanT", bound=ImageSpan)


def images_between(images: Sequence[SpanT], first: int, end: int) -> tuple[SpanT, ...]:
    """Return the images that some of the tokens from position `first` to `end` stand for."""
    return tuple([image for image in images if image.position < end and image.position + image.tokens > first])


class PageTable:
    """`pages[group]` is an array of C ints, which the model runner reads without a copy (`numpy.frombuffer`).

    While such a view exists, the table must not grow or shrink. `num_tokens` counts slots in use: tokens that are
    computed, and tokens that the step being planned will compute.
    """

    __slots__ = (
        "_copy_page",
        "_num_null",
        "_page_size",
        "_pool",
        "_shortest",
        "_state_start",
        "_states",
        "_windows",
        "_writable",
        "commit_at",
        "images",
        "keys",
        "message_end",
        "moving_state",
        "num_known",
        "num_tokens",
        "pages",
        "reserved",
        "root",
        "shared_end",
        "state",
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
        images: Sequence[ImageSpan],
        states: StatePool | NoStates,
    ) -> None:
        """Take over the caller's reference on each of `pages`, of which the first `len(keys)` are indexed."""
        self._pool = pool
        self._page_size = page_size
        self._windows = windows
        self._copy_page = copy_page
        self._num_null = [each.count(NULL_PAGE) for each in pages]  # leading null pages, per group
        self._shortest = 0  # smallest length for `rollback`; below it the window would include released pages
        self._states = states
        self._state_start = 0  # smallest length above 0 for `rollback` that the state serves
        self._writable = (
            num_tokens  # slots up to here need no check; if above num_tokens, the last page and the state are private
        )
        self.root = root  # start of the chain of prefix keys
        self.images = images  # images of the sequence; prefix keys depend on them
        self.keys = list(keys)  # prefix keys of the leading pages, as far as they are indexed
        self.pages = [array("i", each) for each in pages]  # [groups][pages]
        self.num_tokens = num_tokens
        self.state = NO_STATE  # slot of the sequence's state
        self.num_known = 0  # tokens that were known when the table was opened
        self.shared_end = 0  # tokens that the prefix cache had when the table was opened
        self.message_end = 0  # last end of a page within the first message
        self.moving_state = b""  # key of the kept state that the sequence's next one replaces
        self.reserved = 0  # pages of the pool that are reserved for this table
        self.commit_at = 0  # fewest tokens for which `Pager.commit` has something to do

    @property
    def num_committed(self) -> int:
        """Leading pages that the prefix cache indexes."""
        return len(self.keys)

    @property
    def num_pages(self) -> int:
        """Listed pages, over all groups."""
        return len(self.pages) * len(self.pages[0]) - sum(self._num_null)

    def append(self, num_tokens: int) -> None:
        """Add slots for `num_tokens` more tokens, using the reservation first. Raises OutOfPages, changing nothing."""
        end = self.num_tokens + num_tokens
        if end > self._writable:
            self._extend(end)
        elif num_tokens < 0:
            raise ValueError(f"cannot append {num_tokens} tokens; rollback removes tokens")
        self.num_tokens = end

    def pages_needed(self, num_tokens: int) -> int:
        """Return how many pages `append(num_tokens)` allocates, copies of shared last pages included."""
        if num_tokens <= 0:
            return 0
        return self._pages_added(self.num_tokens + num_tokens) * len(self.pages) + len(self._shared_last())

    def max_append(self) -> int:
        """Return the most tokens that `append` accepts now."""
        pages = self._pool.num_available + self.reserved - len(self._shared_last())
        if pages < 0:
            return 0
        return (len(self.pages[0]) + pages // len(self.pages)) * self._page_size - self.num_tokens

    def reserve(self, num_pages: int) -> None:
        """Set the reservation: pages that only this table can allocate, and that its growth uses up first.

        Replaces the previous value; 0 clears it. Raises OutOfPages, changing nothing.
        """
        if num_pages < 0:
            raise ValueError(f"cannot reserve {num_pages} pages")
        self._pool.reserve(num_pages - self.reserved)
        self.reserved = num_pages

    def fork(self) -> PageTable:
        """Return a second table over the same pages. Costs no page until one of the two writes."""
        self._pool.retain(listed_pages(self.pages))
        twin = PageTable(
            self._pool,
            self._page_size,
            self._windows,
            self._copy_page,
            self.root,
            self.pages,
            self.keys,
            self.num_tokens,
            self.images,
            self._states,
        )
        self._states.share(self.state)
        twin.state = self.state
        twin._state_start = self._state_start
        twin.num_known = self.num_known
        twin._num_null = self._num_null[:]
        twin._shortest = self._shortest
        twin.commit_at = self.commit_at
        self._writable = self.num_tokens
        return twin

    def pages_kept(self, num_tokens: int) -> list[array[int]]:
        """Return the pages that a rollback to `num_tokens` tokens and a commit would leave.

        Raises ValueError where `rollback` would.
        """
        self._check_length(num_tokens)
        filled = -(-num_tokens // self._page_size)
        kept = [pages[:filled] for pages in self.pages]
        for pages, window in zip(kept, self._windows, strict=True):
            first = first_kept_token(num_tokens, window) // self._page_size
            pages[:first] = array("i", [NULL_PAGE]) * first
        return kept

    def can_roll_back(self, num_tokens: int) -> bool:
        """Return whether `rollback` accepts `num_tokens`.

        The pages in the next row's windows must still be held, and the state must not be too far ahead.
        """
        return self._shortest <= num_tokens <= self.num_tokens and self.has_state(num_tokens)

    def rollback(self, num_tokens: int) -> None:
        """Keep the first `num_tokens` tokens and release the pages that held only later ones.

        Raises ValueError if the table has fewer tokens, has released pages that the shorter sequence needs, or has a
        state that is too far ahead.
        """
        self._check_length(num_tokens)
        self._state_start = max(self._state_start, self.num_tokens - self._states.rollback) if num_tokens else 0
        self.withdraw(num_tokens)

    def withdraw(self, num_tokens: int) -> None:
        """Keep the first `num_tokens` tokens, of which there are no fewer, where no step has computed the others."""
        kept = -(-num_tokens // self._page_size)
        if kept < len(self.pages[0]):
            dropped = listed_pages(pages[kept:] for pages in self.pages)
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
        """Release every page and the reservation. Indexed pages stay in the prefix cache until they are evicted.

        The table is empty afterwards; a second call does nothing.
        """
        pages = self.pages
        self.pages = [array("i") for _ in self._windows]
        self._pool.release(listed_pages(pages))
        self._states.release(self.state)
        self.state = NO_STATE
        self.reserve(0)
        self._num_null = [0] * len(pages)
        self.num_tokens = self._shortest = self._state_start = self._writable = self.commit_at = 0
        self.keys = []

    def slide(self) -> None:
        """Release the pages that left their group's window, and set `commit_at`. All tokens must be computed."""
        size = self._page_size
        self.commit_at = (self.num_tokens // size + 1) * size
        for group, window in enumerate(self._windows):
            if window:
                kept = first_kept_token(self.num_tokens, window)
                self.commit_at = min(self.commit_at, kept + TILE + window - 1)
                if kept // size > self._num_null[group]:
                    self._release_leading(group, kept // size)
                if kept:
                    self._shortest = max(self._shortest, kept + window - 1)

    def keep_state(self) -> None:
        """Note that the state has all tokens: a later step takes it too far for a shorter `rollback` than by one."""
        self._state_start = max(self._state_start, self.num_tokens - 1)

    def continue_from(self, state: int) -> None:
        """Take over the caller's reference on a state that can serve the sequence from its present length on."""
        self.state = state
        self._state_start = self.num_tokens

    def share_state(self) -> int:
        """Return the slot of the state, with a reference: the table copies it before the next token is written."""
        self._states.share(self.state)
        self._writable = self.num_tokens
        return self.state

    def has_state(self, num_tokens: int) -> bool:
        """Return whether the state can serve the sequence from this length on."""
        ahead = self.num_tokens - num_tokens
        return num_tokens == 0 or (num_tokens >= self._state_start and ahead <= self._states.rollback)

    def substitute(self, group: int, index: int, page: int) -> None:
        """Replace the unshared page at `index` by `page`, which holds the same content."""
        self._pool.retain((page,))
        self._pool.release((self.pages[group][index],))
        self.pages[group][index] = page

    def _check_length(self, num_tokens: int) -> None:
        if not 0 <= num_tokens <= self.num_tokens:
            raise ValueError(f"cannot roll back to {num_tokens} tokens, the table holds {self.num_tokens}")
        if num_tokens < self._shortest:
            raise ValueError(f"cannot roll back to {num_tokens} tokens, earlier pages left their window")
        if not self.has_state(num_tokens):
            raise ValueError(f"cannot roll back to {num_tokens} tokens, the state is at {self.num_tokens}")

    def _release_leading(self, group: int, end: int) -> None:
        pages = self.pages[group]
        begin = self._num_null[group]
        self._pool.release(pages[begin:end][::-1])  # oldest first, as if they were released one at a time
        pages[begin:end] = array("i", [NULL_PAGE]) * (end - begin)
        self._num_null[group] = end

    def _pages_added(self, num_tokens: int) -> int:
        """Return how many pages each group lacks for `num_tokens` tokens in total."""
        return -(-num_tokens // self._page_size) - len(self.pages[0])

    def _shared_last(self) -> list[int]:
        """Return the groups whose partial last page must be copied before it is written."""
        if self.num_tokens % self._page_size == 0:
            return []
        return [group for group, pages in enumerate(self.pages) if not self._pool.is_private(pages[-1])]

    def _extend(self, num_tokens: int) -> None:
        shared = self._shared_last()
        num_groups = len(self.pages)
        count = self._pages_added(num_tokens) * num_groups + len(shared)
        fresh = self._pool.allocate(count, self.reserved)
        self.reserved -= min(count, self.reserved)
        self.state = self._states.own(self.state)
        for group in shared:
            self._copy_last(group, fresh.pop(0))
        for group, pages in enumerate(self.pages):
            pages.extend(fresh[group::num_groups])
        self._writable = len(self.pages[0]) * self._page_size

    def _copy_last(self, group: int, page: int) -> None:
        shared = self.pages[group][-1]
        if self._copy_page is not None:
            self._copy_page(shared, page)
        self.pages[group][-1] = page
        self._pool.release((shared,))


def listed_pages(tables: Iterable[Sequence[int]]) -> list[int]:
    """Return the page ids of parallel page tables, ordered by position, then group, which is the release order."""
    return [page for row in zip(*tables, strict=True) for page in row if page != NULL_PAGE]
