"""The prefix cache. Pages hold 4 tokens."""

from __future__ import annotations

from hashlib import sha256
from typing import NamedTuple

import pytest
from quire.pager import OutOfPages, Pager, check, prefix

from tests.pager.conftest import MakeHarness

PROMPT = [11, 12, 13, 14, 21, 22, 23, 24, 31]


def test_a_later_sequence_finds_the_full_pages_of_an_earlier_one(make_harness: MakeHarness) -> None:
    harness = make_harness(8)
    first, cached = harness.compute(PROMPT)
    assert (list(first.pages[0]), cached) == ([0, 1, 2], 0)
    second = harness.pager.open([*PROMPT, 32])
    cached = second.num_tokens
    assert (list(second.pages[0]), cached, second.num_tokens) == ([0, 1], 8, 8)
    assert harness.memory.read(second) == PROMPT[:8]


def test_pages_are_found_after_their_owner_has_released_them(make_harness: MakeHarness) -> None:
    harness = make_harness(8)
    first, _ = harness.compute(PROMPT)
    first.release()
    assert (harness.pager.pool.num_free, harness.pager.pool.num_cached, harness.pager.pool.num_owned) == (6, 2, 0)
    second = harness.pager.open(PROMPT)
    cached = second.num_tokens
    assert (list(second.pages[0]), cached) == ([0, 1], 8)
    assert (harness.pager.pool.num_cached, harness.pager.pool.num_owned) == (0, 2)


def test_the_last_token_is_always_left_to_compute(make_harness: MakeHarness) -> None:
    harness = make_harness(8)
    harness.compute(PROMPT)
    assert harness.pager.open(PROMPT[:8]).num_tokens == 4
    assert harness.pager.open(PROMPT[:9]).num_tokens == 8
    assert harness.pager.open(PROMPT[:4]).num_tokens == 0
    assert harness.pager.open([]).num_tokens == 0


@pytest.mark.parametrize(("changed", "expected"), [(0, 0), (3, 0), (4, 4), (7, 4), (8, 8)])
def test_a_hit_ends_before_the_first_different_token(make_harness: MakeHarness, changed: int, expected: int) -> None:
    harness = make_harness(8)
    harness.compute(PROMPT)
    other = [*PROMPT]
    other[changed] = 99
    assert harness.pager.open(other).num_tokens == expected


def test_the_same_tokens_after_others_are_not_a_hit(make_harness: MakeHarness) -> None:
    harness = make_harness(8)
    harness.compute(PROMPT)
    assert harness.pager.open(PROMPT[4:]).num_tokens == 0


def test_tenants_never_share_pages(make_harness: MakeHarness) -> None:
    harness = make_harness(12)
    first, _ = harness.compute(PROMPT, b"alice")
    second, cached = harness.compute(PROMPT, b"bob")
    assert (list(first.pages[0]), list(second.pages[0]), cached) == ([0, 1, 2], [3, 4, 5], 0)
    assert harness.pager.open(PROMPT, b"alice").num_tokens == 8


def test_only_full_pages_are_indexed_and_each_as_it_fills(make_harness: MakeHarness) -> None:
    harness = make_harness(8)
    tokens = PROMPT[:7]
    table, _ = harness.compute(tokens)
    assert table.num_committed == 1
    harness.extend(table, [24])
    harness.pager.commit(table, PROMPT[:8])
    assert table.num_committed == 2
    assert harness.pager.open(PROMPT).num_tokens == 8


def test_a_duplicate_takes_the_indexed_page_and_frees_its_own(
    make_harness: MakeHarness,
) -> None:
    harness = make_harness(8)
    first = harness.pager.open(PROMPT)
    second = harness.pager.open(PROMPT)
    harness.extend(first, PROMPT)
    harness.extend(second, PROMPT)
    assert (list(first.pages[0]), list(second.pages[0])) == ([0, 1, 2], [3, 4, 5])
    harness.pager.commit(first, PROMPT)
    harness.pager.commit(second, PROMPT)
    assert (list(first.pages[0]), list(second.pages[0])) == ([0, 1, 2], [0, 1, 5])
    assert list(harness.pager.pool.free_pages()) == [6, 7, 3, 4]
    assert harness.memory.read(second) == PROMPT
    check(harness.pager, [first, second])


def test_forks_index_their_shared_pages_once(make_harness: MakeHarness) -> None:
    harness = make_harness(8)
    table = harness.pager.open(PROMPT)
    harness.extend(table, PROMPT)
    twin = table.fork()
    harness.pager.commit(table, PROMPT)
    harness.pager.commit(twin, PROMPT)
    assert list(table.pages[0]) == list(twin.pages[0]) == [0, 1, 2]
    assert twin.num_committed == 2
    check(harness.pager, [table, twin])


def test_a_page_that_a_fork_shares_is_not_swapped(make_harness: MakeHarness) -> None:
    harness = make_harness(4)
    table = harness.pager.open(PROMPT[:8])
    harness.extend(table, PROMPT[:8])
    twin = table.fork()
    harness.compute(PROMPT[:4])[0].release()  # the content of page 0
    harness.pager.commit(table, PROMPT[:8])
    assert (list(table.pages[0]), table.num_committed) == ([0, 1], 0)
    twin.release()
    harness.pager.commit(table, PROMPT[:8])
    assert (list(table.pages[0]), table.num_committed) == ([0, 1], 0)  # the next full page triggers a new attempt
    harness.extend(table, [*PROMPT[8:], 32, 33, 34])
    harness.pager.commit(table, [*PROMPT, 32, 33, 34])
    assert (list(table.pages[0]), table.num_committed) == ([2, 1, 3], 3)
    check(harness.pager, [table])


def test_a_fork_knows_what_is_indexed_already(make_harness: MakeHarness) -> None:
    harness = make_harness(8)
    table, _ = harness.compute(PROMPT)
    assert table.fork().num_committed == 2


def test_eviction_is_leaf_first_and_least_recently_used(make_harness: MakeHarness) -> None:
    harness = make_harness(4)
    table, _ = harness.compute(PROMPT[:8])
    other, _ = harness.compute([91, 92, 93, 94])
    table.release()
    other.release()
    assert list(harness.pager.pool.cached_pages()) == [1, 0, 2]
    newcomer, _ = harness.compute([81, 82, 83, 84, 85])
    assert list(newcomer.pages[0]) == [3, 1]  # the free page, then the leaf
    assert harness.pager.prefix.match(prefix.root_key(b""), PROMPT, 2).pages == [[0]]


def test_a_hit_makes_a_prefix_recently_used(make_harness: MakeHarness) -> None:
    harness = make_harness(4)
    for tokens in ([1, 2, 3, 4], [5, 6, 7, 8]):
        harness.compute(tokens)[0].release()
    assert list(harness.pager.pool.cached_pages()) == [0, 1]
    harness.pager.open([1, 2, 3, 4, 5]).release()
    assert list(harness.pager.pool.cached_pages()) == [1, 0]


def test_a_hash_collision_is_a_miss_and_indexes_nothing(
    make_harness: MakeHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = make_harness(8)
    monkeypatch.setattr(prefix, "page_key", lambda *content: b"always the same")
    first, _ = harness.compute(PROMPT[:4])
    assert harness.pager.open([1, 2, 3, 4, 5]).num_tokens == 0
    second, _ = harness.compute([1, 2, 3, 4, 5, 6, 7, 8])
    assert second.num_committed == 0
    assert harness.memory.read(second) == [1, 2, 3, 4, 5, 6, 7, 8]
    check(harness.pager, [first, second])


def test_keys_are_the_documented_chain(
    make_harness: MakeHarness,
) -> None:
    harness = make_harness(8)
    harness.compute(PROMPT, b"alice")
    encoded = [b"".join(token.to_bytes(4, "little") for token in page) for page in (PROMPT[:4], PROMPT[4:8])]
    root = sha256(b"quire prefix v1\0alice").digest()
    first = sha256(root + encoded[0]).digest()
    second = sha256(first + encoded[1]).digest()
    assert harness.pager.pool.indexed_pages() == {first: 0, second: 1}
    assert second.hex() == "0d64e73fb12367afa216a5a5990e804473d9ea247cc1dc469419d95f59820769"


def test_without_prefix_caching_nothing_is_found_kept_or_counted(make_harness: MakeHarness) -> None:
    harness = make_harness(8, enable_prefix_caching=False)
    harness.compute(PROMPT)[0].release()
    assert (harness.pager.pool.num_free, harness.pager.pool.num_cached) == (8, 0)
    assert harness.compute(PROMPT)[1] == 0
    assert (harness.pager.prefix_queried_tokens, harness.pager.prefix_hit_tokens) == (0, 0)


def test_queried_and_hit_tokens_are_counted(make_harness: MakeHarness) -> None:
    harness = make_harness(8)
    harness.compute(PROMPT)
    harness.compute(PROMPT)
    assert (harness.pager.prefix_queried_tokens, harness.pager.prefix_hit_tokens) == (18, 8)


def test_open_with_spare_pages_does_not_count_shared_pages_twice(
    make_harness: MakeHarness,
) -> None:
    harness = make_harness(5)
    owner, _ = harness.compute(PROMPT)  # owns 3, shares 2, leaves 2
    table = harness.pager.open(PROMPT, spare_pages=1)
    cached = table.num_tokens
    assert cached == 8
    table.release()
    with pytest.raises(OutOfPages, match="needs 3 pages, 2 are available"):
        harness.pager.open(PROMPT, spare_pages=2)
    assert harness.pager.prefix_queried_tokens == 18  # a refusal is not a query
    owner.release()  # now the cached pages are among the 5 available ones
    with pytest.raises(OutOfPages, match="needs 6 pages, 5 are available"):
        harness.pager.open(PROMPT, spare_pages=3)
    assert list(harness.pager.open(PROMPT, spare_pages=2).pages[0]) == [0, 1]


def test_committing_needs_the_tokens_the_table_holds() -> None:
    pager = Pager(4, 4)
    table = pager.open([])
    table.append(5)
    with pytest.raises(ValueError, match="holds 5 tokens, token_ids has only 4"):
        pager.commit(table, [1, 2, 3, 4])
    assert table.num_committed == 0


def test_a_page_size_of_0_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1 token"):
        Pager(0, 4)


class Image(NamedTuple):
    position: int
    tokens: int
    digest: bytes


def test_pages_with_tokens_of_another_image_are_not_a_hit(make_harness: MakeHarness) -> None:
    """Tokens 2 to 5 of the prompt stand for an image: the first two pages depend on it, and all after them."""
    harness = make_harness(12)
    cat = Image(2, 4, b"cat" * 10)
    dog = Image(2, 4, b"dog" * 10)
    table = harness.pager.open(PROMPT, images=(cat,))
    harness.extend(table, PROMPT)
    harness.pager.commit(table, PROMPT)
    hits = {name: harness.pager.open(PROMPT, images=images).num_tokens for name, images in (
        ("the same", (cat,)),
        ("another", (dog,)),
        ("none", ()),
        ("at another place", (cat._replace(position=3),)),
        ("of another length", (cat._replace(tokens=3),)),
        ("one more", (cat, dog._replace(position=7, tokens=1))),
        ("one more in the last page", (cat, dog._replace(position=8, tokens=1))),
    )}  # fmt: skip
    assert hits == {
        "the same": 8,
        "another": 0,
        "none": 0,
        "at another place": 0,
        "of another length": 0,
        "one more": 4,
        "one more in the last page": 8,
    }


def test_forks_and_restored_tables_keep_their_images(make_harness: MakeHarness) -> None:
    harness = make_harness(12)
    cat = Image(9, 2, b"cat" * 10)
    table = harness.pager.open(PROMPT, images=(cat,))
    harness.extend(table, PROMPT)
    fork = table.fork()
    table.release()
    longer = [*PROMPT, 32, 33, 34]
    harness.extend(fork, longer[9:])
    harness.pager.commit(fork, longer)
    assert harness.pager.open([*longer, 35], images=(cat,)).num_tokens == 12
    assert harness.pager.open([*longer, 35]).num_tokens == 8


def test_keys_of_prompts_without_images_are_those_of_earlier_releases() -> None:
    (first, _, images), (second, *_) = prefix.page_keys(b"root", PROMPT, 4, 0, 2)
    assert first == sha256(b"root" + b"".join(token.to_bytes(4, "little") for token in PROMPT[:4])).digest()
    assert second == sha256(first + b"".join(token.to_bytes(4, "little") for token in PROMPT[4:8])).digest()
    assert images == b""


def test_only_keys_of_pages_with_tokens_of_an_image_depend_on_it() -> None:
    image = Image(2, 2, b"cat" * 10)
    plain = list(prefix.page_keys(b"root", PROMPT, 4, 0, 2))
    other = list(prefix.page_keys(b"root", PROMPT, 4, 0, 2, (image,)))
    assert [len(images) for _, _, images in other] == [32, 0]
    assert not {key for key, _, _ in plain} & {key for key, _, _ in other}


def test_keys_of_pages_with_images_are_those_that_other_processes_compute() -> None:
    """The image begins in the second page and ends in the third: its place is counted from the first token of each."""
    cat = Image(6, 3, b"cat" * 10)
    (first, *_), (second, _, images), (_, _, rest) = prefix.page_keys(b"root", [*PROMPT, 1, 2, 3], 4, 0, 3, (cat,))
    assert images == sha256((2).to_bytes(8, "little") + (3).to_bytes(8, "little") + cat.digest).digest()
    tokens = b"".join(token.to_bytes(4, "little") for token in PROMPT[4:8])
    assert second == sha256(first + tokens + images).digest()
    assert rest == sha256((-2).to_bytes(8, "little", signed=True) + (3).to_bytes(8, "little") + cat.digest).digest()


def test_restored_pages_are_found_by_their_images_only(make_harness: MakeHarness) -> None:
    harness = make_harness(12, store_pages=12)
    image = Image(2, 4, b"cat" * 10)
    table = harness.pager.open(PROMPT, images=(image,))
    harness.extend(table, PROMPT)
    spilled = harness.pager.spill(table, len(PROMPT))
    assert spilled is not None
    assert harness.pager.restore(spilled, PROMPT, images=(image,)) is not None
    assert harness.pager.open(PROMPT, images=(image,)).num_tokens == 8
    assert harness.pager.open(PROMPT).num_tokens == 0
