"""Preemption that spills pages: only where that is cheaper and fits the store, and without losing a token."""

from __future__ import annotations

from typing import Any

import pytest
from quire.pager import OutOfPages
from quire.scheduler import MAX_PREEMPTIONS, State

from tests.scheduler.conftest import Expected, MakeHarness
from tests.support.forced_preemption import preempt

PROMPT = list(range(10))


def preempted(make_harness: MakeHarness, **options: Any) -> Any:
    """Return a harness with one request that was preempted after a few decode steps."""
    harness = make_harness(enable_prefix_caching=False, **options)
    harness.add(1, PROMPT, max_tokens=8)
    for _ in range(3):
        harness.step()
    assert preempt(harness.scheduler, 1)
    return harness


def test_spilled_pages_are_restored_and_nothing_is_computed_twice(
    make_harness: MakeHarness, expected: Expected
) -> None:
    harness = preempted(make_harness, store_slots=8)
    stats = harness.scheduler.stats()
    assert (stats.preemptions, stats.preemptions_spilled, stats.pages_spilled, stats.pages_owned) == (1, 1, 3, 0)
    row = harness.step().sequences[0]
    assert (row.first_position, len(row.token_ids)) == (12, 1)
    harness.run()
    assert harness.outputs[1] == expected(PROMPT, 8)
    stats = harness.scheduler.stats()
    assert (stats.pages_spilled, stats.recomputed_tokens, harness.store.slots.count(None)) == (0, 0, 8)


def test_a_state_is_spilled_as_it_was_before_the_chunk_that_was_planned(
    make_harness: MakeHarness, expected: Expected
) -> None:
    """A request that has grown by a chunk in this step makes room for another one."""
    harness = make_harness(store_slots=8, num_states=2, max_chunk=4, enable_prefix_caching=False)
    prompt = list(range(20))
    harness.add(1, prompt)
    harness.step()
    harness.scheduler._batch.grow_prefill(harness.requests[1], 9)
    assert preempt(harness.scheduler, 1)
    stats = harness.scheduler.stats()
    assert (stats.pages_spilled, stats.states_spilled, stats.states_free, stats.pages_owned) == (1, 1, 2, 0)
    harness.run()
    assert harness.outputs[1] == expected(prompt, 4)
    stats = harness.scheduler.stats()
    assert (stats.states_spilled, stats.recomputed_tokens, harness.store.slots.count(None)) == (0, 0, 8)


@pytest.mark.parametrize("options", [{"store_slots": 0}, {"store_slots": 2}])
def test_a_full_store_means_tokens_are_computed_again_and_counted(
    make_harness: MakeHarness, expected: Expected, options: dict[str, int]
) -> None:
    harness = preempted(make_harness, **options)
    harness.run()
    stats = harness.scheduler.stats()
    assert (stats.preemptions, stats.preemptions_spilled, stats.recomputed_tokens) == (1, 0, 12)
    assert harness.requests[1].recomputed_tokens == 12
    assert harness.outputs[1] == expected(PROMPT, 8)


def test_pages_are_spilled_only_if_that_is_cheaper(make_harness: MakeHarness) -> None:
    harness = make_harness(store_slots=8)
    harness.store.seconds_per_page = 1000.0
    harness.add(1, PROMPT, max_tokens=8)
    harness.step()
    preempt(harness.scheduler, 1)
    assert harness.scheduler.stats().preemptions_spilled == 0


def test_pages_are_restored_only_if_the_other_known_tokens_fit(make_harness: MakeHarness, expected: Expected) -> None:
    """The request had computed 1 of 5 pages; it would be preempted again, and its work lost."""
    harness = make_harness(store_slots=8, max_num_batched_tokens=8, max_chunk=4, enable_prefix_caching=False)
    prompt = list(range(20))
    harness.add(1, prompt)
    harness.step()
    assert preempt(harness.scheduler, 1)
    request = harness.requests[1]
    others = harness.pager.open(())
    others.append(4 * (harness.pager.pool.num_free - 4))
    with pytest.raises(OutOfPages):
        harness.scheduler._batch.admit(request, harness.now)
    assert (harness.pager.pool.num_free, harness.scheduler.stats().pages_spilled) == (4, 1)
    others.release()
    harness.run()
    assert harness.outputs[1] == expected(prompt, 4)


def test_damaged_pages_are_computed_again(make_harness: MakeHarness, expected: Expected) -> None:
    harness = preempted(make_harness, store_slots=8)
    harness.store.is_damaged = True
    harness.run()
    assert harness.outputs[1] == expected(PROMPT, 8)
    assert harness.scheduler.stats().recomputed_tokens == 12
    assert harness.store.slots.count(None) == 8


def test_cancelling_a_spilled_request_empties_the_store(make_harness: MakeHarness) -> None:
    harness = preempted(make_harness, store_slots=8)
    harness.cancel(1)
    assert harness.scheduler.stats().pages_spilled == 0
    assert harness.store.slots.count(None) == 8


@pytest.mark.parametrize("store_slots", [0, 30])
def test_no_request_is_preempted_more_often_than_the_limit(
    make_harness: MakeHarness, expected: Expected, store_slots: int
) -> None:
    """Every request that may be preempted is preempted before every step."""
    harness = make_harness(num_pages=14, store_slots=store_slots)
    for request_id in range(4):
        harness.add(request_id, PROMPT[request_id:], max_tokens=12)
    for _ in range(400):
        for request_id in harness.requests:
            preempt(harness.scheduler, request_id)
        if harness.step() is None:
            break
    assert not harness.scheduler.has_work
    for request_id, request in harness.requests.items():
        assert request.preemptions == MAX_PREEMPTIONS
        assert harness.outputs[request_id] == expected(PROMPT[request_id:], 12)


def test_a_request_at_the_preemption_limit_reserves_all_its_pages(make_harness: MakeHarness) -> None:
    harness = make_harness(num_pages=10, enable_prefix_caching=False)
    harness.add(1, PROMPT, max_tokens=20)  # 8 pages at its longest
    for _ in range(MAX_PREEMPTIONS):
        harness.step()
        preempt(harness.scheduler, 1)
    harness.add(2, PROMPT, max_tokens=20)
    harness.step()
    assert harness.requests[1].table.reserved == 8 - 4
    assert harness.requests[2].state is State.WAITING
    assert harness.scheduler.stats().waiting_by_reason == {"pages": 1}
    while harness.requests[1].state is not State.ENDED:
        harness.step()
    assert harness.requests[1].preemptions == MAX_PREEMPTIONS


@pytest.mark.parametrize("windows", [(0,), (3,), (0, 3)])
def test_pages_that_left_a_window_are_reserved_again(make_harness: MakeHarness, windows: tuple[int, ...]) -> None:
    """A protected request always holds or reserves all pages it may need."""
    harness = make_harness(num_pages=100, windows=windows, enable_prefix_caching=False)
    harness.add(1, PROMPT, max_tokens=130)
    for _ in range(MAX_PREEMPTIONS):
        harness.step()
        preempt(harness.scheduler, 1)
    request = harness.requests[1]
    while harness.step() is not None and request.table is not None:
        assert request.table.num_pages + request.table.reserved == request.pages_needed
    assert harness.ended == {1: "length"}
