"""Queue limits, page quotas, deadlines, and the predicted wait. A refused request changes nothing."""

from __future__ import annotations

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

from tests.scheduler.conftest import Expected, MakeHarness
from tests.support.forced_preemption import preempt

PROMPT = list(range(10))


def test_a_tenant_has_its_own_limit_in_the_queue(make_harness: MakeHarness) -> None:
    harness = make_harness(max_num_waiting=10, max_num_waiting_per_tenant=2)
    harness.add(1, PROMPT, tenant="a")
    harness.add(2, PROMPT, tenant="a")
    before = harness.scheduler.stats()
    for ask in (lambda: harness.add(3, PROMPT, tenant="a"), lambda: harness.scheduler.check_room("a")):
        with pytest.raises(QueueFull, match="2 requests of this tenant are waiting, the limit is 2") as refusal:
            ask()
        assert refusal.value.estimate.position == 2
    assert harness.scheduler.stats() == before
    harness.add(3, PROMPT, tenant="b")
    harness.step()
    harness.add(4, PROMPT, tenant="a")


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"max_num_waiting": 3}, "1 requests are waiting, the limit is 3"),
        ({"max_num_waiting_per_tenant": 3}, "1 requests of this tenant are waiting, the limit is 3"),
    ],
)
def test_queue_limits_count_every_fork(make_harness: MakeHarness, limits: dict[str, int], message: str) -> None:
    harness = make_harness(**limits)
    harness.add(1, PROMPT, tenant="a")
    before = harness.scheduler.stats()
    for ask in (
        lambda: harness.add_forks((2, 3, 4), PROMPT, tenant="a"),
        lambda: harness.scheduler.check_room("a", 3),
    ):
        with pytest.raises(QueueFull, match=message):
            ask()
    assert harness.scheduler.stats() == before
    harness.scheduler.check_room("a", 2)
    harness.add_forks((2, 3), PROMPT, tenant="a")
    assert harness.scheduler.stats().waiting == 3


@pytest.mark.parametrize("name", ["max_num_waiting", "max_num_waiting_per_tenant", "max_kv_pages_per_tenant"])
def test_a_limit_below_1_is_refused(make_harness: MakeHarness, name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        make_harness(**{name: 0})


def test_a_deadline_ends_a_fork_that_waits_for_its_parent(make_harness: MakeHarness, expected: Expected) -> None:
    harness = make_harness(max_num_batched_tokens=8)
    harness.add_forks((1, 2, 3), PROMPT, deadline=5.0)
    plan = harness.scheduler.schedule()
    harness.now = 5.0
    harness.expire()
    assert harness.ended == {2: DEADLINE_PASSED, 3: DEADLINE_PASSED}  # the parent is in flight
    harness.commit(plan)
    assert harness.ended[1] == DEADLINE_PASSED
    assert not harness.scheduler.has_work


def test_readmitted_requests_are_not_refused_again(make_harness: MakeHarness, expected: Expected) -> None:
    """Another scheduler accepted them; they continue after the tokens it generated."""
    harness = make_harness(max_num_waiting=1, max_num_waiting_per_tenant=1, max_num_batched_tokens=16)
    harness.add(1, PROMPT)
    tokens = expected(PROMPT, 6)
    for request_id in (2, 3):
        request = Request(RequestSpec(request_id, PROMPT, max_tokens=6), tokens[:2])
        harness.requests[request_id] = request
        harness.outputs[request_id] = tokens[:2]
        harness.scheduler.readmit(request)
    assert harness.scheduler.stats().waiting == 3
    with pytest.raises(DuplicateRequest):
        harness.scheduler.readmit(Request(RequestSpec(2, PROMPT, max_tokens=6)))
    harness.run()
    assert harness.outputs == {1: expected(PROMPT, 4), 2: tokens, 3: tokens}
    assert set(harness.ended.values()) == {"length"}


def test_a_request_larger_than_the_page_quota_is_refused(make_harness: MakeHarness) -> None:
    harness = make_harness(max_kv_pages_per_tenant=3)
    with pytest.raises(PageQuotaExceeded, match="need 4 pages, a tenant may have 3") as refusal:
        harness.add(1, PROMPT, max_tokens=4)
    estimate = refusal.value.estimate
    assert (estimate.pages_needed, estimate.pages_free) == (4, 16)
    assert not harness.scheduler.has_work


def test_a_tenant_at_its_quota_waits_and_others_run(make_harness: MakeHarness) -> None:
    harness = make_harness(max_kv_pages_per_tenant=7)
    for request_id, tenant in enumerate("aaab"):
        harness.add(request_id, PROMPT, tenant=tenant)  # 4 pages each at its longest
    harness.step()
    states = [harness.requests[request_id].state for request_id in range(4)]
    assert states == [State.DECODE, State.WAITING, State.WAITING, State.DECODE]
    assert harness.scheduler.stats().waiting_by_reason == {"quota": 2}
    harness.add_forks((4, 5), PROMPT, tenant="a")
    harness.step()
    assert harness.scheduler.stats().waiting_by_reason == {"quota": 3, "fork": 1}
    most = 0
    while harness.scheduler.has_work:
        harness.step()
        most = max(most, sum(each.table is not None for each in harness.requests.values() if each.spec.tenant == "a"))
    assert most == 1


def test_a_deadline_ends_a_request_in_any_state(make_harness: MakeHarness) -> None:
    harness = make_harness(max_num_seqs=1)
    harness.add(1, PROMPT, deadline=10.0)
    harness.add(2, PROMPT, deadline=5.0)
    harness.add(3, PROMPT)
    assert harness.scheduler.next_deadline == 5.0
    harness.step()
    assert harness.expire() == []
    harness.now = 6.0
    harness.expire()
    assert harness.ended == {2: DEADLINE_PASSED}
    plan = harness.scheduler.schedule()
    harness.now = 10.0
    assert harness.expire() == []  # the step is in flight
    harness.commit(plan)
    assert harness.ended == {1: DEADLINE_PASSED, 2: DEADLINE_PASSED}
    assert harness.scheduler.next_deadline is None
    harness.run()
    assert harness.ended[3] == "length"


def test_deadlines_of_ended_requests_are_forgotten(make_harness: MakeHarness) -> None:
    harness = make_harness()
    for request_id in range(1000):
        harness.add(request_id, [1], max_tokens=1, deadline=1e6)
        harness.run()
        assert harness.scheduler.next_deadline is None
    assert len(harness.scheduler._deadlines._heap) == 0
    harness.add(1000, [1], max_tokens=1, deadline=10.0)  # earlier than all later deadlines
    for request_id in range(1001, 2000):
        harness.add(request_id, [1], max_tokens=1, deadline=1e6)
        harness.cancel(request_id)
        assert harness.scheduler.next_deadline == 10.0
    assert len(harness.scheduler._deadlines._heap) < 100


def learned(make_harness: MakeHarness, **options: Any) -> Any:
    """Return a harness whose cost model has learned that a step takes 0.1 s."""
    cost = CostModel(Coefficients(0.1, 1e-6, 1e-6, 0.0, 0.0))
    for _ in range(10):
        cost.observe(StepLoad(1, 0, 10), 0.1)
    harness = make_harness(cost=cost, **options)
    harness.step_s = 0.1
    return harness


def test_the_wait_is_predicted_from_the_queue(make_harness: MakeHarness) -> None:
    assert make_harness().add(1, PROMPT).predicted_wait_s is None
    harness = learned(make_harness, max_num_batched_tokens=10)
    waits = [harness.add(request_id, PROMPT).predicted_wait_s for request_id in range(4)]
    assert waits == pytest.approx([0.1, 0.2, 0.3, 0.4], rel=0.05)


def test_the_wait_of_any_new_request_is_known(make_harness: MakeHarness) -> None:
    assert make_harness().scheduler.predicted_wait_s is None
    harness = learned(make_harness, max_num_batched_tokens=10)
    assert harness.scheduler.predicted_wait_s == pytest.approx(0.0, abs=0.01)
    for request_id in range(4):
        harness.add(request_id, PROMPT)
    assert harness.scheduler.predicted_wait_s == pytest.approx(0.4, rel=0.05)


def test_the_wait_is_predicted_from_8_measured_steps_on(make_harness: MakeHarness) -> None:
    harness = make_harness()
    harness.step_s = 0.1
    harness.add(1, PROMPT, max_tokens=8)
    for request_id in range(2, 9):
        harness.step()
        assert harness.add(request_id, [1], max_tokens=1).predicted_wait_s is None
        harness.cancel(request_id)
    harness.step()
    assert harness.add(9, [1], max_tokens=1).predicted_wait_s is not None


def test_requests_that_have_left_the_queue_do_not_count(make_harness: MakeHarness) -> None:
    harness = learned(make_harness, max_num_batched_tokens=10)
    harness.step_s = 0.0
    for request_id in range(4):
        harness.add(request_id, PROMPT)
    harness.cancel(3)
    harness.run()
    assert harness.add(9, PROMPT).predicted_wait_s == pytest.approx(0.1, rel=0.05)


def test_the_predicted_wait_includes_the_output_that_a_preempted_request_computes_again(
    make_harness: MakeHarness,
) -> None:
    waits = []
    for num_steps in (1, 31):  # the preempted request has the prompt of 10 tokens and this many more
        harness = learned(make_harness, max_num_batched_tokens=10)
        harness.add(1, PROMPT, max_tokens=40)
        for _ in range(num_steps):
            harness.step()
        assert preempt(harness.scheduler, 1)
        waits.append(harness.add(2, PROMPT).predicted_wait_s)
    assert waits[1] - waits[0] == pytest.approx(0.3, rel=0.1)  # 3 steps of 10 tokens more


def test_the_predicted_wait_includes_the_wait_for_a_slot(make_harness: MakeHarness) -> None:
    """It is predicted from recent output lengths: 8 tokens, one step each."""
    harness = learned(make_harness, max_num_seqs=1)
    harness.add(1, PROMPT, max_tokens=8)
    harness.run()
    harness.add(2, PROMPT, max_tokens=8)
    harness.step()
    waits = [harness.add(request_id, PROMPT).predicted_wait_s for request_id in (3, 4)]
    assert waits == pytest.approx([0.8 + 0.1, 2 * 0.8 + 0.1], rel=0.2)


def test_a_deadline_before_the_first_token_is_refused_at_once(make_harness: MakeHarness) -> None:
    harness = learned(make_harness, max_num_batched_tokens=10)
    for request_id in range(5):
        harness.add(request_id, PROMPT)
    with pytest.raises(CannotMeetDeadline, match="away, after the request's deadline") as refusal:
        harness.add(9, PROMPT, deadline=0.3)
    assert refusal.value.estimate.position == 5
    harness.add(9, PROMPT, deadline=1.0)


def test_requests_that_would_exceed_the_latency_target_wait(make_harness: MakeHarness, expected: Expected) -> None:
    cost = CostModel(Coefficients(0.01, 0.01, 1e-4, 0.0, 0.0))
    harness = make_harness(cost=cost, budget=LatencyBudget(cost, 0.05, 32))
    for request_id in range(6):
        harness.add(request_id, [request_id], max_tokens=4)
    harness.step()
    assert harness.scheduler.stats().running == 3  # 4 decode rows would take 0.05 s, the limit is 0.045 s
    assert harness.scheduler.stats().waiting_by_reason == {"latency": 3}
    harness.run()
    assert all(harness.outputs[each] == expected([each], 4) for each in range(6))


def test_the_context_of_a_new_request_counts_against_the_latency_target(make_harness: MakeHarness) -> None:
    """Decoding takes 10 ms and 1 ms per token of context; the limit is 45 ms."""
    cost = CostModel(Coefficients(0.01, 0.0, 1e-4, 1e-3, 0.0))
    harness = make_harness(cost=cost, budget=LatencyBudget(cost, 0.05, 64))
    harness.add(1, list(range(10)), max_tokens=4)
    harness.add(2, list(range(20)), max_tokens=4)
    harness.add(3, list(range(30)), max_tokens=4)
    harness.step()
    assert harness.scheduler.stats().running == 2
    assert harness.scheduler.stats().waiting_by_reason == {"latency": 1}
    harness.run()
    assert [len(harness.outputs[each]) for each in (1, 2, 3)] == [4, 4, 4]


def test_a_prompt_that_finds_no_time_in_a_step_waits_for_latency(make_harness: MakeHarness) -> None:
    cost = CostModel(Coefficients(0.01, 0.001, 0.01, 0.0, 0.0))
    harness = make_harness(cost=cost, budget=LatencyBudget(cost, 0.05, 64), num_pages=64)
    harness.add(1, [1], max_tokens=4)
    harness.step()
    for request_id in (2, 3):
        harness.add(request_id, [request_id] * 40, max_tokens=4)
    harness.step()
    assert harness.scheduler.stats().waiting_by_reason == {"latency": 1}


def test_steps_whose_decoding_alone_exceeds_the_latency_target_are_counted(make_harness: MakeHarness) -> None:
    cost = CostModel(Coefficients(0.01, 0.01, 1e-4, 0.0, 0.0))
    harness = make_harness(cost=cost, budget=LatencyBudget(cost, 0.015, 32), num_pages=128)
    harness.step_s = 0.02
    harness.add(1, PROMPT, max_tokens=400)
    overruns = []
    for _ in range(60):
        harness.step()
        overruns.append(harness.scheduler.itl_overrun)
    assert overruns[0] == 0.0  # prefill alone
    assert overruns[4] == 0.0  # costs are not measured yet
    assert 1.2 < overruns[-1] < 1.4
    assert harness.scheduler.stats().steps_over_itl_target == sum(map(bool, overruns))
    harness.step_s = 0.0142  # a time between 0.9 of the target and the target
    for _ in range(100):
        harness.step()
    assert 0.9 < harness.scheduler.itl_overrun < 1.0
    harness.step_s = 0.01
    while harness.scheduler.itl_overrun:
        overrun = harness.scheduler.itl_overrun
        harness.step()
    assert overrun < 1.05  # the last step ends below 0.9
    assert harness.scheduler.stats().running == 1


def test_fair_preempts_for_a_request_of_a_tenant_with_fewer_sequences(
    make_harness: MakeHarness, expected: Expected
) -> None:
    harness = make_harness(policy=Fair(), max_num_seqs=2, num_pages=40)
    for request_id in range(6):
        harness.add(request_id, PROMPT, max_tokens=20, tenant="flood")
    for _ in range(12):
        harness.step()
    harness.add(9, PROMPT, max_tokens=3, tenant="other")
    plan = harness.step()
    assert 9 in {row.request_id for row in plan.sequences}
    harness.run()
    assert max(request.preemptions for request in harness.requests.values()) == 1
    assert all(harness.outputs[each] == expected(PROMPT, 20) for each in range(6))
    assert harness.outputs[9] == expected(PROMPT, 3)


@pytest.mark.parametrize("tenant", ["", "acme"])
def test_a_pinned_prompt_stays_cached_while_others_are_evicted(make_harness: MakeHarness, tenant: str) -> None:
    def cached_after_others(pin_s: float | None, later: float) -> int:
        harness = make_harness(num_pages=8)
        harness.add(1, PROMPT, max_tokens=1, pin_s=pin_s, tenant=tenant)
        harness.run()
        harness.now = later
        for other in range(2, 6):
            harness.add(other, [other] * 15, max_tokens=1, tenant=str(other))
            harness.run()
        harness.add(9, PROMPT, max_tokens=1, tenant=tenant)
        harness.run()
        return int(harness.requests[9].cached_tokens)

    assert cached_after_others(None, 1.0) == 0
    assert cached_after_others(60.0, 1.0) == 8
    assert cached_after_others(60.0, 61.0) == 0


def test_pins_count_against_the_share_of_their_tenant(make_harness: MakeHarness) -> None:
    """A prompt of 8 tokens pins 2 pages; the quota is 5."""
    harness = make_harness(num_pages=40, max_kv_pages_per_tenant=5)

    def add(request_id: int, prompt: list[int], tenant: str = "a", pin_s: float | None = 60.0) -> bool:
        estimate = harness.add(request_id, prompt, max_tokens=1, tenant=tenant, pin_s=pin_s)
        return bool(estimate.pin_refused)

    def pinned() -> int:
        return int(harness.scheduler.stats().pages_pinned)

    assert not add(1, [1] * 8)
    assert not add(2, [2] * 8)
    assert add(3, [3] * 8), "the pins of 1 and 2 are promised"
    assert not add(4, [4] * 8, tenant="b")
    harness.run()
    assert pinned() == 6
    assert add(5, [5] * 8)
    assert not add(6, [6] * 8, pin_s=None)
    assert not add(7, [1] * 8), "its pages are pinned already"
    assert not add(8, [8] * 4), "one page is left"
    harness.run()
    assert pinned() == 7
    harness.now = 61.0
    assert not add(9, [9] * 16)
    assert harness.cancel(9) is not None
    assert not add(10, [10] * 16), "a request that ended early needs its promise no more"


def test_samples_of_one_prompt_promise_its_pages_once(make_harness: MakeHarness) -> None:
    harness = make_harness(num_pages=60, max_kv_pages_per_tenant=12)
    assert not harness.add_forks((1, 2, 3), PROMPT, max_tokens=4, pin_s=60.0).pin_refused
    assert not harness.add_forks((4, 5), [7] * 40, max_tokens=4, pin_s=60.0).pin_refused
    assert harness.add_forks((6, 7), [8] * 4, max_tokens=4, pin_s=60.0).pin_refused
    harness.run()
    assert harness.scheduler.stats().pages_pinned == 12
    harness.now = 61.0
    refused = [harness.add(each, [each] * 32, max_tokens=4, pin_s=60.0).pin_refused for each in (8, 9)]
    assert refused == [False, True]


def test_without_a_share_every_prompt_may_be_pinned(make_harness: MakeHarness) -> None:
    harness = make_harness(num_pages=8)
    for request_id in range(4):
        assert not harness.add(request_id, [request_id] * 8, max_tokens=1, pin_s=60.0).pin_refused
        harness.run()
    assert harness.scheduler.stats().pages_pinned == 8


def test_a_search_runs_alone_whatever_the_latency_target(make_harness: MakeHarness) -> None:
    """The beams of the search alone exceed the target, so waiting would not help."""
    cost = CostModel(Coefficients(20e-3, 1e-3, 1e-3, 0.0, 0.0))
    harness = make_harness(cost=cost, budget=LatencyBudget(cost, 0.001, 32))
    harness.add(1, [1, 2, 3], max_tokens=4, beam=BeamSpec(3))
    harness.add(2, [4], max_tokens=4)
    harness.run()
    assert set(harness.ended.values()) == {"length"}
