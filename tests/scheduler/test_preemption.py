"""Who gives way when pages run out, and that nothing of a stream is lost by it. Pages hold 4 tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from quire.scheduler import Fair, FirstComeFirstServed, Policy, Priority, State

MakeWorld = Callable[..., Any]
Expected = Callable[..., list[int]]


def states(world: Any) -> dict[int, str]:
    return {request_id: request.state.name for request_id, request in world.requests.items()}


def run_until_one_is_preempted(world: Any, prompt_lengths: list[int]) -> list[int]:
    """Requests 1, 2, ... with these prompts decode until the pool is empty. Returns who ran in that last step."""
    for request_id, length in enumerate(prompt_lengths, 1):
        world.add(request_id, [request_id] * length, max_tokens=11)
    while True:
        plan = world.step()
        if world.scheduler.stats().preemptions:
            return [row.request_id for row in plan.sequences]


def test_the_victim_is_the_one_that_loses_least_work(make_world: MakeWorld) -> None:
    world = make_world(num_pages=10)
    ran = run_until_one_is_preempted(world, [4, 8, 6, 7])  # 3 needs a page; 2 has computed 10, 4 only 9
    assert states(world) == {1: "DECODE", 2: "DECODE", 3: "DECODE", 4: "PREEMPTED"}
    assert ran == [1, 2, 3]
    assert world.scheduler.stats().step == 4


def test_a_victim_that_had_already_grown_is_not_in_the_step(make_world: MakeWorld) -> None:
    world = make_world(num_pages=10)
    ran = run_until_one_is_preempted(world, [2, 5, 5, 7])  # 2 takes the last page, then 3 needs one
    assert states(world) == {1: "DECODE", 2: "PREEMPTED", 3: "DECODE", 4: "DECODE"}
    assert ran == [1, 3, 4]


def test_of_equals_the_youngest_is_the_victim(make_world: MakeWorld) -> None:
    world = make_world(num_pages=10)
    run_until_one_is_preempted(world, [1, 6, 5, 6])  # 3 needs a page; 2 and 4 have computed 9 each
    assert states(world) == {1: "DECODE", 2: "DECODE", 3: "DECODE", 4: "PREEMPTED"}


def test_the_oldest_is_never_the_victim_even_if_it_would_lose_least(make_world: MakeWorld) -> None:
    world = make_world(num_pages=4)
    ran = run_until_one_is_preempted(world, [2, 5])  # 2 needs a page; 1 has computed less, but is the oldest
    assert states(world) == {1: "DECODE", 2: "PREEMPTED"}
    assert ran == [1]  # and 2 is not let in again in the same step


def test_a_preempted_request_continues_with_the_same_tokens(make_world: MakeWorld, expected: Expected) -> None:
    world = make_world(enable_prefix_caching=False)
    world.add(1, [1] * 6, max_tokens=6)
    world.step()
    world.step()
    assert world.scheduler.preempt(1)
    request = world.requests[1]
    assert (request.state, request.table, world.scheduler.stats().pages_owned) == (State.PREEMPTED, None, 0)
    (row,) = world.step().sequences
    assert (row.first_position, len(row.token_ids), row.num_samples, row.num_prompt_tokens) == (0, 8, 1, 6)
    world.run()
    assert world.outputs[1] == expected([1] * 6, 6)
    assert (request.preemptions, request.recomputed_tokens, request.cached_tokens) == (1, 7, 0)


def test_after_a_preemption_what_is_still_cached_is_not_recomputed(make_world: MakeWorld) -> None:
    world = make_world()
    world.add(1, [1] * 6, max_tokens=6)
    world.step()
    world.step()
    world.scheduler.preempt(1)
    (row,) = world.step().sequences
    assert (row.first_position, len(row.token_ids)) == (4, 4)
    request = world.requests[1]
    assert (request.recomputed_tokens, request.cached_tokens) == (3, 0)


def test_a_recompute_in_chunks_samples_only_from_the_last_known_token(
    make_world: MakeWorld, expected: Expected
) -> None:
    world = make_world(enable_prefix_caching=False, max_chunk=3)
    world.add(1, [1] * 5, max_tokens=5)
    for _ in range(4):
        world.step()
    assert len(world.outputs[1]) == 3
    world.scheduler.preempt(1)
    assert [world.step().sequences[0].num_samples for _ in range(3)] == [0, 0, 1]
    world.run()
    assert world.outputs[1] == expected([1] * 5, 5)


def test_recomputed_tokens_are_counted_when_they_are_computed(make_world: MakeWorld) -> None:
    world = make_world(enable_prefix_caching=False, max_chunk=4)
    world.add(1, [1] * 10, max_tokens=2)
    world.step()
    world.step()  # 8 computed
    world.scheduler.preempt(1)
    world.step()  # 4 of them again
    world.scheduler.preempt(1)
    world.step()
    world.step()
    world.step()  # 8 again, 2 for the first time
    request = world.requests[1]
    assert (request.recomputed_tokens, request.preemptions) == (12, 2)


@pytest.mark.parametrize("policy", [FirstComeFirstServed, Priority, Fair])
def test_the_preempted_come_back_before_newcomers(make_world: MakeWorld, policy: type[Policy]) -> None:
    world = make_world(max_num_seqs=2, policy=policy())
    world.add(1, [1] * 3, max_tokens=9, priority=5)
    world.add(2, [2] * 3, max_tokens=9, priority=5)
    world.step()
    world.add(3, [3] * 3, max_tokens=9, priority=0)
    world.step()
    world.scheduler.preempt(2)
    world.step()
    assert states(world) == {1: "DECODE", 2: "DECODE", 3: "WAITING"}


def test_time_spent_preempted_is_stall(make_world: MakeWorld) -> None:
    world = make_world(max_num_seqs=1)
    world.add(1, [1] * 3, max_tokens=2)
    world.step()
    world.now = 5.0
    world.scheduler.preempt(1)
    world.now = 9.0
    world.step()
    request = world.requests[1]
    assert (request.queue_s, request.decode_s, request.stall_s) == (0.0, 5.0, 4.0)


def test_only_a_running_request_between_steps_can_be_preempted(make_world: MakeWorld) -> None:
    world = make_world(max_num_seqs=1)
    world.add(1, [1] * 3)
    world.add(2, [2] * 3)
    assert not world.scheduler.preempt(1)  # still waiting
    plan = world.scheduler.schedule()
    assert not world.scheduler.preempt(1)  # in flight
    world.commit(plan)
    assert not world.scheduler.preempt(2)
    assert not world.scheduler.preempt(99)
    assert world.scheduler.preempt(1)
    assert world.scheduler.stats().preemptions == 1


def test_the_oldest_prefill_makes_room_for_itself(make_world: MakeWorld, expected: Expected) -> None:
    world = make_world(num_pages=6, max_num_batched_tokens=8, max_chunk=4)
    world.add(1, [1] * 17, max_tokens=2)
    world.step()
    world.add(2, [2], max_tokens=20)
    world.step()
    for _ in range(4):
        world.step()
    world.scheduler.preempt(1)  # comes back as the oldest, still to be prefilled
    world.run()
    assert world.outputs == {1: expected([1] * 17, 2), 2: expected([2], 20)}
    assert world.ended == {1: "length", 2: "length"}


def test_a_pool_for_one_serves_many_one_after_another(make_world: MakeWorld, expected: Expected) -> None:
    world = make_world(num_pages=4)
    for request_id in range(6):
        world.add(request_id, [request_id] * 5, max_tokens=11)
    world.run()
    assert world.outputs == {request_id: expected([request_id] * 5, 11) for request_id in range(6)}
    assert world.scheduler.stats().pages_owned == 0


def test_no_request_is_admitted_in_a_step_that_preempts(make_world: MakeWorld) -> None:
    """Its pages would be those that were just taken from a running request."""
    world = make_world(num_pages=10, policy=Fair())
    for request_id, length in enumerate([4, 8, 6, 7], 1):
        world.add(request_id, [request_id] * length, max_tokens=11, tenant="old")
    for _ in range(3):
        world.step()
    world.add(9, [9], max_tokens=1, tenant="new")
    plan = world.step()
    assert world.scheduler.stats().preemptions == 1
    assert world.scheduler.stats().waiting_by_reason == {"pages": 2}
    assert [row.request_id for row in plan.sequences] == [1, 2, 3]
    assert 9 in [row.request_id for row in world.step().sequences]


def test_a_step_that_preempts_does_not_keep_later_steps_from_admitting(make_world: MakeWorld) -> None:
    world = make_world(num_pages=4)
    run_until_one_is_preempted(world, [2, 5])
    assert states(world) == {1: "DECODE", 2: "PREEMPTED"}
    world.cancel(1)
    assert [row.request_id for row in world.step().sequences] == [2]


def test_promised_pages_are_counted_anew_in_every_step(make_world: MakeWorld) -> None:
    """Request 1 was promised its third page; from the step on that takes the page, the rest is free for request 2."""
    world = make_world(num_pages=6)
    world.add(1, [1] * 8, max_tokens=4)
    world.step()
    world.add(2, [2] * 11, max_tokens=1)
    assert [row.request_id for row in world.step().sequences] == [1, 2]
