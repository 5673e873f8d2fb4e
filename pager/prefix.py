"""The prefix cache: finds full pages by the tokens they hold and the tokens before them.

Works on token ids and page ids; must not import the scheduler. The cache holds no reference on a page: the pool decides
what is evicted. A page found here holds exactly these tokens after exactly the same earlier tokens of the same tenant:
the key says so, and the tokens are compared too.

Keys form a chain that is fixed for all versions of this scheme, so other processes compute the same keys:

    root       = sha256(b"quire prefix v1\\0" + salt)                        salt: the tenant's, any bytes
    key of page i = sha256(key of page i-1, or root + page_size u32 little-endian token ids + images)
    images        = nothing if no token of the page stands for an image; else sha256 over all such images, in order:
                    (first token of the image, from the page's first on) i64 + tokens u64 + sha256 of the image

All layer groups use the same keys, each with its own index. Only full pages are indexed. An open table keeps the pages
of its hit by its references. Eviction is least recently used, in the pool's order: leaf first in a full group; in a
sliding group, oldest first: pages before the window have no owner.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from functools import lru_cache
from hashlib import sha256
from struct import Struct
from typing import NamedTuple

from .layout import first_kept_token
from .pool import Content, PagePool
from .table import NULL_PAGE, ImageSpan, PageTable, images_between, listed_pages

_SPAN = Struct("<qQ")  # an image in a key: its first token relative to the page, number of its tokens


def root_key(tenant_salt: bytes) -> bytes:
    """Return the start of a tenant's key chains. Tenants with different salts never share a page."""
    return sha256(b"quire prefix v1\0" + tenant_salt).digest()


def page_key(parent: bytes, encoded_token_ids: bytes, images: bytes = b"") -> bytes:
    """Return the key of a page with these tokens that follows the page (or root) with key `parent`."""
    return sha256(parent + encoded_token_ids + images).digest()


def page_keys(
    parent: bytes,
    token_ids: Sequence[int],
    page_size: int,
    first: int,
    end: int,
    images: Sequence[ImageSpan] = (),
) -> Iterator[tuple[bytes, bytes, bytes]]:
    """Yield key, encoded tokens and digest of the images of the full pages `first` to `end`.

    `parent` is the key before page `first`; `images` are the images of the whole sequence, in order.
    """
    pack = _page_encoding(page_size).pack
    for start in range(first * page_size, end * page_size, page_size):
        encoded = pack(*token_ids[start : start + page_size])
        in_page = _images_in_page(images, start, page_size) if images else b""
        parent = page_key(parent, encoded, in_page)
        yield parent, encoded, in_page


def _images_in_page(images: Sequence[ImageSpan], start: int, page_size: int) -> bytes:
    """Return the digest of the images with tokens in the page that starts at token `start`; empty without images."""
    parts = [
        _SPAN.pack(image.position - start, image.tokens) + image.digest
        for image in images_between(images, start, start + page_size)
    ]
    return sha256(b"".join(parts)).digest() if parts else b""


@lru_cache
def _page_encoding(page_size: int) -> Struct:
    return Struct(f"<{page_size}I")


class PrefixHit(NamedTuple):
    """Indexed pages that a sequence can start with. No reference keeps them until they are retained."""

    keys: list[bytes]  # one per page
    pages: list[list[int]]  # [groups][pages]; NULL_PAGE before a window
    num_shared: int = 0  # pages of the longest hit that could end after any page

    def page_ids(self) -> list[int]:
        """Return all pages, ordered by position, then group."""
        return listed_pages(self.pages)


class PrefixCache:
    """Finds and indexes full pages by content. The index itself is part of the pool, next to the reference counts."""

    def __init__(self, pool: PagePool, page_size: int, windows: Sequence[int]) -> None:
        self._pool = pool
        self._page_size = page_size
        self._windows = tuple(windows)

    def match(
        self,
        root: bytes,
        token_ids: Sequence[int],
        limit: int,
        images: Sequence[ImageSpan] = (),
        ends: Container[object] | None = None,
    ) -> PrefixHit:
        """Return the longest hit of at most `limit` pages that a sequence of `token_ids` can start with.

        A full group must have all of these pages, a sliding group the pages that the first row after them still sees.
        The hit ends after a page whose key is in `ends`; None: after any page. Changes nothing and retains nothing.
        """
        keys: list[bytes] = []
        pages: list[list[int]] = [[] for _ in self._windows]
        holes = [-1] * len(self._windows)  # last page that a group lacks
        length = 0
        num_shared = 0
        for depth, contents in enumerate(self._contents(root, token_ids, 0, limit, images)):
            found = [self._find(content) for content in contents]
            if NULL_PAGE in found:
                if any(page == NULL_PAGE and not window for page, window in zip(found, self._windows, strict=True)):
                    break
                holes = [depth if page == NULL_PAGE else hole for page, hole in zip(found, holes, strict=True)]
            keys.append(contents[0].key)
            for kept, page in zip(pages, found, strict=True):
                kept.append(page)
            if max(holes) < 0 or self._are_behind(holes, depth + 1):
                num_shared = depth + 1
                if ends is None or contents[0].key in ends:
                    length = depth + 1
        return self._cut(keys, pages, length, num_shared)

    def find(
        self, root: bytes, token_ids: Sequence[int], num_pages: int, images: Sequence[ImageSpan] = ()
    ) -> PrefixHit:
        """Return the first `num_pages` pages, with NULL_PAGE for each that is not indexed."""
        hit = PrefixHit([], [[] for _ in self._windows])
        for contents in self._contents(root, token_ids, 0, num_pages, images):
            for pages, content in zip(hit.pages, contents, strict=True):
                pages.append(self._find(content))
            hit.keys.append(contents[0].key)
        return hit

    def index(self, table: PageTable, token_ids: Sequence[int]) -> None:
        """Index the table's full pages, all of them computed; `token_ids` starts with the tokens they hold.

        Where the same content is already indexed on another page, the table takes that page and releases its own: the
        bytes are equal. It keeps its own page while a fork shares it: the fork would own the pages after it but not
        the indexed page before them, which could then be evicted first. In that case, as after a hash collision, the
        rest of the table stays private.
        """
        first, end = table.num_committed, table.num_tokens // self._page_size
        parent = table.keys[-1] if first else table.root
        pages = self._contents(parent, token_ids, first, end, table.images)
        for depth, contents in enumerate(pages, first):
            if not self._index_page(table, depth, contents):
                return
            table.keys.append(contents[0].key)

    def _index_page(self, table: PageTable, depth: int, contents: Sequence[Content]) -> bool:
        """Index the pages of all groups at `depth`, or index none and return False."""
        missing: list[tuple[int, Content]] = []
        duplicates: list[tuple[int, int]] = []  # (group, indexed page to take instead)
        for group, content in enumerate(contents):
            own = table.pages[group][depth]
            indexed = self._pool.find(content.key, group)
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
        """Return whether the row after `num_pages` pages sees none of the holes."""
        return all(hole < first for hole, first in zip(holes, self._first_kept(num_pages), strict=True))

    def _first_kept(self, num_pages: int) -> list[int]:
        """Return, per group, the first page that the row after `num_pages` pages can see."""
        num_tokens = num_pages * self._page_size
        return [first_kept_token(num_tokens, window) // self._page_size for window in self._windows]

    def _cut(self, keys: list[bytes], pages: list[list[int]], length: int, num_shared: int) -> PrefixHit:
        firsts = self._first_kept(length)
        return PrefixHit(
            keys[:length],
            [[NULL_PAGE] * first + kept[first:length] for first, kept in zip(firsts, pages, strict=True)],
            num_shared,
        )

    def _contents(
        self, parent: bytes, token_ids: Sequence[int], first: int, end: int, images: Sequence[ImageSpan]
    ) -> Iterator[list[Content]]:
        """Yield the content of each page from `first` to `end`, for every group."""
        keys = page_keys(parent, token_ids, self._page_size, first, end, images)
        for depth, (key, encoded, in_page) in enumerate(keys, first):
            yield [Content(key, parent, depth, group, encoded, in_page) for group in range(len(self._windows))]
            parent = key
