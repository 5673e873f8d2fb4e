"""The waiting queue's order, and the budget."""

from __future__ import annotations

import pytest
from quire.scheduler import FirstComeFirstServed, Request, TokenBudget


def request(request_id: int) -> Request:
    return Request(request_id, [1], max_tokens=1)


def drain(queue: FirstComeFirstServed) -> list[int]:
    order = []
    while (head := queue.head()) is not None:
        order.append(head.request_id)
        queue.remove(head)
    return order


def test_first_come_first_served() -> None:
    queue = FirstComeFirstServed()
    for request_id in (3, 1, 2):
        queue.push(request(request_id))
    assert len(queue) == 3
    assert drain(queue) == [3, 1, 2]
    assert len(queue) == 0


def test_the_preempted_come_before_all_that_never_ran() -> None:
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


def test_decode_rows_are_taken_off_the_token_budget() -> None:
    assert TokenBudget(32).begin(0, 0).prefill_tokens(context=0) == 32
    step = TokenBudget(32).begin(5, 100)
    assert step.prefill_tokens(context=0) == 27
    step.spend(20, context=0)
    assert step.prefill_tokens(context=1000) == 7


def test_an_empty_budget_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1, got 0"):
        TokenBudget(0)
