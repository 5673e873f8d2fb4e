"""A conversation has one home, in every API server, and leaves it only when that is saturated."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from quire.runtime.workers.router import MAX_MORE_REQUESTS, MAX_MORE_WAIT_S, NUM_ALTERNATIVES, MemberLoad, Router

MEMBERS = tuple(f"10.0.0.{number}:7072" for number in range(16))
IDLE = MemberLoad(0)
FULL = MemberLoad(MAX_MORE_REQUESTS + 1)
names = st.lists(st.text(max_size=20), min_size=1, max_size=30, unique=True)


def keys(count: int) -> list[bytes]:
    return [number.to_bytes(4, "big") for number in range(count)]


def homes(members: tuple[str, ...], count: int = 2000) -> dict[bytes, str]:
    """Return the home of each key."""
    router, loads = Router(members), dict.fromkeys(members, IDLE)
    return {key: router.choose(key, loads) for key in keys(count)}


def order(router: Router, key: bytes) -> list[str]:
    """Return the members in the order of the key: each is its home when those before it are absent."""
    left, ranked = dict.fromkeys(router.members, IDLE), []
    while left:
        ranked.append(router.choose(key, left))
        del left[ranked[-1]]
    return ranked


@given(names, st.integers(0, 29), st.binary(max_size=40))
def test_the_order_of_members_changes_no_home(members: list[str], start: int, key: bytes) -> None:
    loads = dict.fromkeys(members, IDLE)
    home = Router(members).choose(key, loads)
    assert Router(members[start:] + members[:start]).choose(key, dict(reversed(loads.items()))) == home


@given(names, st.text(max_size=20), st.binary(max_size=40))
def test_a_member_that_leaves_takes_only_its_own_keys(members: list[str], other: str, key: bytes) -> None:
    without = [member for member in members if member != other] or ["another"]
    before = Router([*without, other]).choose(key, dict.fromkeys([*without, other], IDLE))
    after = Router(without).choose(key, dict.fromkeys(without, IDLE))
    assert before in (after, other)


@pytest.mark.parametrize("count", [2, 3, 17, 100])
def test_a_new_member_becomes_the_home_of_one_key_in_n(count: int) -> None:
    members = tuple(f"host-{number}" for number in range(count))
    before, after = homes(members[:-1]), homes(members)
    moved = [key for key in before if before[key] != after[key]]
    assert {after[key] for key in moved} <= {members[-1]}
    assert len(moved) / len(before) < 1 / count + 4 * (1 / count / len(before)) ** 0.5


def test_homes_have_equal_shares() -> None:
    counts = Counter(homes(MEMBERS, 4000).values())
    assert set(counts) == set(MEMBERS)
    assert 180 < min(counts.values()) <= max(counts.values()) < 320


def test_homes_do_not_change_from_one_version_to_the_next() -> None:
    """API servers of two versions run side by side during an update."""
    router = Router(MEMBERS)
    chosen = [MEMBERS.index(router.choose(key, dict.fromkeys(MEMBERS, IDLE))) for key in keys(4)]
    assert chosen == [9, 15, 4, 13]


def test_a_home_is_left_when_it_has_more_requests_or_a_longer_wait_than_the_least_loaded() -> None:
    router = Router(MEMBERS)
    home, second, *_ = order(router, b"key")
    loads = dict.fromkeys(MEMBERS, MemberLoad(3, 0.5))
    for kept in (MemberLoad(3 + MAX_MORE_REQUESTS, 0.5), MemberLoad(3, 0.5 + MAX_MORE_WAIT_S)):
        assert router.choose(b"key", loads | {home: kept}) == home
    for left in (MemberLoad(4 + MAX_MORE_REQUESTS, 0.5), MemberLoad(3, 0.6 + MAX_MORE_WAIT_S)):
        assert router.choose(b"key", loads | {home: left}) == second


def test_a_saturated_home_gives_to_the_least_loaded_of_the_next_four() -> None:
    router = Router(MEMBERS)
    home, *others = order(router, b"key")
    near, far = others[:NUM_ALTERNATIVES], others[NUM_ALTERNATIVES:]
    loads = dict.fromkeys(far, IDLE) | dict.fromkeys(near, MemberLoad(5)) | {home: FULL}
    assert router.choose(b"key", loads) == near[0]
    assert router.choose(b"key", loads | {near[2]: MemberLoad(4)}) == near[2]
    assert router.choose(b"key", loads | {near[3]: MemberLoad(4)}) == near[3]
    assert router.choose(b"key", loads | {near[3]: MemberLoad(4), near[2]: MemberLoad(4)}) == near[2]
    assert router.choose(b"key", loads | dict.fromkeys(near[1:], FULL)) == near[0]


def test_if_those_are_saturated_too_it_is_the_least_loaded_of_all() -> None:
    router = Router(MEMBERS)
    ranked = order(router, b"key")
    loads = dict.fromkeys(ranked, FULL) | dict.fromkeys(ranked[NUM_ALTERNATIVES + 1 :], MemberLoad(1))
    assert router.choose(b"key", loads | {ranked[-2]: IDLE}) == ranked[-2]


def test_only_the_members_that_are_offered_are_chosen() -> None:
    router = Router(MEMBERS)
    ranked = order(router, b"key")
    assert router.choose(b"key", {ranked[7]: MemberLoad(9), ranked[3]: MemberLoad(5)}) == ranked[3]
    assert router.choose(b"key", {ranked[15]: FULL}) == ranked[15]
