"""Requests without an answer: which are sent, in which order, and which a crash quarantines."""

from __future__ import annotations

import asyncio

import pytest
from quire.runtime.common.errors import Quarantined
from quire.runtime.workers.engine_link import AddAnswer
from quire.runtime.workers.pending_adds import PendingAdd, PendingAdds
from quire.scheduler import NotAccepting

from tests.support.engine_processes import ESTIMATE, new_requests


def add(pending: PendingAdds, *ids: int) -> list[PendingAdd]:
    return [pending.add(new_requests(request_id)) for request_id in ids]


def sent(pending: PendingAdds) -> list[int]:
    return [each.first_id for each in pending.send()]


async def test_requests_are_sent_once_in_their_order() -> None:
    pending = PendingAdds()
    add(pending, 1, 2)
    assert sent(pending) == [1, 2]
    add(pending, 3)
    assert sent(pending) == [3]
    assert len(pending) == 3


async def test_samples_of_one_request_are_one_entry_and_count_each() -> None:
    pending = PendingAdds()
    each = pending.add(new_requests(5, 6, 7))
    add(pending, 8)
    assert (len(pending), pending.num_sequences) == (2, 4)
    assert sent(pending) == [5, 8]
    assert pending.answered(6) is None
    assert pending.answered(5) is each
    assert pending.num_sequences == 1


async def test_an_answer_that_no_caller_waits_for() -> None:
    pending = PendingAdds()
    (each,) = add(pending, 1)
    assert not pending.remove(each), "it was never sent"
    assert sent(pending) == []
    (each,) = add(pending, 2)
    sent(pending)
    assert pending.remove(each), "the engine may have it"
    assert pending.answered(2) is None
    assert not pending.remove(each)
    assert len(pending) == 0


async def test_after_a_crash_sent_ones_go_first_one_at_a_time_in_their_order() -> None:
    pending = PendingAdds()
    add(pending, 1, 2, 3)
    sent(pending)
    add(pending, 4, 5)
    assert pending.on_process_exit(from_outside=False) == 0
    for request_id in (1, 2, 3):
        assert sent(pending) == [request_id]
        assert sent(pending) == [], "until it is answered"
        pending.answered(request_id)
    assert sent(pending) == [4, 5], "these were never sent to a process that crashed"


async def test_only_the_one_that_was_sent_alone_is_quarantined_by_a_second_crash() -> None:
    pending = PendingAdds()
    first, second, third = add(pending, 1, 2, 3)
    sent(pending)
    pending.on_process_exit(from_outside=False)
    assert sent(pending) == [1]
    assert pending.on_process_exit(from_outside=False) == 1
    assert isinstance(first.answer.exception(), Quarantined)
    assert not second.answer.done()
    assert sent(pending) == [2]
    pending.answered(2)
    assert sent(pending) == [3]
    assert not third.answer.done()


async def test_a_process_killed_from_outside_makes_no_request_a_suspect() -> None:
    pending = PendingAdds()
    add(pending, 1, 2)
    for _ in range(3):
        assert sent(pending) == [1, 2]
        assert pending.on_process_exit(from_outside=True) == 0
    sent(pending)
    pending.on_process_exit(from_outside=False)
    assert sent(pending) == [1]
    assert pending.on_process_exit(from_outside=True) == 0, "this exit proves nothing"
    assert sent(pending) == [1], "and it is a suspect still"


async def test_a_caller_that_left_is_not_sent_again() -> None:
    pending = PendingAdds()
    first, _ = add(pending, 1, 2)
    sent(pending)
    first.answer.cancel()
    pending.on_process_exit(from_outside=False)
    assert sent(pending) == [2]


async def test_refusing_reaches_every_caller_that_still_waits() -> None:
    pending = PendingAdds()
    first, second = add(pending, 1, 2)
    sent(pending)
    (third,) = add(pending, 3)
    first.answer.set_result(AddAnswer(1, ESTIMATE, 0))
    assert pending.refuse_all(NotAccepting("the engine was closed")) == [first, second]
    assert first.answer.result().estimate == ESTIMATE
    for each in (second, third):
        with pytest.raises(NotAccepting, match="the engine was closed"):
            await asyncio.wait_for(each.answer, 1)
    assert len(pending) == 0
    assert sent(pending) == []
