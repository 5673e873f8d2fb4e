"""The prefix cache: which page already holds the keys and values of these tokens after those.

Token ids and page ids only: it must not know requests, and it keeps no page alive, the pool decides what is evicted.
The one invariant: a page found here holds exactly the tokens asked for, after exactly the same tokens, for the same
tenant. The key says so, and the tokens are compared besides.

Keys are a chain, fixed for all versions of this scheme, so that another process (a router) computes the same:

    root       = sha256(b"quire prefix v1\\0" + salt)                        salt: the tenant's, any bytes
    key of page i = sha256(key of page i-1, or root + page_size u32 little-endian token ids)

All layer groups use the same keys, each in an index of its own. Only full pages are indexed. A table opened over a hit
*is* the lock on it: its references keep every page of the hit, releasing it unlocks them. Eviction is LRU by the pool's
order: leaf-first in a full group, oldest first in a sliding one, whose early pages nobody owns any more.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from struct import Struct
from typing import NamedTuple

from .layout import first_kept_token
from .pool import Content, PagePool
from .table import GIVEN_BACK, PageTable


class Hit(NamedTuple):
    """Indexed pages that a sequence starts with. Nothing keeps them until they are retained."""

    keys: list[bytes]  # one per page
    pages: list[list[int]]  # [groups][pages]; GIVEN_BACK where a window does not reach

    def page_ids(self) -> list[int]:
        return [page for pages in self.pages for page in pages if page != GIVEN_BACK]


def root_key(tenant_salt: bytes) -> bytes:
    """What a tenant's chains start from. Tenants with different salts never share a page."""
    return sha256(b"quire prefix v1\0" + tenant_salt).digest()


def page_key(parent: bytes, encoded_token_ids: bytes) -> bytes:
    """Key of the page that holds these tokens after the page `parent` (or after nothing, with a root)."""
    return sha256(parent + encoded_token_ids).digest()


class PrefixCache:
    """Finds and indexes full pages by content; the index itself lives in the pool, beside the reference counts."""

    def __init__(self, pool: PagePool, page_size: int, windows: Sequence[int]) -> None:
        self._pool = pool
        self._page_size = page_size
        self._windows = tuple(windows)
        self._encoding = Struct(f"<{page_size}I")

    def match(self, root: bytes, token_ids: Sequence[int], limit: int) -> Hit:
        """The most pages, at most `limit`, that a sequence of `token_ids` may start with. Changes and keeps nothing.

        A full group must have all of them, a sliding group those that the first row behind them still sees.
        """
        keys: list[bytes] = []
        pages: list[list[int]] = [[] for _ in self._windows]
        holes = [-1] * len(self._windows)  # last page that a group does not have
        length = 0
        parent = root
        for index in range(limit):
            key, encoded = self._key(parent, token_ids, index)
            found = [self._find(Content(key, parent, index, group, encoded)) for group in range(len(pages))]
            if any(page is None and not window for page, window in zip(found, self._windows, strict=True)):
                break
            keys.append(key)
            parent = key
            for group, page in enumerate(found):
                pages[group].append(GIVEN_BACK if page is None else page)
                if page is None:
                    holes[group] = index
            if all(hole < first for hole, first in zip(holes, self._first_kept(index + 1), strict=True)):
                length = index + 1
        return self._cut(keys, pages, length)

    def index(self, table: PageTable, token_ids: Sequence[int]) -> None:
        """Index the table's full pages, all of them computed; `token_ids` starts with the tokens they hold.

        Where another page was indexed first for the same content, the table takes that one and gives its own back: the
        bytes are the same, and one copy is enough. After a hash collision the rest of the table stays private.
        """
        for index in range(table.num_settled, table.num_tokens // self._page_size):
            parent = table.keys[-1] if index else table.root
            key, encoded = self._key(parent, token_ids, index)
            contents = [Content(key, parent, index, group, encoded) for group in range(len(self._windows))]
            if not self._index_page(table, index, contents):
                return
            table.keys.append(key)

    def _index_page(self, table: PageTable, index: int, contents: Sequence[Content]) -> bool:
        """Index the pages of all groups at `index`, or none and return False."""
        missing: list[tuple[int, Content]] = []
        duplicates: list[tuple[int, int]] = []  # (group, page to take instead)
        for group, content in enumerate(contents):
            own, indexed = table.pages[group][index], self._pool.find(content.key, group)
            if indexed is not None and self._pool.content(indexed) != content:
                return False
            if own in (GIVEN_BACK, indexed):
                continue
            if indexed is None:
                missing.append((own, content))
            else:
                duplicates.append((group, indexed))
        if sum(table.cost_of_substitute(group, index, page) for group, page in duplicates) > self._pool.num_available:
            return False
        for own, content in missing:
            self._pool.label(own, content)
        for group, page in duplicates:
            table.substitute(group, index, page)
        return True

    def _find(self, content: Content) -> int | None:
        page = self._pool.find(content.key, content.group)
        return page if page is not None and self._pool.content(page) == content else None

    def _first_kept(self, num_pages: int) -> list[int]:
        """Per group, the first page that a row behind `num_pages` pages sees; a full group has no holes to fear."""
        num_tokens = num_pages * self._page_size
        return [first_kept_token(num_tokens, window) // self._page_size for window in self._windows]

    def _cut(self, keys: list[bytes], pages: list[list[int]], length: int) -> Hit:
        firsts = self._first_kept(length)
        return Hit(
            keys[:length],
            [[GIVEN_BACK] * first + kept[first:length] for first, kept in zip(firsts, pages, strict=True)],
        )

    def _key(self, parent: bytes, token_ids: Sequence[int], index: int) -> tuple[bytes, bytes]:
        start = index * self._page_size
        encoded = self._encoding.pack(*token_ids[start : start + self._page_size])
        return page_key(parent, encoded), encoded
