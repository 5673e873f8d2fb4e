"""Guesses: the same tokens in fewer steps, where verifying them pays, and none where it does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from quire.scheduler import Coefficients, CostModel, SampledToken, State
from quire.scheduler.speculative import NGramIndex

MakeWorld = Callable[..., Any]
Expected = Callable[..., list[int]]
CHEAP_ROWS = Coefficients(20e-3, 1e-4, 1e-3, 0.0, 0.0)
DEAR_ROWS = Coefficients(1e-4, 20e-3, 1e-3, 0.0, 0.0)
PERIODIC = [1, 0, 0, 1, 1, 0] * 4


def speculative(make_world: MakeWorld, coefficients: Coefficients = CHEAP_ROWS, **options: Any) -> Any:
    options = {"vocabulary": 2, "num_pages": 64, "num_speculative_tokens": 4, **options}
    return make_world(cost=CostModel(coefficients), **options)


@pytest.mark.parametrize("prompt", [PERIODIC, [1, 0] * 9, [1], [0, 0, 1, 0, 1, 1, 0, 1, 0, 0, 0, 1]])
@pytest.mark.parametrize("max_tokens", [1, 2, 40])
def test_on_or_off_the_tokens_are_the_same(
    make_world: MakeWorld, expected: Expected, prompt: list[int], max_tokens: int
) -> None:
    world = speculative(make_world)
    world.add(1, prompt, max_tokens)
    steps = world.run()
    assert world.outputs[1] == expected(prompt, max_tokens, 2)
    assert steps == max_tokens - world.requests[1].accepted_draft_tokens
    assert world.scheduler.stats().pages_owned == 0


def test_right_guesses_save_steps_and_are_counted(make_world: MakeWorld) -> None:
    world = speculative(make_world)
    world.add(1, PERIODIC, max_tokens=60)
    assert world.run() < 50
    stats = world.scheduler.stats()
    assert 0 < stats.accepted_draft_tokens < stats.draft_tokens
    assert stats.accepted_draft_tokens == world.requests[1].accepted_draft_tokens


def test_a_stop_token_among_right_guesses_ends_the_request_there(make_world: MakeWorld, expected: Expected) -> None:
    for min_tokens in range(1, 30):
        world = speculative(make_world)
        world.add(1, PERIODIC, max_tokens=60, min_tokens=min_tokens, stop_token_ids=frozenset({1}))
        world.run()
        tokens = expected(PERIODIC, 60, 2)
        assert world.outputs[1] == tokens[: tokens.index(1, min_tokens - 1) + 1]


def test_guesses_that_cost_more_than_they_save_are_not_verified(make_world: MakeWorld) -> None:
    world = speculative(make_world, DEAR_ROWS)
    world.add(1, PERIODIC, max_tokens=60)
    assert world.run() == 60
    assert world.scheduler.stats().draft_tokens == 0


def test_the_wider_the_batch_the_fewer_guesses(make_world: MakeWorld) -> None:
    """A row costs a tenth of a step: alone a guess pays, among many, where a token costs no more than a row, none."""
    guessed = {}
    for users in (1, 4, 24):
        world = speculative(make_world, Coefficients(20e-3, 2e-3, 1e-3, 0.0, 0.0), max_num_seqs=32, num_pages=600)
        for user in range(users):
            world.add(user, PERIODIC, max_tokens=30)
        world.run()
        guessed[users] = world.scheduler.stats().draft_tokens / users
    assert guessed[1] > guessed[4] > guessed[24] == 0


def test_nothing_is_guessed_while_anything_prefills_or_waits(make_world: MakeWorld) -> None:
    world = speculative(make_world, max_num_seqs=2, max_num_batched_tokens=8)
    world.add(1, PERIODIC, max_tokens=60)
    for _ in range(10):
        world.step()
    world.add(2, PERIODIC * 2, max_tokens=30)
    while world.requests[2].state is not State.DECODE:
        assert world.step().num_decode_rows <= 1


@pytest.mark.parametrize("windows", [(0,), (3,), (0, 2)])
@pytest.mark.parametrize("spoils", ["its own row", "all rows"])
def test_a_wrong_guess_that_is_not_a_number_leaves_no_trace(
    make_world: MakeWorld, expected: Expected, windows: tuple[int, ...], spoils: str
) -> None:
    """Its key and value may not be numbers either. The others of the step may have read them: their samples are lost.
    Their page is written anew from its first slot, where a window has left what that needs, everything is.
    """
    spoilt = rewritten = from_the_start = 0
    for length in range(56, 68):  # in one of them, a guess is wrong just behind the end of the first tile
        world = speculative(make_world, windows=windows)
        prompt = (PERIODIC * 3)[:length]
        world.add(1, prompt, max_tokens=20)
        while (plan := world.scheduler.schedule()) is not None:
            row = plan.sequences[0]
            result = world.execute(plan)
            samples = list(result.sampled)
            right = [row.token_ids[i + 1] == samples[i].token_id for i in range(len(samples) - 1)]
            if len(samples) > 1 and False in right:
                spoilt += 1
                first = right.index(False) + 1 if spoils == "its own row" else 0
                samples[first:] = [SampledToken(1, -1, error="not a number")] * (len(samples) - first)
            for update in world.scheduler.commit(type(result)(result.step_id, tuple(samples), 0.0)):
                world.note(update)
            request = world.requests[1]
            if len(samples) > 1 and request.state is State.PREFILL:
                rewritten += 1
                from_the_start += request.num_computed_tokens == 0
                assert request.num_computed_tokens % 4 == 0
        assert world.outputs[1] == expected(prompt, 20, 2)
    assert 0 < rewritten <= spoilt
    assert (from_the_start > 0) == (windows != (0,))


@pytest.mark.parametrize("num_steps", [1, 2, 3, 4, 5, 6])
def test_what_is_not_a_number_without_guesses_either_ends_the_request(make_world: MakeWorld, num_steps: int) -> None:
    world = speculative(make_world)
    world.add(1, PERIODIC, max_tokens=40)
    for _ in range(num_steps):
        world.step()
    world.failing[1] = "not a number"
    world.run(3)
    assert world.ended[1] == "not a number"


def test_the_longest_known_run_is_looked_up_first() -> None:
    ngrams = NGramIndex()
    tokens = [1, 2, 3, 4, 9, 9, 3, 4, 8, 1, 2, 3, 4]
    ngrams.extend(tokens)
    assert ngrams.draft(tokens, 3) == [9, 9, 3]
    tokens += [7, 7, 3, 4]
    ngrams.extend(tokens)
    assert ngrams.draft(tokens, 2) == [7, 7]  # of the two tokens, the last place
    assert ngrams.draft([5], 2) == []


def test_drafts_of_an_ended_request_are_forgotten(make_world: MakeWorld, expected: Expected) -> None:
    """A later request with the same id is drafted as if it were the first."""
    prompt = PERIODIC[:13]
    fresh = speculative(make_world)
    fresh.add(1, prompt, max_tokens=30)
    fresh.run()
    world = speculative(make_world)
    world.add(1, [0, 1, 1] * 9, max_tokens=30)
    world.run()
    before = world.scheduler.stats().draft_tokens
    world.ended.clear()
    world.add(1, prompt, max_tokens=30)
    world.run()
    assert world.outputs[1] == expected(prompt, 30, 2)
    assert world.scheduler.stats().draft_tokens - before == fresh.scheduler.stats().draft_tokens > 0


def test_drafts_are_for_one_step(make_world: MakeWorld, expected: Expected) -> None:
    """Steps with drafts are followed by steps without, while another request waits."""
    world = speculative(make_world, max_num_seqs=1, max_num_samples=8)
    world.add(1, PERIODIC, max_tokens=60)
    while not world.requests[1].accepted_draft_tokens and not world.ended:
        world.step()
    assert not world.ended
    world.add(2, [1], max_tokens=1)
    plan = world.scheduler.schedule()
    (row,) = plan.sequences
    assert (len(row.token_ids), row.num_samples, row.context) == (1, 1, world.requests[1].token_ids)
    world.commit(plan)
    world.cancel(2)
    world.run()
    assert world.outputs[1] == expected(PERIODIC, 60, 2)


def test_the_acceptance_rate_follows_what_was_accepted_and_recovers() -> None:
    ngrams = NGramIndex()
    start = ngrams.acceptance_rate
    ngrams.note(3, 3)
    high = ngrams.acceptance_rate
    ngrams.note(3, 0)  # only the first of the three is known to be wrong
    assert start < ngrams.acceptance_rate < high
    for _ in range(20):
        ngrams.note(2, 0)
    low = ngrams.acceptance_rate
    for _ in range(500):
        ngrams.recover()
    assert low < 0.01
    assert ngrams.acceptance_rate == pytest.approx(start, rel=0.01)
