"""Several samples of one prompt: the prompt is computed once, its pages are forked, each sample is what it is alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from quire.scheduler import DuplicateRequest, Priority, QueueFull, State, TooLong

MakeWorld = Callable[..., Any]
Expected = Callable[..., list[int]]
PROMPT = list(range(10))  # 2 full pages and a half


def test_the_prompt_is_computed_once_and_each_branch_only_its_last_token(
    make_world: MakeWorld, expected: Expected
) -> None:
    world = make_world(enable_prefix_caching=False)
    world.add_forks((1, 2, 3), PROMPT)
    assert [(row.request_id, len(row.token_ids)) for row in world.step().sequences] == [(1, 10)]
    rows = [(row.request_id, row.first_position, len(row.token_ids)) for row in world.step().sequences]
    assert rows == [(1, 10, 1), (2, 9, 1), (3, 9, 1)]
    world.run()
    assert all(world.outputs[each] == expected(PROMPT, 4) for each in (1, 2, 3))
    assert [world.requests[each].cached_tokens for each in (1, 2, 3)] == [0, 9, 9]


def test_full_pages_are_shared_and_only_the_last_one_is_copied(make_world: MakeWorld) -> None:
    world = make_world(num_pages=16)
    world.add_forks((1, 2, 3), PROMPT)
    world.step()
    world.step()
    tables = [list(world.requests[each].table.pages[0]) for each in (1, 2, 3)]
    assert len({tuple(table[:2]) for table in tables}) == 1
    assert len({table[2] for table in tables}) == 3
    assert world.scheduler.stats().pages_owned == 5


def test_branches_wait_for_their_source_without_holding_up_others(make_world: MakeWorld) -> None:
    world = make_world(max_num_batched_tokens=8)
    world.add_forks((1, 2), PROMPT)
    world.add(3, [7])
    world.step()
    assert world.scheduler.stats().waiting_by_reason == {"source": 1, "tokens": 1}
    assert {row.request_id for row in world.step().sequences} == {1, 3}


def test_a_branch_outlives_its_source(make_world: MakeWorld, expected: Expected) -> None:
    world = make_world(max_num_seqs=1)
    world.add_forks((1, 2), PROMPT)
    world.run()
    assert world.outputs[2] == expected(PROMPT, 4)


@pytest.mark.parametrize("steps", [0, 1])
def test_a_cancelled_source_leaves_its_branches(make_world: MakeWorld, expected: Expected, steps: int) -> None:
    world = make_world(max_num_batched_tokens=8)
    world.add_forks((1, 2, 3), PROMPT)
    for _ in range(steps):
        world.step()
    world.cancel(1)
    world.cancel(3)
    world.run()
    assert world.ended == {1: "cancelled", 2: "length", 3: "cancelled"}
    assert world.outputs[2] == expected(PROMPT, 4)


def test_a_fork_cancelled_before_its_parent_is_ready_never_runs(make_world: MakeWorld) -> None:
    world = make_world(max_num_batched_tokens=8)
    world.add_forks((1, 2, 3), PROMPT)
    world.step()
    assert world.cancel(3).finish_reason == "cancelled"
    world.run()
    assert world.ended == {1: "length", 2: "length", 3: "cancelled"}
    assert world.outputs[3] == []


def test_all_are_accepted_or_none(make_world: MakeWorld) -> None:
    world = make_world(max_num_waiting=4)
    world.add(1, PROMPT)
    with pytest.raises(QueueFull):
        world.add_forks((2, 3, 4, 5), PROMPT)
    with pytest.raises(DuplicateRequest):
        world.add_forks((2, 1), PROMPT)
    assert world.scheduler.stats().waiting == 1
    world.add_forks((2, 3, 4), PROMPT)
    assert world.scheduler.stats().waiting == 4


def test_a_source_that_went_on_past_a_window_is_not_forked(make_world: MakeWorld, expected: Expected) -> None:
    """Its sliding pages are gone: the branch computes them itself, and is right."""
    world = make_world(num_pages=120, max_num_seqs=1, windows=(0, 3), enable_prefix_caching=False)
    prompt = [each % 7 for each in range(60)]
    world.add_forks((1, 2), prompt, max_tokens=20)
    world.scheduler.preempt(1)
    world.run()
    assert world.outputs[1] == world.outputs[2] == expected(prompt, 20)
    assert world.requests[2].state is State.ENDED


def test_a_branch_waits_for_pages(make_world: MakeWorld, expected: Expected) -> None:
    """The one page left is promised to its source; the audit finds nothing of the fork that was tried."""
    world = make_world(num_pages=4, enable_prefix_caching=False)
    world.add_forks((1, 2), PROMPT)
    world.step()
    world.step()
    assert world.scheduler.stats().waiting_by_reason == {"pages": 1}
    assert world.scheduler.stats().pages_owned == 3
    world.run()
    assert world.outputs[1] == world.outputs[2] == expected(PROMPT, 4)


@pytest.mark.parametrize(("max_num_seqs", "cancelled"), [(2, False), (1, True)])
def test_released_forks_run_before_newer_requests(make_world: MakeWorld, max_num_seqs: int, cancelled: bool) -> None:
    """Even before more urgent ones: they were accepted together with a parent that has run."""
    world = make_world(max_num_seqs=max_num_seqs, policy=Priority(), max_num_batched_tokens=8 if cancelled else 10)
    world.add_forks((1, 2), PROMPT, priority=5)
    world.step()
    if cancelled:  # before its prompt is computed
        world.cancel(1)
    world.add(3, [7], priority=0)
    world.step()
    assert world.requests[2].table is not None
    assert world.requests[3].state is State.WAITING


def test_forks_of_a_parent_that_fails_run_alone(make_world: MakeWorld, expected: Expected) -> None:
    for failure in ("logits", "step", "cancel in flight"):
        world = make_world()
        world.add_forks((1, 2, 3), PROMPT)
        plan = world.scheduler.schedule()
        if failure == "logits":
            world.failing[1] = "not numbers"
            world.commit(plan)
        elif failure == "step":
            for update in world.scheduler.abandon("failed"):
                world.note(update)
        else:
            world.cancel(1)
            world.commit(plan)
        assert list(world.ended) == [1]
        world.run()
        assert world.outputs == {1: [], 2: expected(PROMPT, 4), 3: expected(PROMPT, 4)}


def test_each_fork_counts_its_own_time(make_world: MakeWorld) -> None:
    world = make_world(max_num_seqs=3)
    world.add_forks((1, 2, 3), PROMPT, max_tokens=9)
    world.step()
    world.now = 2.0
    world.step()
    world.now = 5.0
    world.scheduler.preempt(3)
    world.now = 9.0
    world.run()
    assert [world.requests[each].queue_s for each in (1, 2, 3)] == [0.0, 2.0, 2.0]
    assert [world.requests[each].stall_s for each in (1, 2, 3)] == [0.0, 0.0, 4.0]


def test_forks_that_are_refused_leave_nothing(make_world: MakeWorld) -> None:
    world = make_world(num_pages=4)
    before = world.scheduler.stats()
    with pytest.raises(TooLong):
        world.add_forks((1, 2), PROMPT, max_tokens=10)
    assert world.scheduler.stats() == before
    assert not world.scheduler.has_work
    world.add_forks((1, 2), PROMPT)
    world.run()
    assert set(world.ended.values()) == {"length"}
