"""A request's states, times and finish reasons."""

from __future__ import annotations

from typing import Any

import pytest
from quire.scheduler import TRANSITIONS, Request, RequestSpec, State

LIVE = [State.WAITING, State.PREFILL, State.DECODE, State.PREEMPTED]


def request(**options: Any) -> Request:
    return Request(RequestSpec(1, [5, 6, 7], **{"max_tokens": 3, **options}))


def with_output(*tokens: int, **options: Any) -> Request:
    made = request(**options)
    for token in tokens:
        made.append(token, 0.0)
    return made


@pytest.mark.parametrize("state", LIVE)
def test_a_request_can_end_in_every_live_state(state: State) -> None:
    assert State.ENDED in TRANSITIONS[state]


def test_nothing_follows_the_end() -> None:
    assert TRANSITIONS[State.ENDED] == frozenset()


@pytest.mark.parametrize("before", list(State))
@pytest.mark.parametrize("after", list(State))
def test_only_listed_transitions_happen(before: State, after: State) -> None:
    made = request()
    made.state = before
    if after in TRANSITIONS[before]:
        made.enter(after, 1.0)
        assert made.state is after
    else:
        with pytest.raises(ValueError, match=f"cannot go from {before.name} to {after.name}"):
            made.enter(after, 1.0)
        assert made.state is before


def test_every_second_is_counted_in_exactly_one_state() -> None:
    made = request()
    made.arrive(order=0, now=10.0)
    made.enter(State.PREFILL, 11.0)
    made.enter(State.PREEMPTED, 13.0)
    made.enter(State.PREFILL, 17.0)
    made.enter(State.DECODE, 25.0)
    made.enter(State.ENDED, 41.0)
    counters = made.final_counters()
    assert (counters.queue_s, counters.prefill_s, counters.stall_s, counters.decode_s) == (1.0, 10.0, 4.0, 16.0)


def test_the_last_allowed_token_ends_by_length() -> None:
    assert with_output(1, 2).natural_end() is None
    assert with_output(1, 2, 3).natural_end() == "length"


def test_a_stop_token_ends_even_as_the_last_allowed_one() -> None:
    stops = frozenset({9})
    assert with_output(1, 9, stop_token_ids=stops).natural_end() == "stop"
    assert with_output(1, 2, 9, stop_token_ids=stops).natural_end() == "stop"


def test_stop_tokens_count_only_from_min_tokens_on() -> None:
    stops = frozenset({9})
    assert with_output(9, stop_token_ids=stops, min_tokens=2).natural_end() is None
    assert with_output(9, 9, stop_token_ids=stops, min_tokens=2).natural_end() == "stop"


def test_prompt_and_output_are_separate() -> None:
    made = with_output(1, 2)
    assert (made.token_ids, made.output_token_ids, made.num_prompt_tokens) == ([5, 6, 7, 1, 2], [1, 2], 3)


def test_a_request_copies_its_prompt() -> None:
    prompt = [5, 6]
    made = Request(RequestSpec(1, prompt, max_tokens=1))
    made.append(7, 0.0)
    assert prompt == [5, 6]


@pytest.mark.parametrize(("prompt", "max_tokens", "message"), [([], 1, "1 prompt token"), ([1], 0, "max_tokens")])
def test_impossible_requests_are_refused(prompt: list[int], max_tokens: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Request(RequestSpec(1, prompt, max_tokens=max_tokens))


def test_echoed_tokens_end_nothing_and_count_towards_max_tokens() -> None:
    echo = {"max_tokens": 4, "stop_token_ids": frozenset({9}), "echoed": (9, 9)}
    assert with_output(9, **echo).natural_end() is None
    assert with_output(9, 9, **echo).natural_end() is None
    assert with_output(9, 9, 9, **echo).natural_end() == "stop"
    assert with_output(9, 9, 9, **echo, min_tokens=2).natural_end() is None
    assert with_output(9, 9, 1, 1, **echo).natural_end() == "length"
