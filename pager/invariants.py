"""An audit of the pager: raises unless the given live tables account for every page.

Recounts everything and repairs nothing. The equation:

    free + cached + owned == total
    references(p) == number of tables that list p                         for every page p
    p is free   <=>  references(p) == 0 and p has no content
    p is cached <=>  references(p) == 0 and p has content
    reserved == sum of the tables' reservations <= free + cached
    references(slot) == number of tables and kept states that have the slot  for every slot of a state

Also: no page is twice in a list or in a table; each group's index (key -> page) and the contents (page -> key) are
inverse; in a full group, a page's parent is indexed as long as the page is, and evicted after it (leaf first); a cached
page is in the pinned list exactly if it has a pin; a table lists exactly the pages its tokens fill; in a sliding group,
pages before the window may be missing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from .exceptions import InvariantViolated
from .layout import first_kept_token
from .pager import Pager
from .pool import PagePool
from .state_cache import NoStateCache, StateCache
from .states import NO_STATE, NoStates
from .table import NULL_PAGE, PageTable, listed_pages


def check(pager: Pager, tables: Iterable[PageTable]) -> None:
    """Raise InvariantViolated unless the equation holds. `tables` are all live tables. O(pages + listed pages)."""
    tables = list(tables)
    for table in tables:
        _check_table(pager, table)
    _check_references(pager.pool, tables)
    _check_lists(pager.pool)
    _check_pins(pager.pool)
    _check_reservations(pager.pool, tables)
    _check_states(pager, tables)
    for group, window in enumerate(pager.windows):
        _check_index(pager.pool, group, is_full=window == 0)


def _check_table(pager: Pager, table: PageTable) -> None:
    filled = -(-table.num_tokens // pager.page_size)
    _require(table.num_committed * pager.page_size <= table.num_tokens, "a table committed pages it does not fill")
    for pages, window in zip(table.pages, pager.windows, strict=True):
        _require(len(pages) == filled, f"{table.num_tokens} tokens in {len(pages)} pages")
        num_null = pages.count(NULL_PAGE)
        _require(all(page == NULL_PAGE for page in pages[:num_null]), f"a hole in a table: {list(pages)}")
        seen = first_kept_token(table.num_tokens, window) // pager.page_size
        _require(num_null <= seen, f"page {num_null - 1} was released within its window of {window} tokens")
        for page in pages[num_null : table.num_committed]:
            _require(pager.pool.content(page) is not None, f"committed page {page} is not indexed")
    page_ids = listed_pages(table.pages)
    _require(len(set(page_ids)) == len(page_ids), f"a table lists a page twice: {page_ids}")
    if table._writable > table.num_tokens:
        for pages in table.pages:
            _require(pager.pool.is_private(pages[-1]), f"page {pages[-1]} is writable, but shared or indexed")


def _check_references(pool: PagePool, tables: list[PageTable]) -> None:
    explained = Counter(page for table in tables for page in listed_pages(table.pages))
    for page in range(pool.num_pages):
        counted = pool.references(page)
        _require(counted == explained[page], f"page {page} has {counted} references, {explained[page]} are explained")


def _check_lists(pool: PagePool) -> None:
    free = list(pool.free_pages())
    cached = list(pool.cached_pages())
    owned = [page for page in range(pool.num_pages) if pool.references(page) > 0]
    _require(sorted(free + cached + owned) == list(range(pool.num_pages)), "a page is lost or in two places")
    counts = (pool.num_free, pool.num_cached, pool.num_owned)
    _require(counts == (len(free), len(cached), len(owned)), f"counters {counts} do not match the lists")
    _require(all(pool.content(page) is None for page in free), "a free page still has content")
    _require(all(pool.content(page) is not None for page in cached), "a cached page has no content")


def _check_pins(pool: PagePool) -> None:
    before = pool.pins()
    pinned = set(pool.pinned_pages())
    cached = set(pool.cached_pages())
    after = pool.pins()  # a pin may have expired in between
    message = "a cached page has a pin and is not in the pinned list, or the reverse"
    _require(cached & after.keys() <= pinned <= cached & before.keys(), message)
    _require(all(pool.content(page) is not None for page in before), "a page without content is pinned")


def _check_reservations(pool: PagePool, tables: list[PageTable]) -> None:
    reserved = sum(table.reserved for table in tables)
    _require(pool.num_reserved == reserved, f"{pool.num_reserved} pages are reserved, {reserved} are explained")
    _require(min((table.reserved for table in tables), default=0) >= 0, "a table has a negative reservation")
    _require(pool.num_available >= 0, f"{reserved} pages are reserved, only {pool.num_free + pool.num_cached} are left")


def _check_states(pager: Pager, tables: list[PageTable]) -> None:
    states = pager.states
    explained = Counter(table.state for table in tables if table.state != NO_STATE)
    _check_kept(pager.cached_states, pager.pool)
    explained.update(pager.cached_states.slots())
    if isinstance(states, NoStates):
        _require(not explained, f"a model without states has {explained}")
        return
    counted = {slot: states.references(slot) for slot in range(states.num_slots) if states.references(slot)}
    _require(counted == explained, f"state slots have {counted} references, {dict(explained)} are explained")
    _require(
        states.num_owned == len(counted), f"{states.num_owned} state slots are owned, {len(counted)} are explained"
    )
    for table in tables:
        if table._writable > table.num_tokens:
            _require(counted[table.state] == 1, f"state {table.state} is writable, but shared")


def _check_kept(cached: StateCache | NoStateCache, pool: PagePool) -> None:
    _require(len(cached) <= cached.capacity, f"{len(cached)} states are kept, {cached.capacity} are allowed")
    indexed = set(pool.indexed_pages())
    _require(all(key in indexed for key in cached), "a kept state outlived its page")


def _check_index(pool: PagePool, group: int, is_full: bool) -> None:
    index = pool.indexed_pages(group)
    contents = [(page, pool.content(page)) for page in range(pool.num_pages)]
    in_group = [(page, content) for page, content in contents if content is not None and content.group == group]
    _require(index == {content.key: page for page, content in in_group}, "index and contents disagree")
    order = {page: position for position, page in enumerate(pool.cached_pages())}
    for page, content in in_group:
        if is_full and content.depth > 0:
            _require(content.parent in index, f"page {page} outlived the page before it")
            parent = index[content.parent]
            leaf_first = parent not in order or order.get(page, len(order)) < order[parent]
            _require(leaf_first, f"page {parent} would be evicted before page {page}")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise InvariantViolated(message)
