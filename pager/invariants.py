"""The books of the pager, audited: raises unless every page is accounted for by the given live tables.

It must not repair anything, nor trust a counter it can recount. The equation:

    free + cached + owned == total
    references(p) == how many of the tables list p                        for every page p
    p is free   <=>  references(p) == 0 and p has no content
    p is cached <=>  references(p) == 0 and p has content

and besides: no page is twice in a list or in a table; key -> page and page -> key are each other's inverse; a page's
parent is indexed as long as the page is (leaf-first eviction); a table lists exactly the pages its tokens fill.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from .errors import InvariantViolated
from .pager import Pager
from .pool import PagePool
from .table import PageTable


def check(pager: Pager, tables: Iterable[PageTable]) -> None:
    """Raise InvariantViolated unless the equation holds. `tables` are all live ones. O(pages + pages listed)."""
    tables = list(tables)
    for table in tables:
        _check_table(pager, table)
    _check_references(pager.pool, tables)
    _check_places(pager.pool)
    _check_index(pager.pool)


def _check_table(pager: Pager, table: PageTable) -> None:
    page_ids = table.page_ids
    _require(len(page_ids) == pager.pages_for(table.num_tokens), f"{table.num_tokens} tokens in {len(page_ids)} pages")
    _require(len(set(page_ids)) == len(page_ids), f"a table lists a page twice: {list(page_ids)}")
    _require(table.num_published * pager.page_size <= table.num_tokens, "a table published pages it does not fill")
    for page in page_ids[: table.num_published]:
        _require(pager.pool.content(page) is not None, f"published page {page} is not indexed")


def _check_references(pool: PagePool, tables: list[PageTable]) -> None:
    explained = Counter(page for table in tables for page in table.page_ids)
    for page in range(pool.num_pages):
        counted = pool.references(page)
        _require(counted == explained[page], f"page {page} has {counted} references, {explained[page]} are explained")


def _check_places(pool: PagePool) -> None:
    free, cached = list(pool.free_pages()), list(pool.cached_pages())
    owned = [page for page in range(pool.num_pages) if pool.references(page) > 0]
    _require(sorted(free + cached + owned) == list(range(pool.num_pages)), "a page is lost or in two places")
    counts = (pool.num_free, pool.num_cached, pool.num_owned)
    _require(counts == (len(free), len(cached), len(owned)), f"counters {counts} do not match the lists")
    _require(all(pool.content(page) is None for page in free), "a free page still has content")
    _require(all(pool.content(page) is not None for page in cached), "a cached page has no content")


def _check_index(pool: PagePool) -> None:
    index = pool.indexed_pages()
    contents = [(page, pool.content(page)) for page in range(pool.num_pages)]
    _require(index == {content.key: page for page, content in contents if content}, "index and contents disagree")
    for page, content in contents:
        orphan = content is not None and content.parent is not None and content.parent not in index
        _require(not orphan, f"page {page} outlived the page before it")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise InvariantViolated(message)
