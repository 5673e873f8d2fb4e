"""Preemption that keeps pages: where that is cheaper, as far as there is room, and never at the cost of a token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from quire.scheduler import MAX_PREEMPTIONS, State

MakeWorld = Callable[..., Any]
Expected = Callable[..., list[int]]
PROMPT = list(range(10))


def preempted(make_world: MakeWorld, **options: Any) -> Any:
    """One request that has decoded a little and lost its place."""
    world = make_world(enable_prefix_caching=False, **options)
    world.add(1, PROMPT, max_tokens=8)
    for _ in range(3):
        world.step()
    assert world.scheduler.preempt(1)
    return world


def test_spilled_pages_come_back_and_nothing_is_computed_twice(make_world: MakeWorld, expected: Expected) -> None:
    world = preempted(make_world, store_slots=8)
    stats = world.scheduler.stats()
    assert (stats.preemptions, stats.preemptions_spilled, stats.pages_spilled, stats.pages_owned) == (1, 1, 3, 0)
    row = world.step().sequences[0]
    assert (row.first_position, len(row.token_ids)) == (12, 1)
    world.run()
    assert world.outputs[1] == expected(PROMPT, 8)
    stats = world.scheduler.stats()
    assert (stats.pages_spilled, stats.recomputed_tokens, world.store.slots.count(None)) == (0, 0, 8)


@pytest.mark.parametrize("options", [{"store_slots": 0}, {"store_slots": 2}])
def test_without_room_the_tokens_are_computed_again_and_counted(
    make_world: MakeWorld, expected: Expected, options: dict[str, int]
) -> None:
    world = preempted(make_world, **options)
    world.run()
    stats = world.scheduler.stats()
    assert (stats.preemptions, stats.preemptions_spilled, stats.recomputed_tokens) == (1, 0, 12)
    assert world.requests[1].recomputed_tokens == 12
    assert world.outputs[1] == expected(PROMPT, 8)


def test_what_is_cheaper_is_done(make_world: MakeWorld) -> None:
    world = make_world(store_slots=8)
    world.store.seconds_per_page = 1000.0
    world.add(1, PROMPT, max_tokens=8)
    world.step()
    world.scheduler.preempt(1)
    assert world.scheduler.stats().preemptions_spilled == 0


def test_damaged_pages_are_computed_again(make_world: MakeWorld, expected: Expected) -> None:
    world = preempted(make_world, store_slots=8)
    world.store.is_damaged = True
    world.run()
    assert world.outputs[1] == expected(PROMPT, 8)
    assert world.scheduler.stats().recomputed_tokens == 12
    assert world.store.slots.count(None) == 8


def test_cancelling_a_spilled_request_empties_the_store(make_world: MakeWorld) -> None:
    world = preempted(make_world, store_slots=8)
    world.cancel(1)
    assert world.scheduler.stats().pages_spilled == 0
    assert world.store.slots.count(None) == 8


@pytest.mark.parametrize("store_slots", [0, 30])
def test_nobody_is_preempted_more_often_than_the_bound(
    make_world: MakeWorld, expected: Expected, store_slots: int
) -> None:
    """Against somebody who preempts whoever may be, before every step."""
    world = make_world(num_pages=14, store_slots=store_slots)
    for request_id in range(4):
        world.add(request_id, PROMPT[request_id:], max_tokens=12)
    for _ in range(400):
        for request_id in world.requests:
            world.scheduler.preempt(request_id)
        if world.step() is None:
            break
    assert not world.scheduler.has_work
    for request_id, request in world.requests.items():
        assert request.preemptions == MAX_PREEMPTIONS
        assert world.outputs[request_id] == expected(PROMPT[request_id:], 12)


def test_after_the_bound_all_its_pages_are_its_own(make_world: MakeWorld) -> None:
    world = make_world(num_pages=10, enable_prefix_caching=False)
    world.add(1, PROMPT, max_tokens=20)  # 8 pages at its longest
    for _ in range(MAX_PREEMPTIONS):
        world.step()
        world.scheduler.preempt(1)
    world.add(2, PROMPT, max_tokens=20)
    world.step()
    assert world.requests[1].table.reserved == 8 - 4
    assert world.requests[2].state is State.WAITING
    assert world.scheduler.stats().waiting_by_reason == {"pages": 1}
    while world.requests[1].state is not State.ENDED:
        world.step()
    assert world.requests[1].preemptions == MAX_PREEMPTIONS


@pytest.mark.parametrize("windows", [(0,), (3,), (0, 3)])
def test_what_left_a_window_is_reserved_again(make_world: MakeWorld, windows: tuple[int, ...]) -> None:
    """Of a protected request: what it holds and what it has reserved are always what it may come to need."""
    world = make_world(num_pages=100, windows=windows, enable_prefix_caching=False)
    world.add(1, PROMPT, max_tokens=130)
    for _ in range(MAX_PREEMPTIONS):
        world.step()
        world.scheduler.preempt(1)
    request = world.requests[1]
    while world.step() is not None and request.table is not None:
        assert request.table.num_pages + request.table.reserved == request.pages_needed
    assert world.ended == {1: "length"}
