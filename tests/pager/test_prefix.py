"""Finding pages by what they hold. Pages hold 4 tokens."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import sha256
from typing import Any

import pytest
from quire.pager import OutOfPages, Pager, check, prefix

World = Any
PROMPT = [11, 12, 13, 14, 21, 22, 23, 24, 31]


def test_a_later_sequence_finds_the_full_pages_of_an_earlier_one(make_world: Callable[..., World]) -> None:
    world = make_world(8)
    first, cached = world.compute(PROMPT)
    assert (list(first.pages[0]), cached) == ([0, 1, 2], 0)
    second = world.pager.open([*PROMPT, 32])
    cached = second.num_tokens
    assert (list(second.pages[0]), cached, second.num_tokens) == ([0, 1], 8, 8)
    assert world.cells.read(second) == PROMPT[:8]


def test_pages_are_found_after_their_owner_is_gone(make_world: Callable[..., World]) -> None:
    world = make_world(8)
    first, _ = world.compute(PROMPT)
    first.release()
    assert (world.pager.pool.num_free, world.pager.pool.num_cached, world.pager.pool.num_owned) == (6, 2, 0)
    second = world.pager.open(PROMPT)
    cached = second.num_tokens
    assert (list(second.pages[0]), cached) == ([0, 1], 8)
    assert (world.pager.pool.num_cached, world.pager.pool.num_owned) == (0, 2)


def test_the_last_token_is_always_left_to_compute(make_world: Callable[..., World]) -> None:
    world = make_world(8)
    world.compute(PROMPT)
    assert world.pager.open(PROMPT[:8]).num_tokens == 4
    assert world.pager.open(PROMPT[:9]).num_tokens == 8
    assert world.pager.open(PROMPT[:4]).num_tokens == 0
    assert world.pager.open([]).num_tokens == 0


@pytest.mark.parametrize(("changed", "expected"), [(0, 0), (3, 0), (4, 4), (7, 4), (8, 8)])
def test_a_hit_ends_before_the_first_different_token(
    make_world: Callable[..., World], changed: int, expected: int
) -> None:
    world = make_world(8)
    world.compute(PROMPT)
    other = [*PROMPT]
    other[changed] = 99
    assert world.pager.open(other).num_tokens == expected


def test_the_same_tokens_after_others_are_not_a_hit(make_world: Callable[..., World]) -> None:
    world = make_world(8)
    world.compute(PROMPT)
    assert world.pager.open(PROMPT[4:]).num_tokens == 0


def test_tenants_never_share_pages(make_world: Callable[..., World]) -> None:
    world = make_world(12)
    first, _ = world.compute(PROMPT, b"alice")
    second, cached = world.compute(PROMPT, b"bob")
    assert (list(first.pages[0]), list(second.pages[0]), cached) == ([0, 1, 2], [3, 4, 5], 0)
    assert world.pager.open(PROMPT, b"alice").num_tokens == 8


def test_only_full_pages_are_indexed_and_each_as_it_fills(make_world: Callable[..., World]) -> None:
    world = make_world(8)
    tokens = PROMPT[:7]
    table, _ = world.compute(tokens)
    assert table.num_committed == 1
    world.extend(table, [24])
    world.pager.commit(table, PROMPT[:8])
    assert table.num_committed == 2
    assert world.pager.open(PROMPT).num_tokens == 8


def test_the_second_to_commit_takes_the_first_ones_page_and_frees_its_own(make_world: Callable[..., World]) -> None:
    world = make_world(8)
    first = world.pager.open(PROMPT)
    second = world.pager.open(PROMPT)
    world.extend(first, PROMPT)
    world.extend(second, PROMPT)
    assert (list(first.pages[0]), list(second.pages[0])) == ([0, 1, 2], [3, 4, 5])
    world.pager.commit(first, PROMPT)
    world.pager.commit(second, PROMPT)
    assert (list(first.pages[0]), list(second.pages[0])) == ([0, 1, 2], [0, 1, 5])
    assert list(world.pager.pool.free_pages()) == [6, 7, 3, 4]
    assert world.cells.read(second) == PROMPT
    check(world.pager, [first, second])


def test_forks_index_their_shared_pages_once(make_world: Callable[..., World]) -> None:
    world = make_world(8)
    table = world.pager.open(PROMPT)
    world.extend(table, PROMPT)
    twin = table.fork()
    world.pager.commit(table, PROMPT)
    world.pager.commit(twin, PROMPT)
    assert list(table.pages[0]) == list(twin.pages[0]) == [0, 1, 2]
    assert twin.num_committed == 2
    check(world.pager, [table, twin])


def test_a_page_that_a_fork_shares_is_not_swapped(make_world: Callable[..., World]) -> None:
    world = make_world(4)
    table = world.pager.open(PROMPT[:8])
    world.extend(table, PROMPT[:8])
    twin = table.fork()
    world.compute(PROMPT[:4])[0].release()  # page 2: what page 0 holds
    world.pager.commit(table, PROMPT[:8])
    assert (list(table.pages[0]), table.num_committed) == ([0, 1], 0)
    twin.release()
    world.pager.commit(table, PROMPT[:8])
    assert (list(table.pages[0]), table.num_committed) == ([0, 1], 0)  # looks again when the next page is full
    world.extend(table, [*PROMPT[8:], 32, 33, 34])
    world.pager.commit(table, [*PROMPT, 32, 33, 34])
    assert (list(table.pages[0]), table.num_committed) == ([2, 1, 3], 3)
    check(world.pager, [table])


def test_a_fork_knows_what_is_indexed_already(make_world: Callable[..., World]) -> None:
    world = make_world(8)
    table, _ = world.compute(PROMPT)
    assert table.fork().num_committed == 2


def test_eviction_is_leaf_first_and_least_recently_used(make_world: Callable[..., World]) -> None:
    world = make_world(4)
    table, _ = world.compute(PROMPT[:8])
    other, _ = world.compute([91, 92, 93, 94])
    table.release()
    other.release()
    assert list(world.pager.pool.cached_pages()) == [1, 0, 2]
    newcomer, _ = world.compute([81, 82, 83, 84, 85])
    assert list(newcomer.pages[0]) == [3, 1]  # the free page, then the leaf
    assert world.pager.prefix.match(prefix.root_key(b""), PROMPT, 2).pages == [[0]]


def test_a_hit_makes_a_prefix_recently_used(make_world: Callable[..., World]) -> None:
    world = make_world(4)
    for tokens in ([1, 2, 3, 4], [5, 6, 7, 8]):
        world.compute(tokens)[0].release()
    assert list(world.pager.pool.cached_pages()) == [0, 1]
    world.pager.open([1, 2, 3, 4, 5]).release()
    assert list(world.pager.pool.cached_pages()) == [1, 0]


def test_a_hash_collision_is_a_miss_and_indexes_nothing(
    make_world: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_world(8)
    monkeypatch.setattr(prefix, "page_key", lambda parent, encoded: b"always the same")
    first, _ = world.compute(PROMPT[:4])
    assert world.pager.open([1, 2, 3, 4, 5]).num_tokens == 0
    second, _ = world.compute([1, 2, 3, 4, 5, 6, 7, 8])
    assert second.num_committed == 0
    assert world.cells.read(second) == [1, 2, 3, 4, 5, 6, 7, 8]
    check(world.pager, [first, second])


def test_keys_are_a_documented_chain_that_another_process_can_compute(make_world: Callable[..., World]) -> None:
    world = make_world(8)
    world.compute(PROMPT, b"alice")
    encoded = [b"".join(token.to_bytes(4, "little") for token in page) for page in (PROMPT[:4], PROMPT[4:8])]
    root = sha256(b"quire prefix v1\0alice").digest()
    first = sha256(root + encoded[0]).digest()
    second = sha256(first + encoded[1]).digest()
    assert world.pager.pool.indexed_pages() == {first: 0, second: 1}
    assert second.hex() == "0d64e73fb12367afa216a5a5990e804473d9ea247cc1dc469419d95f59820769"


def test_with_caching_off_nothing_is_found_kept_or_counted(make_world: Callable[..., World]) -> None:
    world = make_world(8, enable_prefix_caching=False)
    world.compute(PROMPT)[0].release()
    assert (world.pager.pool.num_free, world.pager.pool.num_cached) == (8, 0)
    assert world.compute(PROMPT)[1] == 0
    assert (world.pager.prefix_queried_tokens, world.pager.prefix_hit_tokens) == (0, 0)


def test_queried_and_hit_tokens_are_counted(make_world: Callable[..., World]) -> None:
    world = make_world(8)
    world.compute(PROMPT)
    world.compute(PROMPT)
    assert (world.pager.prefix_queried_tokens, world.pager.prefix_hit_tokens) == (18, 8)


def test_opening_with_spare_pages_counts_what_the_prompt_would_really_take(make_world: Callable[..., World]) -> None:
    world = make_world(5)
    owner, _ = world.compute(PROMPT)  # owns 3, shares 2, leaves 2
    table = world.pager.open(PROMPT, spare_pages=1)
    cached = table.num_tokens
    assert cached == 8
    table.release()
    with pytest.raises(OutOfPages, match="needs 3 pages, 2 are available"):
        world.pager.open(PROMPT, spare_pages=2)
    assert world.pager.prefix_queried_tokens == 18  # a refusal is not a query
    owner.release()  # now the hits are themselves among the 5 available pages
    with pytest.raises(OutOfPages, match="needs 6 pages, 5 are available"):
        world.pager.open(PROMPT, spare_pages=3)
    assert list(world.pager.open(PROMPT, spare_pages=2).pages[0]) == [0, 1]


def test_committing_needs_the_tokens_the_table_holds() -> None:
    pager = Pager(4, 4)
    table = pager.open([])
    table.append(5)
    with pytest.raises(ValueError, match="holds 5 tokens, token_ids has only 4"):
        pager.commit(table, [1, 2, 3, 4])
    assert table.num_committed == 0


def test_a_page_size_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1 token"):
        Pager(0, 4)
