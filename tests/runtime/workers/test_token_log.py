"""The token log after a crash: who goes back, in which order, and who must not."""

from __future__ import annotations

import pytest
from quire.runtime.engine import Prefilled
from quire.runtime.workers.token_log import MAX_UNBEGUN_EXITS, MAX_UNPRODUCTIVE_EXITS, TokenLog
from quire.scheduler import BeamSpec, FinalCounters, Request, RequestSpec, RequestUpdate, SampledToken, State


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def log(clock: Clock) -> TokenLog:
    return TokenLog(clock)


def add(log: TokenLog, *ids: int, begun: bool = True) -> list[Request]:
    requests = [Request(RequestSpec(request_id, (1, 2, 3), max_tokens=10)) for request_id in ids]
    for request in requests:
        log.add(request)
    if begun:
        log.note_begun(Prefilled(request_id, 0) for request_id in ids)
    return requests


def token(log: TokenLog, request_id: int, token_id: int = 7) -> None:
    log.take(RequestUpdate(request_id, (SampledToken(request_id, token_id),)))


def prove(log: TokenLog, request_id: int) -> None:
    """One token of prefill, one of decoding."""
    token(log, request_id)
    token(log, request_id)


def end(log: TokenLog, request_id: int, counters: FinalCounters = FinalCounters((0.0,) * len(State), 0, 0, ())) -> None:  # noqa: B008
    log.take(RequestUpdate(request_id, (), "length", None, counters))


def sent(log: TokenLog) -> list[int]:
    """Sent and, the engine being quick, begun."""
    ids = [request.request_id for request in log.next_to_send()]
    log.note_begun(Prefilled(request_id, 0) for request_id in ids)
    return ids


def test_tokens_are_written_down(log: TokenLog) -> None:
    (request,) = add(log, 1)
    token(log, 1, 8)
    token(log, 1, 9)
    assert request.output_token_ids == [8, 9]
    end(log, 1)
    assert len(log) == 0


def test_suspects_go_back_one_at_a_time_each_after_the_one_before_has_proved_itself(log: TokenLog) -> None:
    add(log, 1, 2, 3)
    add(log, 4, begun=False)  # waited: it cannot have been the cause
    assert log.on_process_exit() == ([], [])
    assert log.is_replaying
    assert sent(log) == [1]
    assert sent(log) == []
    token(log, 1)
    assert sent(log) == [], "the token of its prefill proves nothing about decoding"
    token(log, 1)
    assert sent(log) == [2]
    prove(log, 1)
    assert sent(log) == [], "the second has gained nothing yet"
    end(log, 2)
    assert sent(log) == [3]
    prove(log, 3)
    assert sent(log) == [4]
    assert not log.is_replaying


def test_who_kills_it_twice_is_quarantined_alone(log: TokenLog) -> None:
    add(log, 1, 2, 3)
    log.on_process_exit()
    sent(log)
    prove(log, 1)
    assert sent(log) == [2]
    ended = log.on_process_exit()
    assert [request.request_id for request in ended.quarantined] == [2]
    assert sent(log) == [1], "it had proved itself, so it is on trial anew"
    prove(log, 1)
    assert sent(log) == [3]
    prove(log, 3)
    assert not log.is_replaying


def test_who_survives_its_trial_may_meet_another_crash(log: TokenLog) -> None:
    add(log, 1)
    for _ in range(20):
        assert log.on_process_exit() == ([], [])
        assert sent(log) == [1]
        prove(log, 1)


def test_a_process_that_others_killed_accuses_nobody(log: TokenLog) -> None:
    add(log, 1, 2)
    for _ in range(3):
        assert log.on_process_exit(by_others=True) == ([], [])
        assert sent(log) == [1, 2], "all at once, whether they gained a token or not"
    assert not log.is_replaying
    log.on_process_exit()
    assert sent(log) == [1]
    assert log.on_process_exit(by_others=True) == ([], [])
    assert sent(log) == [1], "still on trial"


def test_who_kills_it_in_decoding_is_found_too(log: TokenLog) -> None:
    add(log, 1, 2)
    token(log, 1)
    log.on_process_exit()
    sent(log)
    token(log, 1)  # of the replay's prefill; its next step kills
    ended = log.on_process_exit()
    assert [request.request_id for request in ended.quarantined] == [1]
    assert sent(log) == [2]


def test_others_are_not_believed_for_ever(log: TokenLog) -> None:
    """The system's own killer comes from outside too, for whatever takes its memory."""
    add(log, 1, 2)
    for _ in range(MAX_UNPRODUCTIVE_EXITS):
        assert log.on_process_exit(by_others=True) == ([], [])
        assert sent(log) == [1, 2]
    log.on_process_exit(by_others=True)
    assert sent(log) == [1], "one at a time now"
    prove(log, 1)
    assert sent(log) == [2]
    assert log.on_process_exit(by_others=True) == ([], []), "somebody gained something, so others are believed again"


def test_who_kills_it_by_being_taken_on_again_is_found(log: TokenLog) -> None:
    add(log, 1, begun=False)
    for _ in range(MAX_UNBEGUN_EXITS):
        assert log.on_process_exit() == ([], [])
        log.next_to_send()
    assert [request.request_id for request in log.on_process_exit().quarantined] == [1]


def test_deadlines_pass_while_nobody_computes(log: TokenLog, clock: Clock) -> None:
    late = Request(RequestSpec(1, (1, 2), max_tokens=4, deadline=105.0))
    log.add(late)
    add(log, 2)
    clock.now = 106.0
    assert log.expire() == [], "the engine sees to that"
    log.on_process_exit()
    assert log.expire() == [late]
    assert len(log) == 1


def test_a_process_that_dies_before_it_computed_anything_accuses_nobody(log: TokenLog) -> None:
    add(log, 1, 2)
    log.on_process_exit()
    assert [request.request_id for request in log.next_to_send()] == [1]  # sent, but never begun
    assert log.on_process_exit() == ([], [])
    assert sent(log) == [1]


def test_what_is_given_up_does_not_come_back(log: TokenLog) -> None:
    first, second, _ = add(log, 1, 2, 3)
    assert log.cancel(1) is True, "the engine has to be told"
    log.on_process_exit()
    assert len(log) == 2
    assert log.cancel(2) is second, "nobody has to be told"
    assert sent(log) == [3]
    assert log.forget(3) is True
    assert not log.is_replaying
    assert log.forget(9) is False
    assert log.cancel(first.request_id) is False


def test_a_cancelled_one_is_returned_by_the_crash_that_swallowed_its_end(log: TokenLog) -> None:
    (request,) = add(log, 1)
    log.cancel(1)
    assert log.on_process_exit() == ([], [request])
    assert len(log) == 0


def test_a_search_goes_last_since_it_gains_no_token_before_its_end(log: TokenLog) -> None:
    log.add(Request(RequestSpec(1, (1, 2), max_tokens=4, beam=BeamSpec(2))))
    log.note_begun([Prefilled(1, 0)])
    add(log, 2)
    log.on_process_exit()
    assert sent(log) == [2]
    prove(log, 2)
    assert sent(log) == [1]
    end(log, 1)
    assert not log.is_replaying


def test_every_second_is_counted_once_over_all_lives(log: TokenLog, clock: Clock) -> None:
    (request,) = add(log, 1, begun=False)
    clock.now = 101.0  # waited 1 s
    log.note_begun([Prefilled(1, 2)])
    clock.now = 103.0  # prefilled 2 s
    token(log, 1)
    token(log, 1)
    clock.now = 106.0  # decoded 3 s
    log.on_process_exit()
    clock.now = 110.0  # no process for 4 s
    sent(log)
    clock.now = 125.0
    end(log, 1, FinalCounters((5.0, 6.0, 4.0, 0.0, 0.0), 1, 0, ()))
    assert (request.queue_s, request.prefill_s, request.decode_s, request.stall_s) == (1.0, 8.0, 7.0, 9.0)
    assert sum(request.seconds_in) == 25.0
    assert request.cached_tokens == 2, "of its first life"
    assert request.recomputed_tokens == 3 + 2 - 1 - 1, "all that it knew, but for the last and what was cached"
