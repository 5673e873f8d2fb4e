"""The prefix cache: which page already holds the keys and values of these tokens after those.

Token ids and page ids only: it must not know requests, and it keeps no page alive, the pool decides what is evicted.
The one invariant: a page found here holds exactly the tokens asked for, after exactly the same tokens, for the same
tenant. The key says so, and the tokens are compared besides.

Keys are a chain, fixed for all versions of this scheme, so that another process (a router) computes the same:

    root       = sha256(b"quire prefix v1\\0" + salt)                        salt: the tenant's, any bytes
    key of page i = sha256(key of page i-1, or root + page_size u32 little-endian token ids)

Only full pages are indexed. A table opened over a hit *is* the lock on it: its references keep every page of the hit,
releasing it unlocks them. Eviction is leaf-first LRU by the pool's order.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from struct import Struct

from .pool import Content, PagePool
from .table import PageTable


def root_key(tenant_salt: bytes) -> bytes:
    """What a tenant's chains start from. Tenants with different salts never share a page."""
    return sha256(b"quire prefix v1\0" + tenant_salt).digest()


def page_key(parent: bytes, encoded_token_ids: bytes) -> bytes:
    """Key of the page that holds these tokens after the page `parent` (or after nothing, with a root)."""
    return sha256(parent + encoded_token_ids).digest()


class PrefixCache:
    """Finds and indexes full pages by content; the index itself lives in the pool, beside the reference counts."""

    def __init__(self, pool: PagePool, page_size: int) -> None:
        self._pool = pool
        self._page_size = page_size
        self._encoding = Struct(f"<{page_size}I")

    def match(self, root: bytes, token_ids: Sequence[int]) -> list[int]:
        """The longest indexed run of full pages that `token_ids` starts with, leaving at least its last token out.

        Changes nothing and keeps nothing: retain the pages before allocating.
        """
        page_ids: list[int] = []
        parent = None
        for index in range((len(token_ids) - 1) // self._page_size):
            content = self._content(root, parent, token_ids, index)
            page = self._pool.find(content.key)
            if page is None or self._pool.content(page) != content:
                break
            page_ids.append(page)
            parent = content.key
        return page_ids

    def publish(self, table: PageTable, token_ids: Sequence[int]) -> None:
        """Index the table's full pages, all of them computed; `token_ids` starts with the tokens they hold.

        Where another page was indexed first for the same content, the table takes that one and gives its own back: the
        bytes are the same, and one copy is enough. After a hash collision the rest of the table stays private.
        """
        for index in range(table.num_published, table.num_tokens // self._page_size):
            content = self._content(table.root, self._parent_key(table, index), token_ids, index)
            page = self._pool.find(content.key)
            if page is None:
                self._pool.label(table.page_ids[index], content)
            elif self._pool.content(page) != content:
                return
            elif page != table.page_ids[index]:
                table.substitute(index, page)
            table.num_published = index + 1

    def _parent_key(self, table: PageTable, index: int) -> bytes | None:
        parent = self._pool.content(table.page_ids[index - 1]) if index else None
        return parent.key if parent else None

    def _content(self, root: bytes, parent: bytes | None, token_ids: Sequence[int], index: int) -> Content:
        start = index * self._page_size
        encoded = self._encoding.pack(*token_ids[start : start + self._page_size])
        return Content(page_key(parent or root, encoded), parent, encoded)
