"""The order in which policies admit requests, and the token budget."""

from __future__ import annotations

import pytest
from quire.scheduler import Fair, FirstComeFirstServed, Policy, Priority, Request, RequestSpec, TokenBudget

from tests.scheduler.conftest import MakeHarness


def request(request_id: int, tenant: str = "", priority: int = 0, now: float = 0.0, length: int = 1) -> Request:
    made = Request(RequestSpec(request_id, [1] * length, max_tokens=1, tenant=tenant, priority=priority))
    made.arrive(request_id, now)
    return made


def drain(queue: Policy, prefill_tokens: int = 0) -> list[int]:
    order = []
    while (head := queue.head()) is not None:
        order.append(head.request_id)
        queue.remove(head)
        queue.served(head, prefill_tokens, 0)
    return order


def test_first_come_first_served() -> None:
    queue = FirstComeFirstServed()
    for request_id in (1, 2, 3):
        queue.push(request(request_id, tenant="ab"[request_id % 2]))
    assert len(queue) == 3
    assert drain(queue) == [1, 2, 3]
    assert len(queue) == 0


def test_preempted_requests_come_before_those_that_never_ran() -> None:
    queue = FirstComeFirstServed()
    queue.push(request(1))
    queue.push(request(2))
    queue.push_front(request(3))
    assert drain(queue) == [3, 1, 2]


def test_removing_from_the_middle_keeps_the_order() -> None:
    queue = FirstComeFirstServed()
    requests = [request(request_id) for request_id in (1, 2, 3)]
    for each in requests:
        queue.push(each)
    queue.remove(requests[1])
    assert drain(queue) == [1, 3]


def test_tenants_can_be_passed_over() -> None:
    for queue in (FirstComeFirstServed(), Priority(), Fair()):
        queue.push(request(1, "a"))
        queue.push(request(2, "b"))
        assert [queue.head(passed).request_id for passed in ((), {"b"}, {"a"})] == [1, 1, 2]
        assert queue.head({"a", "b"}) is None


def test_priority_goes_first_and_waiting_makes_up_for_it() -> None:
    queue = Priority(ageing_s=10)
    queue.push(request(1, priority=5, now=0))
    queue.push(request(2, priority=0, now=49))
    queue.push(request(3, priority=0, now=51))
    queue.push(request(4, priority=-1, now=51))
    assert drain(queue) == [4, 2, 1, 3]


def test_the_lowest_priority_does_not_starve() -> None:
    """With one more urgent request per second, it runs when its age makes up for its priority."""
    queue = Priority(ageing_s=2)
    queue.push(request(0, priority=10))
    for second in range(1, 100):
        queue.push(request(second, priority=0, now=second))
        head = queue.head()
        assert head is not None
        queue.remove(head)
        if head.request_id == 0:
            assert second == 20
            return
    raise AssertionError("it starved")


def test_the_least_served_tenant_goes_first() -> None:
    queue = Fair()
    for request_id in range(6):
        queue.push(request(request_id, "flood"))
    queue.push(request(6, "other"))
    queue.push(request(7, "other"))
    assert drain(queue, prefill_tokens=10) == [0, 6, 1, 7, 2, 3, 4, 5]


def test_service_is_shared_by_weight() -> None:
    queue = Fair({"gold": 3})
    for request_id in range(8):
        queue.push(request(request_id, "gold" if request_id < 4 else "free"))
    assert drain(queue, prefill_tokens=30)[:5] == [0, 4, 1, 2, 3]


@pytest.mark.parametrize(
    ("credit_tokens", "expected"), [(0, [3, 4, 103, 104, 200, 201]), (200, [3, 4, 103, 200, 201, 202])]
)
def test_an_idle_tenant_saves_up_at_most_the_credit(credit_tokens: int, expected: list[int]) -> None:
    queue = Fair(credit_tokens=credit_tokens)
    for request_id in range(10):
        queue.push(request(request_id, "busy"))
        queue.push(request(100 + request_id, "also"))
    for _ in range(6):
        head = queue.head()
        assert head is not None
        queue.remove(head)
        queue.served(head, 100, 0)
    for request_id in range(6):
        queue.push(request(200 + request_id, "late"))
    first = drain(queue, prefill_tokens=100)[:6]
    assert sorted(first) == expected


def test_credit_is_in_tokens_whatever_the_weight() -> None:
    """A tenant of weight 4 that was idle starts 100 tokens of its own service, 25 units, below the others."""
    queue = Fair({"heavy": 4.0}, credit_tokens=100)
    queue.push(request(1, "busy"))
    queue.served(request(1, "busy"), 1000, 0)
    queue.push(request(2, "heavy"))
    assert queue.rank(request(2, "heavy"))[0] == 1000 - 25


def test_credit_does_not_lower_the_start_of_the_next_tenant() -> None:
    """A tenant that comes while another has credit left starts at the same level as that tenant."""
    queue = Fair(credit_tokens=100)
    queue.push(request(1, "busy"))
    queue.served(request(2, "busy"), 1000, 0)
    for number in range(3, 8):
        queue.push(request(number, f"tenant {number}"))
    assert [queue.rank(request(9, f"tenant {number}"))[0] for number in range(3, 8)] == [900.0] * 5


@pytest.mark.parametrize(
    ("num_seqs", "gives_way"), [((8, 0), True), ((5, 3), True), ((4, 3), False), ((4, 4), False), ((1, 0), False)]
)
def test_the_tenant_with_more_sequences_is_displaced(num_seqs: tuple[int, int], gives_way: bool) -> None:
    running = request(1, "flood")
    newcomer = request(2, "other")
    held = {"flood": num_seqs[0], "other": num_seqs[1]}.__getitem__
    assert Fair().may_displace(newcomer, running, held) == gives_way
    assert not FirstComeFirstServed().may_displace(newcomer, running, held)


def test_sequence_slots_are_shared_by_weight() -> None:
    running = request(1, "gold")
    newcomer = request(2, "free")
    assert not Fair({"gold": 3}).may_displace(newcomer, running, {"gold": 6, "free": 1}.__getitem__)
    assert Fair({"gold": 3}).may_displace(newcomer, running, {"gold": 7, "free": 1}.__getitem__)


def test_decode_rows_are_taken_off_the_token_budget() -> None:
    assert TokenBudget(32).begin(0, 0).prefill_tokens(context=0) == 32
    step = TokenBudget(32).begin(5, 100)
    assert step.prefill_tokens(context=0) == 27
    step.spend(20, context=0)
    assert step.prefill_tokens(context=1000) == 7


def test_an_empty_budget_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1, got 0"):
        TokenBudget(0)


def test_service_level_survives_an_empty_queue() -> None:
    """A new tenant must not run ahead of a tenant that was served while the queue was empty."""
    queue = Fair(credit_tokens=100)
    busy = request(1, "busy")
    queue.push(busy)
    queue.served(busy, 1000, 0)
    queue.remove(busy)
    late = request(2, "late")
    queue.push(late)
    assert queue.rank(late)[0] == 900.0


def test_requests_that_ran_before_come_before_new_ones_of_their_tenant() -> None:
    for queue in (FirstComeFirstServed(), Priority(), Fair()):
        again = request(1, priority=9)
        new = request(2, priority=0)
        queue.push(new)
        queue.push_front(again)
        assert drain(queue) == [1, 2]


@pytest.mark.parametrize(("prompt", "max_tokens", "cost"), [(10, 1, 10), (10, 4, 10 + 2 * 3), (70, 2, 70 + 2)])
def test_each_prompt_and_output_token_is_charged_to_its_tenant(
    make_harness: MakeHarness, prompt: int, max_tokens: int, cost: int
) -> None:
    """The step of the prompt samples the first token; the token that ends a request counts too."""
    policy = Fair(credit_tokens=0)
    harness = make_harness(num_pages=64, policy=policy)
    harness.add(1, [7] * prompt, max_tokens=max_tokens, tenant="a")
    harness.run()
    assert policy.rank(harness.requests[1])[0] == cost


def test_accepted_draft_tokens_are_charged_to_their_tenant(make_harness: MakeHarness) -> None:
    costs = []
    for num_drafts in (0, 4):
        policy = Fair(credit_tokens=0)
        harness = make_harness(num_pages=64, policy=policy, vocabulary=1, num_speculative_tokens=num_drafts)
        harness.step_s = 0.1
        harness.add(1, [0] * 20, max_tokens=30, tenant="a")
        steps = harness.run()
        costs.append(policy.rank(harness.requests[1])[0])
    assert steps < 30, "drafts were accepted"
    assert costs == [20 + 2 * 29] * 2


def test_the_pages_promised_to_a_displaced_request_are_free_in_the_same_step(make_harness: MakeHarness) -> None:
    harness = make_harness(num_pages=7, policy=Fair(credit_tokens=0))
    for request_id in (1, 2):  # 3 pages each, and the promise of one more
        harness.add(request_id, [request_id] * 10, max_tokens=8, tenant="b")
    harness.step()
    harness.add(3, [3] * 10, max_tokens=8, tenant="a")
    harness.step()
    assert [harness.requests[each].table is not None for each in (1, 2, 3)] == [True, False, True]
    assert harness.scheduler.stats().preemptions == 1


def test_the_request_that_loses_the_least_work_is_displaced(make_harness: MakeHarness) -> None:
    harness = make_harness(num_pages=64, max_num_seqs=3, policy=Fair(credit_tokens=0))
    for request_id, prompt in ((1, 4), (2, 20), (3, 8)):
        harness.add(request_id, [request_id] * prompt, max_tokens=20, tenant="b")
    harness.step()
    harness.step()
    harness.add(4, [4], max_tokens=2, tenant="a")
    harness.step()
    # The oldest is spared, although it has computed least.
    assert [harness.requests[each].table is not None for each in (1, 2, 3, 4)] == [True, True, False, True]
