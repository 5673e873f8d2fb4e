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
from .table import NULL_PAGE, PageTable, listed


class Hit(NamedTuple):
    """Indexed pages that a sequence starts with. Nothing keeps them until they are retained."""

    keys: list[bytes]  # one per page
    pages: list[list[int]]  # [groups][pages]; NULL_PAGE where a window does not reach

    def page_ids(self) -> list[int]:
        """All of them, heads first."""
        return listed(self.pages)


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
        for depth in range(limit):
            contents = self._contents(parent, token_ids, depth)
            found = [self._find(content) for content in contents]
            if NULL_PAGE in found:
                if any(page == NULL_PAGE and not window for page, window in zip(found, self._windows, strict=True)):
                    break
                holes = [depth if page == NULL_PAGE else hole for page, hole in zip(found, holes, strict=True)]
            parent = contents[0].key
            keys.append(parent)
            for kept, page in zip(pages, found, strict=True):
                kept.append(page)
            if max(holes) < 0 or self._are_behind(holes, depth + 1):
                length = depth + 1
        return self._cut(keys, pages, length)

    def find(self, root: bytes, token_ids: Sequence[int], num_pages: int) -> Hit:
        """Whatever is indexed of the first `num_pages` pages, each by itself: NULL_PAGE where it is not."""
        hit = Hit([], [[] for _ in self._windows])
        parent = root
        for depth in range(num_pages):
            contents = self._contents(parent, token_ids, depth)
            for pages, content in zip(hit.pages, contents, strict=True):
                pages.append(self._find(content))
            parent = contents[0].key
            hit.keys.append(parent)
        return hit

    def index(self, table: PageTable, token_ids: Sequence[int]) -> None:
        """Index the table's full pages, all of them computed; `token_ids` starts with the tokens they hold.

        Where another page was indexed first for the same content, the table takes that one and gives its own back: the
        bytes are the same, and one copy is enough. Not while a fork shares its own: the fork would go on owning the
        pages behind, but not the one they continue, and that might then be evicted before them. There, as after a hash
        collision, the rest of the table stays private.
        """
        for depth in range(table.num_committed, table.num_tokens // self._page_size):
            contents = self._contents(table.keys[-1] if depth else table.root, token_ids, depth)
            if not self._index_page(table, depth, contents):
                return
            table.keys.append(contents[0].key)

    def _index_page(self, table: PageTable, depth: int, contents: Sequence[Content]) -> bool:
        """Index the pages of all groups at `depth`, or none and return False."""
        missing: list[tuple[int, Content]] = []
        duplicates: list[tuple[int, int]] = []  # (group, page to take instead)
        for group, content in enumerate(contents):
            own, indexed = table.pages[group][depth], self._pool.find(content.key, group)
            if indexed is not None and self._pool.content(indexed) != content:
                return False
            if own in (NULL_PAGE, indexed):
                continue
            if indexed is None:
                missing.append((own, content))
            elif self._pool.references(own) > 1:
                return False
            else:
                duplicates.append((group, indexed))
        for own, content in missing:
            self._pool.label(own, content)
        for group, page in duplicates:
            table.substitute(group, depth, page)
        return True

    def _find(self, content: Content) -> int:
        page = self._pool.find(content.key, content.group)
        return page if page is not None and self._pool.content(page) == content else NULL_PAGE

    def _are_behind(self, holes: Sequence[int], num_pages: int) -> bool:
        """Whether a row behind `num_pages` pages sees none of the holes."""
        return all(hole < first for hole, first in zip(holes, self._first_kept(num_pages), strict=True))

    def _first_kept(self, num_pages: int) -> list[int]:
        """Per group, the first page that a row behind `num_pages` pages may see."""
        num_tokens = num_pages * self._page_size
        return [first_kept_token(num_tokens, window) // self._page_size for window in self._windows]

    def _cut(self, keys: list[bytes], pages: list[list[int]], length: int) -> Hit:
        firsts = self._first_kept(length)
        return Hit(
            keys[:length],
            [[NULL_PAGE] * first + kept[first:length] for first, kept in zip(firsts, pages, strict=True)],
        )

    def _contents(self, parent: bytes, token_ids: Sequence[int], depth: int) -> list[Content]:
        """What the page at `depth` holds, for each group."""
        start = depth * self._page_size
        encoded = self._encoding.pack(*token_ids[start : start + self._page_size])
        key = page_key(parent, encoded)
        return [Content(key, parent, depth, group, encoded) for group in range(len(self._windows))]
