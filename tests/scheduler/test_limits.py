"""Queue limits, quotas and deadlines: decided before any work, with nothing changed where the answer is no."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from quire.scheduler import (
    DEADLINE_PASSED,
    BeamSpec,
    CannotMeetDeadline,
    Coefficients,
    CostModel,
    DuplicateRequest,
    Fair,
    LatencyBudget,
    PageQuotaExceeded,
    QueueFull,
    Request,
    RequestSpec,
    State,
    StepLoad,
)

MakeWorld = Callable[..., Any]
Expected = Callable[..., list[int]]
PROMPT = list(range(10))


def test_a_tenant_has_its_own_limit_in_the_queue(make_world: MakeWorld) -> None:
    world = make_world(max_num_waiting=10, max_num_waiting_per_tenant=2)
    world.add(1, PROMPT, tenant="a")
    world.add(2, PROMPT, tenant="a")
    before = world.scheduler.stats()
    for ask in (lambda: world.add(3, PROMPT, tenant="a"), lambda: world.scheduler.check_room("a")):
        with pytest.raises(QueueFull, match="2 requests of this tenant are waiting, the limit is 2") as refusal:
            ask()
        assert refusal.value.estimate.position == 2
    assert world.scheduler.stats() == before
    world.add(3, PROMPT, tenant="b")
    world.step()
    world.add(4, PROMPT, tenant="a")


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"max_num_waiting": 3}, "1 requests are waiting, the limit is 3"),
        ({"max_num_waiting_per_tenant": 3}, "1 requests of this tenant are waiting, the limit is 3"),
    ],
)
def test_queue_limits_count_every_fork(make_world: MakeWorld, limits: dict[str, int], message: str) -> None:
    world = make_world(**limits)
    world.add(1, PROMPT, tenant="a")
    before = world.scheduler.stats()
    for ask in (
        lambda: world.add_forks((2, 3, 4), PROMPT, tenant="a"),
        lambda: world.scheduler.check_room("a", 3),
    ):
        with pytest.raises(QueueFull, match=message):
            ask()
    assert world.scheduler.stats() == before
    world.scheduler.check_room("a", 2)
    world.add_forks((2, 3), PROMPT, tenant="a")
    assert world.scheduler.stats().waiting == 3


@pytest.mark.parametrize("name", ["max_num_waiting", "max_num_waiting_per_tenant", "max_kv_pages_per_tenant"])
def test_a_limit_below_1_is_refused(make_world: MakeWorld, name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        make_world(**{name: 0})


def test_a_deadline_ends_a_fork_that_waits_for_its_parent(make_world: MakeWorld, expected: Expected) -> None:
    world = make_world(max_num_batched_tokens=8)
    world.add_forks((1, 2, 3), PROMPT, deadline=5.0)
    plan = world.scheduler.schedule()
    world.now = 5.0
    world.expire()
    assert world.ended == {2: DEADLINE_PASSED, 3: DEADLINE_PASSED}  # the parent is in flight
    world.commit(plan)
    assert world.ended[1] == DEADLINE_PASSED
    assert not world.scheduler.has_work


def test_readmitted_requests_are_not_refused_again(make_world: MakeWorld, expected: Expected) -> None:
    """Another scheduler accepted them; they continue after the tokens it generated."""
    world = make_world(max_num_waiting=1, max_num_waiting_per_tenant=1, max_num_batched_tokens=16)
    world.add(1, PROMPT)
    tokens = expected(PROMPT, 6)
    for request_id in (2, 3):
        request = Request(RequestSpec(request_id, PROMPT, max_tokens=6), tokens[:2])
        world.requests[request_id], world.outputs[request_id] = request, tokens[:2]
        world.scheduler.readmit(request)
    assert world.scheduler.stats().waiting == 3
    with pytest.raises(DuplicateRequest):
        world.scheduler.readmit(Request(RequestSpec(2, PROMPT, max_tokens=6)))
    world.run()
    assert world.outputs == {1: expected(PROMPT, 4), 2: tokens, 3: tokens}
    assert set(world.ended.values()) == {"length"}


def test_what_could_never_fit_its_quota_is_refused(make_world: MakeWorld) -> None:
    world = make_world(max_kv_pages_per_tenant=3)
    with pytest.raises(PageQuotaExceeded, match="need 4 pages, a tenant may have 3") as refusal:
        world.add(1, PROMPT, max_tokens=4)
    estimate = refusal.value.estimate
    assert (estimate.pages_needed, estimate.pages_free) == (4, 16)
    assert not world.scheduler.has_work


def test_a_tenant_at_its_quota_waits_and_holds_up_nobody(make_world: MakeWorld) -> None:
    world = make_world(max_kv_pages_per_tenant=7)
    for request_id, tenant in enumerate("aaab"):
        world.add(request_id, PROMPT, tenant=tenant)  # 4 pages each at its longest
    world.step()
    states = [world.requests[request_id].state for request_id in range(4)]
    assert states == [State.DECODE, State.WAITING, State.WAITING, State.DECODE]
    assert world.scheduler.stats().waiting_by_reason == {"quota": 2}
    most = 0
    while world.scheduler.has_work:
        world.step()
        most = max(most, sum(each.table is not None for each in world.requests.values() if each.spec.tenant == "a"))
    assert most == 1


def test_a_deadline_ends_a_request_wherever_it_is(make_world: MakeWorld) -> None:
    world = make_world(max_num_seqs=1)
    world.add(1, PROMPT, deadline=10.0)
    world.add(2, PROMPT, deadline=5.0)
    world.add(3, PROMPT)
    assert world.scheduler.next_deadline == 5.0
    world.step()
    assert world.expire() == []
    world.now = 6.0
    world.expire()
    assert world.ended == {2: DEADLINE_PASSED}
    plan = world.scheduler.schedule()
    world.now = 10.0
    assert world.expire() == []  # in flight
    world.commit(plan)
    assert world.ended == {1: DEADLINE_PASSED, 2: DEADLINE_PASSED}
    assert world.scheduler.next_deadline is None
    world.run()
    assert world.ended[3] == "length"


def test_deadlines_of_ended_requests_are_forgotten(make_world: MakeWorld) -> None:
    world = make_world()
    for request_id in range(1000):
        world.add(request_id, [1], max_tokens=1, deadline=1e6)
        world.run()
        assert world.scheduler.next_deadline is None
    assert len(world.scheduler._deadlines) == 0


def learned(make_world: MakeWorld, **options: Any) -> Any:
    """A world whose costs are known: 0.1 s per step."""
    cost = CostModel(Coefficients(0.1, 1e-6, 1e-6, 0.0, 0.0))
    for _ in range(10):
        cost.observe(StepLoad(1, 0, 10), 0.1)
    world = make_world(cost=cost, **options)
    world.step_s = 0.1
    return world


def test_the_wait_is_predicted_from_what_is_ahead(make_world: MakeWorld) -> None:
    assert make_world().add(1, PROMPT).predicted_wait_s is None
    world = learned(make_world, max_num_batched_tokens=10)
    waits = [world.add(request_id, PROMPT).predicted_wait_s for request_id in range(4)]
    assert waits == pytest.approx([0.1, 0.2, 0.3, 0.4], rel=0.05)


def test_the_wait_is_predicted_from_8_measured_steps_on(make_world: MakeWorld) -> None:
    world = make_world()
    world.step_s = 0.1
    world.add(1, PROMPT, max_tokens=8)
    for request_id in range(2, 9):
        world.step()
        assert world.add(request_id, [1], max_tokens=1).predicted_wait_s is None
        world.cancel(request_id)
    world.step()
    assert world.add(9, [1], max_tokens=1).predicted_wait_s is not None


def test_requests_that_have_left_the_queue_do_not_count(make_world: MakeWorld) -> None:
    world = learned(make_world, max_num_batched_tokens=10)
    world.step_s = 0.0
    for request_id in range(4):
        world.add(request_id, PROMPT)
    world.cancel(3)
    world.run()
    assert world.add(9, PROMPT).predicted_wait_s == pytest.approx(0.1, rel=0.05)


def test_the_wait_for_a_place_is_part_of_it(make_world: MakeWorld) -> None:
    """From how long outputs have been of late: 8 tokens, a step each."""
    world = learned(make_world, max_num_seqs=1)
    world.add(1, PROMPT, max_tokens=8)
    world.run()
    world.add(2, PROMPT, max_tokens=8)
    world.step()
    waits = [world.add(request_id, PROMPT).predicted_wait_s for request_id in (3, 4)]
    assert waits == pytest.approx([0.8 + 0.1, 2 * 0.8 + 0.1], rel=0.2)


def test_a_deadline_before_the_first_token_is_refused_at_once(make_world: MakeWorld) -> None:
    world = learned(make_world, max_num_batched_tokens=10)
    for request_id in range(5):
        world.add(request_id, PROMPT)
    with pytest.raises(CannotMeetDeadline, match="away, after the request's deadline") as refusal:
        world.add(9, PROMPT, deadline=0.3)
    assert refusal.value.estimate.position == 5
    world.add(9, PROMPT, deadline=1.0)


def test_requests_that_would_break_the_latency_target_wait(make_world: MakeWorld, expected: Expected) -> None:
    cost = CostModel(Coefficients(0.01, 0.01, 1e-4, 0.0, 0.0))
    world = make_world(cost=cost, budget=LatencyBudget(cost, 0.05, 32))
    for request_id in range(6):
        world.add(request_id, [request_id], max_tokens=4)
    world.step()
    assert world.scheduler.stats().running == 3  # 4 decode rows would take 0.05 s, the aim is 0.045
    assert world.scheduler.stats().waiting_by_reason == {"latency": 3}
    world.run()
    assert all(world.outputs[each] == expected([each], 4) for each in range(6))


def test_under_fair_a_newcomer_takes_a_place_from_who_is_ahead(make_world: MakeWorld, expected: Expected) -> None:
    world = make_world(policy=Fair(), max_num_seqs=2, num_pages=40)
    for request_id in range(6):
        world.add(request_id, PROMPT, max_tokens=20, tenant="flood")
    for _ in range(12):
        world.step()
    world.add(9, PROMPT, max_tokens=3, tenant="other")
    plan = world.step()
    assert 9 in {row.request_id for row in plan.sequences}
    world.run()
    assert max(request.preemptions for request in world.requests.values()) == 1
    assert all(world.outputs[each] == expected(PROMPT, 20) for each in range(6))
    assert world.outputs[9] == expected(PROMPT, 3)


def test_a_pinned_prompt_is_found_again_after_others_have_passed(make_world: MakeWorld) -> None:
    def cached_after_others(pin_s: float | None, later: float) -> int:
        world = make_world(num_pages=8)
        world.add(1, PROMPT, max_tokens=1, pin_s=pin_s)
        world.run()
        world.now = later
        for other in range(2, 6):
            world.add(other, [other] * 15, max_tokens=1, tenant=str(other))
            world.run()
        world.add(9, PROMPT, max_tokens=1)
        world.run()
        return int(world.requests[9].cached_tokens)

    assert cached_after_others(None, 1.0) == 0
    assert cached_after_others(60.0, 1.0) == 8
    assert cached_after_others(60.0, 61.0) == 0


def test_alone_a_search_runs_whatever_the_latency_target(make_world: MakeWorld) -> None:
    """Its beams together make steps too long, and nobody's end would change that."""
    cost = CostModel(Coefficients(20e-3, 1e-3, 1e-3, 0.0, 0.0))
    world = make_world(cost=cost, budget=LatencyBudget(cost, 0.001, 32))
    world.add(1, [1, 2, 3], max_tokens=4, beam=BeamSpec(3))
    world.add(2, [4], max_tokens=4)
    world.run()
    assert set(world.ended.values()) == {"length"}
