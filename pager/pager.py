"""The door of the pager: the named operations through which a scheduler gets, shares and returns pages.

Integers and token ids in, page ids out; it must not know requests, asyncio or kernels. The one invariant: each
operation either fully happens or raises before touching anything, so the books (`invariants.check`) balance between
any two.
"""

from __future__ import annotations

from collections.abc import Sequence

from .errors import OutOfPages
from .pool import PagePool
from .prefix import PrefixCache, root_key
from .table import CopyPage, PageTable


class Pager:
    """Pages of `page_size` tokens for many sequences.

    `copy_page(source, destination)` copies a page's memory when a shared one is about to be written; None where there
    is no memory, as in simulation.
    """

    def __init__(
        self,
        page_size: int,
        num_pages: int,
        copy_page: CopyPage | None = None,
        enable_prefix_caching: bool = True,
    ) -> None:
        if page_size < 1:
            raise ValueError(f"a page holds at least 1 token, got {page_size}")
        self.page_size = page_size
        self.pool = PagePool(num_pages)
        self.prefix = PrefixCache(self.pool, page_size) if enable_prefix_caching else None
        self.prefix_queried_tokens = 0  # by every successful `open`
        self.prefix_hit_tokens = 0
        self._copy_page = copy_page

    def open(
        self, token_ids: Sequence[int], tenant_salt: bytes = b"", spare_pages: int | None = None
    ) -> tuple[PageTable, int]:
        """A table for a sequence that starts with `token_ids`, and how many of them the prefix cache already holds.

        At least the last token is left to compute. With `spare_pages`, raises OutOfPages, changing nothing, unless all
        the rest of `token_ids` and `spare_pages` more pages could be allocated now.
        """
        root = root_key(tenant_salt)
        hits = self.prefix.match(root, token_ids) if self.prefix else []
        if spare_pages is not None:
            self._require(self._pages_taken(token_ids, hits) + spare_pages)
        self.pool.retain(hits)
        table = PageTable(self.pool, self.page_size, self._copy_page, root, hits)
        if self.prefix:
            self.prefix_queried_tokens += len(token_ids)
            self.prefix_hit_tokens += table.num_tokens
        return table, table.num_tokens

    def grow(self, table: PageTable, num_tokens: int) -> None:
        """Reserve slots for `num_tokens` more tokens. Raises OutOfPages."""
        table.append(num_tokens)

    def fork(self, table: PageTable) -> PageTable:
        """A second table that continues the same tokens; pages are copied when one of the two writes."""
        return table.fork()

    def rollback(self, table: PageTable, num_tokens: int) -> None:
        """Forget all but the first `num_tokens` tokens."""
        table.rollback(num_tokens)

    def release(self, table: PageTable) -> None:
        """Give back every page; published ones stay findable until their memory is needed."""
        table.release()

    def publish(self, table: PageTable, token_ids: Sequence[int]) -> None:
        """Let later sequences find the table's full pages. All `table.num_tokens` tokens must have been computed;
        `token_ids` starts with them. Costs nothing unless a page has filled up since the last time.
        """
        if self.prefix is None or table.num_tokens // self.page_size <= table.num_published:
            return
        if len(token_ids) < table.num_tokens:
            raise ValueError(f"the table holds {table.num_tokens} tokens, only {len(token_ids)} were named")
        self.prefix.publish(table, token_ids)

    def pages_for(self, num_tokens: int) -> int:
        """Pages that `num_tokens` tokens fill."""
        return -(-num_tokens // self.page_size)

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
    def num_available(self) -> int:
        """Pages that could be allocated now: free or cached."""
        return self.pool.num_available

    def _pages_taken(self, token_ids: Sequence[int], hits: Sequence[int]) -> int:
        """Available pages that the whole of `token_ids` would use up: a hit that someone owns costs nothing."""
        shared = sum(1 for page in hits if self.pool.references(page))
        return self.pages_for(len(token_ids)) - shared

    def _require(self, pages: int) -> None:
        if pages > self.pool.num_available:
            raise OutOfPages(pages, self.pool.num_available)
