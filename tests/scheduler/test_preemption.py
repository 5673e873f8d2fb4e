"""Which request is preempted when pages run out; no token is lost by it. Pages hold 4 tokens."""

from __future__ import annotations

from typing import Any

import pytest
from quire.scheduler import Fair, FirstComeFirstServed, Policy, Priority, State

from tests.scheduler.conftest import Expected, MakeHarness
from tests.support.forced_preemption import preempt


def states(harness: Any) -> dict[int, str]:
    return {request_id: request.state.name for request_id, request in harness.requests.items()}


def run_until_preemption(harness: Any, prompt_lengths: list[int]) -> list[int]:
    """Decode requests 1, 2, ... with these prompt lengths until one is preempted. Return the ids of that step."""
    for request_id, length in enumerate(prompt_lengths, 1):
        harness.add(request_id, [request_id] * length, max_tokens=11)
    while True:
        plan = harness.step()
        if harness.scheduler.stats().preemptions:
            return [row.request_id for row in plan.sequences]


def test_the_victim_is_the_one_that_loses_least_work(make_harness: MakeHarness) -> None:
    harness = make_harness(num_pages=10)
    ran = run_until_preemption(harness, [4, 8, 6, 7])  # 3 needs a page; 2 has computed 10, 4 only 9
    assert states(harness) == {1: "DECODE", 2: "DECODE", 3: "DECODE", 4: "PREEMPTED"}
    assert ran == [1, 2, 3]
    assert harness.scheduler.stats().step == 4


def test_a_victim_that_had_already_grown_is_not_in_the_step(make_harness: MakeHarness) -> None:
    harness = make_harness(num_pages=10)
    ran = run_until_preemption(harness, [2, 5, 5, 7])  # 2 takes the last page, then 3 needs one
    assert states(harness) == {1: "DECODE", 2: "PREEMPTED", 3: "DECODE", 4: "DECODE"}
    assert ran == [1, 3, 4]


def test_of_equals_the_youngest_is_the_victim(make_harness: MakeHarness) -> None:
    harness = make_harness(num_pages=10)
    run_until_preemption(harness, [1, 6, 5, 6])  # 3 needs a page; 2 and 4 have computed 9 each
    assert states(harness) == {1: "DECODE", 2: "DECODE", 3: "DECODE", 4: "PREEMPTED"}


def test_the_oldest_is_never_the_victim_even_if_it_would_lose_least(make_harness: MakeHarness) -> None:
    harness = make_harness(num_pages=4)
    ran = run_until_preemption(harness, [2, 5])  # 2 needs a page; 1 has computed less, but is the oldest
    assert states(harness) == {1: "DECODE", 2: "PREEMPTED"}
    assert ran == [1]  # request 2 is not admitted again in the same step


def test_a_preempted_request_continues_with_the_same_tokens(make_harness: MakeHarness, expected: Expected) -> None:
    harness = make_harness(enable_prefix_caching=False)
    harness.add(1, [1] * 6, max_tokens=6)
    harness.step()
    harness.step()
    assert preempt(harness.scheduler, 1)
    request = harness.requests[1]
    assert (request.state, request.table, harness.scheduler.stats().pages_owned) == (State.PREEMPTED, None, 0)
    (row,) = harness.step().sequences
    assert (row.first_position, len(row.token_ids), row.num_samples, row.num_prompt_tokens) == (0, 8, 1, 6)
    harness.run()
    assert harness.outputs[1] == expected([1] * 6, 6)
    assert (request.preemptions, request.recomputed_tokens, request.cached_tokens) == (1, 7, 0)


def test_after_a_preemption_what_is_still_cached_is_not_recomputed(make_harness: MakeHarness) -> None:
    harness = make_harness()
    harness.add(1, [1] * 6, max_tokens=6)
    harness.step()
    harness.step()
    preempt(harness.scheduler, 1)
    (row,) = harness.step().sequences
    assert (row.first_position, len(row.token_ids)) == (4, 4)
    request = harness.requests[1]
    assert (request.recomputed_tokens, request.cached_tokens) == (3, 0)


def test_a_recompute_in_chunks_samples_only_from_the_last_known_token(
    make_harness: MakeHarness, expected: Expected
) -> None:
    harness = make_harness(enable_prefix_caching=False, max_chunk=3)
    harness.add(1, [1] * 5, max_tokens=5)
    for _ in range(4):
        harness.step()
    assert len(harness.outputs[1]) == 3
    preempt(harness.scheduler, 1)
    assert [harness.step().sequences[0].num_samples for _ in range(3)] == [0, 0, 1]
    harness.run()
    assert harness.outputs[1] == expected([1] * 5, 5)


def test_recomputed_tokens_are_counted_when_they_are_computed(make_harness: MakeHarness) -> None:
    harness = make_harness(enable_prefix_caching=False, max_chunk=4)
    harness.add(1, [1] * 10, max_tokens=2)
    harness.step()
    harness.step()  # 8 computed
    preempt(harness.scheduler, 1)
    harness.step()  # 4 of them again
    preempt(harness.scheduler, 1)
    harness.step()
    harness.step()
    harness.step()  # 8 again, 2 for the first time
    request = harness.requests[1]
    assert (request.recomputed_tokens, request.preemptions) == (12, 2)


@pytest.mark.parametrize("policy", [FirstComeFirstServed, Priority, Fair])
def test_preempted_requests_run_again_before_new_ones(make_harness: MakeHarness, policy: type[Policy]) -> None:
    harness = make_harness(max_num_seqs=2, policy=policy())
    harness.add(1, [1] * 3, max_tokens=9, priority=5)
    harness.add(2, [2] * 3, max_tokens=9, priority=5)
    harness.step()
    harness.add(3, [3] * 3, max_tokens=9, priority=0)
    harness.step()
    preempt(harness.scheduler, 2)
    harness.step()
    assert states(harness) == {1: "DECODE", 2: "DECODE", 3: "WAITING"}


def test_time_spent_preempted_is_stall(make_harness: MakeHarness) -> None:
    harness = make_harness(max_num_seqs=1)
    harness.add(1, [1] * 3, max_tokens=2)
    harness.step()
    harness.now = 5.0
    preempt(harness.scheduler, 1)
    harness.now = 9.0
    harness.step()
    request = harness.requests[1]
    counters = request.final_counters()
    assert (counters.queue_s, counters.decode_s, counters.stall_s) == (0.0, 5.0, 4.0)


def test_the_oldest_prefill_makes_room_for_itself(make_harness: MakeHarness, expected: Expected) -> None:
    harness = make_harness(num_pages=6, max_num_batched_tokens=8, max_chunk=4)
    harness.add(1, [1] * 17, max_tokens=2)
    harness.step()
    harness.add(2, [2], max_tokens=20)
    harness.step()
    for _ in range(4):
        harness.step()
    preempt(harness.scheduler, 1)  # request 1 runs again as the oldest, in prefill
    harness.run()
    assert harness.outputs == {1: expected([1] * 17, 2), 2: expected([2], 20)}
    assert harness.ended == {1: "length", 2: "length"}


def test_a_younger_prefill_waits_for_pages_and_preempts_nothing(make_harness: MakeHarness, expected: Expected) -> None:
    harness = make_harness(num_pages=8, max_chunk=1, enable_prefix_caching=False)
    prompts = {1: [1] * 4, 2: [2] * 4, 3: [3] * 16}
    for request_id, prompt in prompts.items():
        harness.add(request_id, prompt, max_tokens=12)
    while len(harness.step().sequences) == 3:
        assert harness.scheduler.stats().preemptions == 0
    assert states(harness) == {1: "DECODE", 2: "DECODE", 3: "PREFILL"}
    harness.run()
    assert harness.outputs == {request_id: expected(prompt, 12) for request_id, prompt in prompts.items()}


def test_a_pool_for_one_request_serves_many_in_turn(make_harness: MakeHarness, expected: Expected) -> None:
    harness = make_harness(num_pages=4)
    for request_id in range(6):
        harness.add(request_id, [request_id] * 5, max_tokens=11)
    harness.run()
    assert harness.outputs == {request_id: expected([request_id] * 5, 11) for request_id in range(6)}
    assert harness.scheduler.stats().pages_owned == 0


def test_no_request_is_admitted_in_a_step_that_preempts(make_harness: MakeHarness) -> None:
    """It would take pages that were just taken from a running request."""
    harness = make_harness(num_pages=10, policy=Fair())
    for request_id, length in enumerate([4, 8, 6, 7], 1):
        harness.add(request_id, [request_id] * length, max_tokens=11, tenant="old")
    for _ in range(3):
        harness.step()
    harness.add(9, [9], max_tokens=1, tenant="new")
    plan = harness.step()
    assert harness.scheduler.stats().preemptions == 1
    assert harness.scheduler.stats().waiting_by_reason == {"pages": 2}
    assert [row.request_id for row in plan.sequences] == [1, 2, 3]
    assert 9 in [row.request_id for row in harness.step().sequences]


def test_a_step_that_preempts_does_not_keep_later_steps_from_admitting(make_harness: MakeHarness) -> None:
    harness = make_harness(num_pages=4)
    run_until_preemption(harness, [2, 5])
    assert states(harness) == {1: "DECODE", 2: "PREEMPTED"}
    harness.cancel(1)
    assert [row.request_id for row in harness.step().sequences] == [2]


def test_promised_pages_are_counted_again_in_every_step(make_harness: MakeHarness) -> None:
    """Request 1 was promised a third page; in the step that takes it, request 2 may have all other pages."""
    harness = make_harness(num_pages=6)
    harness.add(1, [1] * 8, max_tokens=4)
    harness.step()
    harness.add(2, [2] * 11, max_tokens=1)
    assert [row.request_id for row in harness.step().sequences] == [1, 2]
