"""The token log after a process has exited: which requests are replayed, in which order, and which are not."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from quire.runtime.engine import Prefilled
from quire.runtime.workers.token_log import (
    MAX_UNBEGUN_EXITS,
    MAX_UNBEGUN_HOSTS,
    MAX_UNPRODUCTIVE_EXITS,
    ClosedRequest,
    TokenLog,
)
from quire.scheduler import BeamSpec, FinalCounters, Request, RequestSpec, RequestUpdate, SampledToken

from tests.support.clock import FakeClock
from tests.support.engine_processes import new_requests

NO_COUNTERS = FinalCounters()


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def log(clock: FakeClock) -> TokenLog:
    return TokenLog(clock)


def add(log: TokenLog, *ids: int, begun: bool = True) -> list[Request]:
    """Add requests that the process has accepted and, if `begun`, computes."""
    requests = new_requests(*ids)
    for request in requests:
        log.add(request)
    if begun:
        log.note_begun(Prefilled(request_id, 0) for request_id in ids)
    return requests


def gain(log: TokenLog, request_id: int, *token_ids: int) -> None:
    """Record one update for each token."""
    for token_id in token_ids:
        log.record(RequestUpdate(request_id, (SampledToken(request_id, token_id),)))


def end(log: TokenLog, request_id: int, counters: FinalCounters = NO_COUNTERS) -> FinalCounters | None:
    update = log.record(RequestUpdate(request_id, (), "length", None, counters))
    assert update is not None
    return update.counters


def sent(log: TokenLog) -> list[int]:
    """Send the requests that may be sent, and let the process begin to compute all of them."""
    ids = [entry.request.request_id for entry in log.next_to_send()]
    log.note_begun(Prefilled(request_id, 0) for request_id in ids)
    return ids


def ids(closed: Iterable[ClosedRequest | None]) -> list[int | None]:
    return [None if each is None else each.request_id for each in closed]


def test_tokens_are_recorded_after_those_that_the_request_had(log: TokenLog) -> None:
    request = Request(RequestSpec(1, (1, 2, 3), max_tokens=9), (7,))
    log.add(request)
    gain(log, 1, 8, 9)
    log.on_process_exit()
    (entry,) = log.next_to_send()
    assert (entry.request, entry.generated) == (request, [7, 8, 9])
    assert request.output_token_ids == [7], "it is its scheduler's to change"
    end(log, 1)
    assert len(log) == 0
    assert log.record(RequestUpdate(1)) is None


def test_the_time_of_the_first_token_is_kept(log: TokenLog, clock: FakeClock) -> None:
    add(log, 1)
    entry = log.sent(1)
    assert entry is not None
    clock.now = 105.0
    gain(log, 1, 8)
    clock.now = 109.0
    gain(log, 1, 9)
    assert entry.first_token_time == 105.0
    log.on_process_exit(from_outside=True)
    sent(log)
    clock.now = 120.0
    gain(log, 1, 10)
    assert entry.first_token_time == 105.0


def test_suspects_are_replayed_one_at_a_time_each_after_the_former_gained_tokens(log: TokenLog) -> None:
    add(log, 1, 2, 3)
    add(log, 4, begun=False)  # a waiting request is not a suspect
    assert log.on_process_exit() == ([], [])
    assert log.is_replaying
    assert sent(log) == [1]
    assert sent(log) == []
    gain(log, 1, 7)
    assert sent(log) == [], "the token of its prefill proves nothing about decoding"
    gain(log, 1, 7)
    assert sent(log) == [2]
    gain(log, 1, 7, 7)
    assert sent(log) == [], "the second has gained nothing yet"
    end(log, 2)
    assert sent(log) == [3]
    gain(log, 3, 7, 7)
    assert sent(log) == [4]
    assert not log.is_replaying


def test_only_the_request_that_was_computed_in_two_crashes_is_quarantined(log: TokenLog) -> None:
    add(log, 1, 2, 3)
    log.on_process_exit()
    sent(log)
    gain(log, 1, 7, 7)
    assert sent(log) == [2]
    assert ids(log.on_process_exit().quarantined) == [2]
    assert sent(log) == [1], "it had gained tokens, so the second crash makes it a suspect for the first time"
    gain(log, 1, 7, 7)
    assert sent(log) == [3]
    gain(log, 3, 7, 7)
    assert not log.is_replaying


def test_a_request_that_gains_tokens_after_each_crash_is_never_quarantined(log: TokenLog) -> None:
    add(log, 1)
    for _ in range(20):
        assert log.on_process_exit() == ([], [])
        assert sent(log) == [1]
        gain(log, 1, 7, 7)


def test_a_process_killed_from_outside_makes_no_request_a_suspect(log: TokenLog) -> None:
    add(log, 1, 2)
    for _ in range(3):
        assert log.on_process_exit(from_outside=True) == ([], [])
        assert sent(log) == [1, 2], "all at once, whether they gained a token or not"
    assert not log.is_replaying
    log.on_process_exit()
    assert sent(log) == [1]
    assert log.on_process_exit(from_outside=True) == ([], [])
    assert sent(log) == [1], "it remains a suspect"


def test_a_request_that_crashes_in_decoding_is_quarantined_too(log: TokenLog) -> None:
    add(log, 1, 2)
    gain(log, 1, 7)
    log.on_process_exit()
    sent(log)
    gain(log, 1, 7)  # token of the replay's prefill; the decoding step crashes
    assert ids(log.on_process_exit().quarantined) == [1]
    assert sent(log) == [2]


def test_exits_from_outside_count_as_crashes_when_they_repeat_before_any_token(log: TokenLog) -> None:
    """The kernel kills processes, too, when a request takes all memory."""
    add(log, 1, 2)
    gain(log, 1, 7)
    for _ in range(1 + MAX_UNPRODUCTIVE_EXITS):  # the first of them after a token
        assert log.on_process_exit(from_outside=True) == ([], [])
        assert sent(log) == [1, 2]
    log.on_process_exit(from_outside=True)
    assert sent(log) == [1], "one at a time now"
    gain(log, 1, 7, 7)
    assert sent(log) == [2]
    assert log.on_process_exit(from_outside=True) == ([], []), "a token was gained, so the count starts again"


def test_a_request_whose_readmission_crashes_processes_is_quarantined(log: TokenLog) -> None:
    add(log, 1, begun=False)
    for _ in range(MAX_UNBEGUN_EXITS):
        assert log.on_process_exit() == ([], [])
        log.next_to_send()
    assert ids(log.on_process_exit().quarantined) == [1]


def test_deadlines_pass_while_no_process_has_the_request(log: TokenLog, clock: FakeClock) -> None:
    (late,) = new_requests(1, deadline=105.0)
    log.add(late)
    add(log, 2)
    clock.now = 106.0
    assert log.expire() == [], "the process does that"
    log.on_process_exit()
    assert ids(log.expire()) == [1]
    assert len(log) == 1


def test_a_crash_before_a_suspect_is_computed_again_does_not_count(log: TokenLog) -> None:
    add(log, 1, 2)
    log.on_process_exit()
    assert [entry.request.request_id for entry in log.next_to_send()] == [1]  # sent, but not begun
    assert log.on_process_exit() == ([], [])
    assert sent(log) == [1]


def test_requests_that_were_given_up_are_not_replayed(log: TokenLog) -> None:
    add(log, 1, 2, 3)
    assert log.cancel(1) is True
    log.on_process_exit()
    assert len(log) == 2
    assert log.cancel(2) is False
    assert ids([log.forget(2)]) == [2]
    assert sent(log) == [3]
    assert ids([log.forget(3)]) == [3]
    assert not log.is_replaying
    assert log.forget(9) is None
    assert log.cancel(1) is False


def test_all_requests_can_be_given_up(log: TokenLog) -> None:
    add(log, 1, 2)
    log.on_process_exit()
    sent(log)
    add(log, 3)
    assert ids(log.forget_all()) == [1, 2, 3]
    assert (len(log), log.is_replaying) == (0, False)


def test_a_cancelled_request_is_returned_when_the_process_exits_before_it_reports_the_end(log: TokenLog) -> None:
    add(log, 1)
    log.cancel(1)
    assert ids(log.on_process_exit().cancelled) == [1]
    assert len(log) == 0


def test_a_beam_search_is_replayed_last_because_it_gains_no_token_before_its_end(log: TokenLog) -> None:
    (search,) = new_requests(1, beam=BeamSpec(2))
    log.add(search)
    log.note_begun([Prefilled(1, 0)])
    add(log, 2)
    log.on_process_exit()
    assert sent(log) == [2]
    gain(log, 2, 7, 7)
    assert sent(log) == [1]
    end(log, 1)
    assert not log.is_replaying


def test_every_second_is_counted_once_over_all_processes(log: TokenLog, clock: FakeClock) -> None:
    add(log, 1, begun=False)
    clock.now = 101.0  # 1 s of waiting
    log.note_begun([Prefilled(1, 2)])
    clock.now = 103.0  # 2 s of prefill
    gain(log, 1, 7, 7)
    clock.now = 106.0  # 3 s of decoding
    log.on_process_exit()
    clock.now = 110.0  # 4 s without a process
    sent(log)
    clock.now = 125.0
    total = end(log, 1, FinalCounters((5.0, 6.0, 4.0, 0.0, 0.0), 1))
    assert total is not None
    assert (total.queue_s, total.prefill_s, total.decode_s, total.stall_s) == (1.0, 8.0, 7.0, 9.0)
    assert sum(total.seconds_in) == 25.0
    assert total.cached_tokens == 2, "of the first process"
    assert total.recomputed_tokens == 3 + 2 - 1 - 1, "all known tokens but the last, less those that were cached"


def test_a_request_begins_once_in_each_process(log: TokenLog, clock: FakeClock) -> None:
    add(log, 1, begun=False)
    for cached_tokens in (16, 32):  # the second report comes after a preemption
        clock.now += 1
        log.note_begun([Prefilled(1, cached_tokens)])
    clock.now += 1
    closed = log.forget(1)
    assert closed is not None
    assert closed.counters == FinalCounters((1.0, 2.0, 0.0, 0.0, 0.0), cached_tokens=16)


def test_a_request_that_ends_without_counters_has_those_that_the_log_knows(log: TokenLog, clock: FakeClock) -> None:
    add(log, 1)
    clock.now = 103.0
    gain(log, 1, 7, 7)
    log.on_process_exit()
    clock.now = 105.0
    closed = log.forget(1)
    assert closed is not None
    assert not closed.was_sent
    counters = closed.counters
    assert (counters.prefill_s, counters.stall_s, sum(counters.seconds_in)) == (3.0, 2.0, 5.0)
    assert counters.recomputed_tokens == 3 + 2 - 1


def test_tokens_of_a_cancelled_request_were_not_computed_again(log: TokenLog) -> None:
    add(log, 1)
    gain(log, 1, 7, 7)
    closed = log.forget(1)
    assert closed is not None
    assert (closed.was_sent, closed.counters.recomputed_tokens) == (True, 0)


def test_a_request_that_another_log_adopts_keeps_its_seconds(log: TokenLog, clock: FakeClock) -> None:
    add(log, 1)
    clock.now = 103.0
    gain(log, 1, 7, 7)
    clock.now = 105.0
    entry = log.give_up(1)
    assert entry is not None
    other = TokenLog(clock)
    other.adopt(entry)
    assert other.unsent_ids == [1]
    clock.now = 109.0
    closed = other.forget(1)
    assert closed is not None
    assert closed.counters == FinalCounters((0.0, 3.0, 2.0, 4.0, 0.0), recomputed_tokens=3 + 2 - 1)


def test_a_request_that_no_host_has_begun_survives_many_lost_hosts(log: TokenLog) -> None:
    add(log, 1, begun=False)
    for _ in range(MAX_UNBEGUN_HOSTS - 1):
        assert log.on_host_lost(is_blameless=False) == ([], [])
        assert len(log.next_to_send()) == 1
    assert ids(log.on_host_lost(is_blameless=False).quarantined) == [1]
