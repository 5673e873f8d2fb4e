"""Forks: several samples of one prompt, which is computed once and whose pages they share."""

from __future__ import annotations

import pytest
from quire.scheduler import DuplicateRequest, Priority, QueueFull, State, TooLong

from tests.scheduler.conftest import Expected, MakeHarness
from tests.support.forced_preemption import preempt

PROMPT = list(range(10))  # 2 full pages and a half


def test_the_prompt_is_computed_once_and_each_fork_computes_its_last_token(
    make_harness: MakeHarness, expected: Expected
) -> None:
    harness = make_harness(enable_prefix_caching=False)
    harness.add_forks((1, 2, 3), PROMPT)
    assert [(row.request_id, len(row.token_ids)) for row in harness.step().sequences] == [(1, 10)]
    rows = [(row.request_id, row.first_position, len(row.token_ids)) for row in harness.step().sequences]
    assert rows == [(1, 10, 1), (2, 9, 1), (3, 9, 1)]
    harness.run()
    assert all(harness.outputs[each] == expected(PROMPT, 4) for each in (1, 2, 3))
    assert [harness.requests[each].cached_tokens for each in (1, 2, 3)] == [0, 9, 9]


def test_full_pages_are_shared_and_only_the_last_one_is_copied(make_harness: MakeHarness) -> None:
    harness = make_harness(num_pages=16)
    harness.add_forks((1, 2, 3), PROMPT)
    harness.step()
    harness.step()
    tables = [list(harness.requests[each].table.pages[0]) for each in (1, 2, 3)]
    assert len({tuple(table[:2]) for table in tables}) == 1
    assert len({table[2] for table in tables}) == 3
    assert harness.scheduler.stats().pages_owned == 5


def test_forks_wait_for_their_parent_and_other_requests_do_not(make_harness: MakeHarness) -> None:
    harness = make_harness(max_num_batched_tokens=8)
    harness.add_forks((1, 2), PROMPT)
    harness.add(3, [7])
    harness.step()
    assert harness.scheduler.stats().waiting_by_reason == {"fork": 1, "tokens": 1}
    assert {row.request_id for row in harness.step().sequences} == {1, 3}


def test_a_fork_outlives_its_parent(make_harness: MakeHarness, expected: Expected) -> None:
    harness = make_harness(max_num_seqs=1)
    harness.add_forks((1, 2), PROMPT)
    harness.run()
    assert harness.outputs[2] == expected(PROMPT, 4)


@pytest.mark.parametrize("steps", [0, 1])
def test_forks_of_a_cancelled_parent_still_run(make_harness: MakeHarness, expected: Expected, steps: int) -> None:
    harness = make_harness(max_num_batched_tokens=8)
    harness.add_forks((1, 2, 3), PROMPT)
    for _ in range(steps):
        harness.step()
    harness.cancel(1)
    harness.cancel(3)
    harness.run()
    assert harness.ended == {1: "cancelled", 2: "length", 3: "cancelled"}
    assert harness.outputs[2] == expected(PROMPT, 4)


def test_a_fork_cancelled_before_its_parent_is_ready_never_runs(make_harness: MakeHarness) -> None:
    harness = make_harness(max_num_batched_tokens=8)
    harness.add_forks((1, 2, 3), PROMPT)
    harness.step()
    assert harness.cancel(3).finish_reason == "cancelled"
    harness.run()
    assert harness.ended == {1: "length", 2: "length", 3: "cancelled"}
    assert harness.outputs[3] == []


def test_all_are_accepted_or_none(make_harness: MakeHarness) -> None:
    harness = make_harness(max_num_waiting=4)
    harness.add(1, PROMPT)
    with pytest.raises(QueueFull):
        harness.add_forks((2, 3, 4, 5), PROMPT)
    with pytest.raises(DuplicateRequest):
        harness.add_forks((2, 1), PROMPT)
    assert harness.scheduler.stats().waiting == 1
    harness.add_forks((2, 3, 4), PROMPT)
    assert harness.scheduler.stats().waiting == 4


def test_a_parent_whose_prompt_left_a_window_is_not_forked(make_harness: MakeHarness, expected: Expected) -> None:
    """The sliding pages of the parent are released, so the fork computes the prompt itself."""
    harness = make_harness(num_pages=120, max_num_seqs=1, windows=(0, 3), enable_prefix_caching=False)
    prompt = [each % 7 for each in range(60)]
    harness.add_forks((1, 2), prompt, max_tokens=20)
    preempt(harness.scheduler, 1)
    harness.run()
    assert harness.outputs[1] == harness.outputs[2] == expected(prompt, 20)
    assert harness.requests[2].state is State.ENDED


def test_a_fork_waits_for_pages(make_harness: MakeHarness, expected: Expected) -> None:
    """The one page left is promised to its parent; the failed attempt to fork leaves nothing behind."""
    harness = make_harness(num_pages=4, enable_prefix_caching=False)
    harness.add_forks((1, 2), PROMPT)
    harness.step()
    harness.step()
    assert harness.scheduler.stats().waiting_by_reason == {"pages": 1}
    assert harness.scheduler.stats().pages_owned == 3
    harness.run()
    assert harness.outputs[1] == harness.outputs[2] == expected(PROMPT, 4)


@pytest.mark.parametrize(("max_num_seqs", "cancelled"), [(2, False), (1, True)])
def test_released_forks_run_before_newer_requests(
    make_harness: MakeHarness, max_num_seqs: int, cancelled: bool
) -> None:
    """Forks run even before more urgent requests, because they were accepted with a parent that has run."""
    harness = make_harness(max_num_seqs=max_num_seqs, policy=Priority(), max_num_batched_tokens=8 if cancelled else 10)
    harness.add_forks((1, 2), PROMPT, priority=5)
    harness.step()
    if cancelled:  # the prompt is not computed yet
        harness.cancel(1)
    harness.add(3, [7], priority=0)
    harness.step()
    assert harness.requests[2].table is not None
    assert harness.requests[3].state is State.WAITING


def test_forks_of_a_parent_that_fails_run_alone(make_harness: MakeHarness, expected: Expected) -> None:
    for failure in ("logits", "step", "cancel in flight"):
        harness = make_harness()
        harness.add_forks((1, 2, 3), PROMPT)
        plan = harness.scheduler.schedule()
        if failure == "logits":
            harness.failing[1] = "NaN"
            harness.commit(plan)
        elif failure == "step":
            for update in harness.scheduler.abandon("failed"):
                harness.note(update)
        else:
            harness.cancel(1)
            harness.commit(plan)
        assert list(harness.ended) == [1]
        harness.run()
        assert harness.outputs == {1: [], 2: expected(PROMPT, 4), 3: expected(PROMPT, 4)}


def test_each_fork_counts_its_own_time(make_harness: MakeHarness) -> None:
    harness = make_harness(max_num_seqs=3)
    harness.add_forks((1, 2, 3), PROMPT, max_tokens=9)
    harness.step()
    harness.now = 2.0
    harness.step()
    harness.now = 5.0
    preempt(harness.scheduler, 3)
    harness.now = 9.0
    harness.run()
    assert [harness.requests[each].final_counters().queue_s for each in (1, 2, 3)] == [0.0, 2.0, 2.0]
    assert [harness.requests[each].final_counters().stall_s for each in (1, 2, 3)] == [0.0, 0.0, 4.0]


def test_forks_that_are_refused_leave_nothing(make_harness: MakeHarness) -> None:
    harness = make_harness(num_pages=4)
    before = harness.scheduler.stats()
    with pytest.raises(TooLong):
        harness.add_forks((1, 2), PROMPT, max_tokens=10)
    assert harness.scheduler.stats() == before
    assert not harness.scheduler.has_work
    harness.add_forks((1, 2), PROMPT)
    harness.run()
    assert set(harness.ended.values()) == {"length"}
