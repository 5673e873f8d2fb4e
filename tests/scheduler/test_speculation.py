"""Draft tokens: the same output in fewer steps where verifying them pays, and no drafts where it does not."""

from __future__ import annotations

import random
from typing import Any

import pytest
from quire.scheduler import Coefficients, CostModel, SampledToken, State, StepPlan, StepResult
from quire.scheduler.acceptance import AcceptanceRate, DraftLengths
from quire.scheduler.drafters import NGramIndex

from tests.scheduler.conftest import Expected, MakeHarness

CHEAP_ROWS = Coefficients(20e-3, 1e-4, 1e-3, 0.0, 0.0)
DEAR_ROWS = Coefficients(1e-4, 20e-3, 1e-3, 0.0, 0.0)
PERIODIC = [1, 0, 0, 1, 1, 0] * 4


def speculative(make_harness: MakeHarness, coefficients: Coefficients = CHEAP_ROWS, **options: Any) -> Any:
    options = {"vocabulary": 2, "num_pages": 64, "num_speculative_tokens": 4, **options}
    return make_harness(cost=CostModel(coefficients), **options)


@pytest.mark.parametrize("prompt", [PERIODIC, [1, 0] * 9, [1], [0, 0, 1, 0, 1, 1, 0, 1, 0, 0, 0, 1]])
@pytest.mark.parametrize("max_tokens", [1, 2, 40])
def test_drafts_do_not_change_the_tokens(
    make_harness: MakeHarness, expected: Expected, prompt: list[int], max_tokens: int
) -> None:
    harness = speculative(make_harness)
    harness.add(1, prompt, max_tokens)
    steps = harness.run()
    assert harness.outputs[1] == expected(prompt, max_tokens, 2)
    assert steps == max_tokens - harness.requests[1].accepted_draft_tokens
    assert harness.scheduler.stats().pages_owned == 0


def test_accepted_drafts_save_steps_and_are_counted(make_harness: MakeHarness) -> None:
    harness = speculative(make_harness)
    harness.add(1, PERIODIC, max_tokens=60)
    assert harness.run() < 50
    stats = harness.scheduler.stats()
    assert 0 < stats.accepted_draft_tokens < stats.draft_tokens
    assert stats.accepted_draft_tokens == harness.requests[1].accepted_draft_tokens
    assert sum(stats.drafted_by_source.values()) == stats.draft_tokens
    assert sum(stats.accepted_by_source.values()) == sum(stats.accepted_by_position.values())
    assert sum(stats.accepted_by_position.values()) == stats.accepted_draft_tokens
    counts = [stats.accepted_by_position[str(position)] for position in range(len(stats.accepted_by_position))]
    assert counts == sorted(counts, reverse=True)


def test_a_stop_token_among_accepted_drafts_ends_the_request_there(
    make_harness: MakeHarness, expected: Expected
) -> None:
    for min_tokens in range(1, 30):
        harness = speculative(make_harness)
        harness.add(1, PERIODIC, max_tokens=60, min_tokens=min_tokens, stop_token_ids=frozenset({1}))
        harness.run()
        tokens = expected(PERIODIC, 60, 2)
        assert harness.outputs[1] == tokens[: tokens.index(1, min_tokens - 1) + 1]


def test_a_text_that_was_drafted_badly_is_drafted_again_later(make_harness: MakeHarness) -> None:
    harness = speculative(make_harness, num_pages=100)
    harness.add(1, PERIODIC, max_tokens=200)
    for _ in range(3):
        harness.step()
    before = harness.scheduler.stats().draft_tokens
    for rate in harness.scheduler._speculator._records[1].rates:
        rate.value = 0.0
    harness.step()
    assert harness.scheduler.stats().draft_tokens == before
    harness.run()
    assert harness.scheduler.stats().draft_tokens > before


def test_drafts_that_cost_more_than_they_save_are_not_verified(make_harness: MakeHarness) -> None:
    harness = speculative(make_harness, DEAR_ROWS)
    harness.add(1, PERIODIC, max_tokens=60)
    assert harness.run() == 60
    assert harness.scheduler.stats().draft_tokens == 0


def test_wider_batches_make_fewer_drafts(make_harness: MakeHarness) -> None:
    """A row costs a tenth of a step: a draft pays for one sequence, but not in a batch whose tokens cost a row."""
    drafted = {}
    for users in (1, 4, 24):
        harness = speculative(make_harness, Coefficients(20e-3, 2e-3, 1e-3, 0.0, 0.0), max_num_seqs=32, num_pages=600)
        for user in range(users):
            harness.add(user, PERIODIC, max_tokens=30)
        harness.run()
        drafted[users] = harness.scheduler.stats().draft_tokens / users
    assert drafted[1] > drafted[4] > drafted[24] == 0


@pytest.mark.parametrize("max_num_samples", [3, 5, 8])
def test_a_step_with_drafts_samples_no_more_rows_than_it_may(make_harness: MakeHarness, max_num_samples: int) -> None:
    harness = speculative(make_harness, max_num_samples=max_num_samples)
    for request_id in range(3):
        harness.add(request_id, PERIODIC, max_tokens=30)
    most = 0
    while (plan := harness.step()) is not None:
        most = max(most, sum(row.num_samples for row in plan.sequences))
    assert most == max_num_samples


def test_no_drafts_while_a_request_prefills_or_waits(make_harness: MakeHarness) -> None:
    harness = speculative(make_harness, max_num_seqs=2, max_num_batched_tokens=8)
    harness.add(1, PERIODIC, max_tokens=60)
    for _ in range(10):
        harness.step()
    harness.add(2, PERIODIC * 2, max_tokens=30)
    while harness.requests[2].state is not State.DECODE:
        assert harness.step().num_decode_rows <= 1


@pytest.mark.parametrize("windows", [(0,), (3,), (0, 2)])
@pytest.mark.parametrize("spoils", ["its own row", "all rows"])
def test_a_rejected_draft_that_produced_nan_leaves_no_trace(
    make_harness: MakeHarness, expected: Expected, windows: tuple[int, ...], spoils: str
) -> None:
    """The key and value of the draft may be NaN, and other rows of the step may have read them, so they fail, too.

    The page is computed again from its first slot, or the whole sequence if a window has released earlier pages.
    """
    spoilt = rewritten = from_the_start = 0
    for length in range(56, 68):  # lengths in one of which a draft is rejected just after the first tile
        harness = speculative(make_harness, windows=windows)
        prompt = (PERIODIC * 3)[:length]
        harness.add(1, prompt, max_tokens=20)
        while (plan := harness.scheduler.schedule()) is not None:
            row = plan.sequences[0]
            result = harness.execute(plan)
            samples = list(result.sampled)
            right = [row.token_ids[i + 1] == samples[i].token_id for i in range(len(samples) - 1)]
            if len(samples) > 1 and False in right:
                spoilt += 1
                first = right.index(False) + 1 if spoils == "its own row" else 0
                samples[first:] = [SampledToken(1, -1, error="NaN")] * (len(samples) - first)
            for update in harness.scheduler.commit(type(result)(result.step_id, tuple(samples), 0.0)):
                harness.note(update)
            request = harness.requests[1]
            if len(samples) > 1 and request.state is State.PREFILL:
                rewritten += 1
                from_the_start += request.num_computed_tokens == 0
                assert request.num_computed_tokens % 4 == 0
        assert harness.outputs[1] == expected(prompt, 20, 2)
    assert 0 < rewritten <= spoilt
    assert (from_the_start > 0) == (windows != (0,))


@pytest.mark.parametrize("num_steps", [1, 2, 3, 4, 5, 6])
def test_nan_without_drafts_ends_the_request(make_harness: MakeHarness, num_steps: int) -> None:
    harness = speculative(make_harness)
    harness.add(1, PERIODIC, max_tokens=40)
    for _ in range(num_steps):
        harness.step()
    harness.failing[1] = "NaN"
    harness.run(3)
    assert harness.ended[1] == "NaN"


def test_the_longest_indexed_run_is_looked_up_first() -> None:
    ngrams = NGramIndex()
    tokens = [1, 2, 3, 4, 9, 9, 3, 4, 8, 1, 2, 3, 4]
    ngrams.extend(tokens)
    assert ngrams.draft(tokens, 3) == [9, 9, 3]
    tokens += [7, 7, 3, 4]
    ngrams.extend(tokens)
    assert ngrams.draft(tokens, 2) == [7, 7]  # tokens after the last occurrence
    assert ngrams.draft([5], 2) == []


def test_drafts_of_an_ended_request_are_forgotten(make_harness: MakeHarness, expected: Expected) -> None:
    """A later request with the same id has another text."""
    harness = speculative(make_harness)
    speculator = harness.scheduler._speculator
    lookup, suffixes = speculator._drafters
    for prompt in ([0, 1, 1] * 9, PERIODIC[:13]):
        harness.add(1, prompt, max_tokens=30)
        for _ in range(4):
            harness.step()
        assert list(speculator._records) == list(lookup._indexes) == [1]
        harness.run()
        assert harness.outputs[1] == expected(prompt, 30, 2)
        assert not speculator._records
        assert not lookup._indexes
        assert not suffixes._places
        harness.ended.clear()


def test_drafts_are_for_one_step(make_harness: MakeHarness, expected: Expected) -> None:
    """Steps with drafts are followed by steps without, while another request waits."""
    harness = speculative(make_harness, max_num_seqs=1, max_num_samples=8)
    harness.add(1, PERIODIC, max_tokens=60)
    while not harness.requests[1].accepted_draft_tokens and not harness.ended:
        harness.step()
    assert not harness.ended
    harness.add(2, [1], max_tokens=1)
    plan = harness.scheduler.schedule()
    (row,) = plan.sequences
    assert (len(row.token_ids), row.num_samples, row.context) == (1, 1, harness.requests[1].token_ids)
    harness.commit(plan)
    harness.cancel(2)
    harness.run()
    assert harness.outputs[1] == expected(PERIODIC, 60, 2)


def test_the_acceptance_rate_follows_what_was_accepted_and_recovers() -> None:
    rate = AcceptanceRate()
    rate.note(3, 3)
    assert rate.value == pytest.approx(1 - 0.5 * 0.8**3)
    rate.note(3, 0)  # only the first of the three is known to be wrong
    assert rate.value == pytest.approx(0.8 * (1 - 0.5 * 0.8**3))
    for _ in range(20):
        rate.note(2, 0)
    assert rate.value < 0.01
    for _ in range(1000):
        rate.recover()
    assert rate.value == pytest.approx(0.5, rel=0.01)


@pytest.mark.parametrize("acceptance_rate", [0.0, 0.2, 0.5, 0.8, 0.95, 1.0])
@pytest.mark.parametrize(("seconds", "rows", "cost"), [(20.0, 1, 1.0), (20.0, 4, 2.0), (68.0, 24, 2.0), (20.0, 1, 9.0)])
def test_a_draft_has_the_length_with_the_most_expected_tokens_per_second(
    acceptance_rate: float, seconds: float, rows: int, cost: float
) -> None:
    def tokens_per_second(length: int) -> float:
        expected = rows * sum(acceptance_rate**j for j in range(length + 1))
        return expected / (seconds + rows * length * cost)

    best = max(range(17), key=lambda length: (tokens_per_second(length), -length))
    assert DraftLengths(seconds, rows, cost).best(acceptance_rate, 16) == best
    assert DraftLengths(seconds, rows, cost).best(acceptance_rate, 2) == min(best, 2)


@pytest.mark.parametrize("windows", [(0,), (9,), (0, 9)])
@pytest.mark.parametrize("draft_tokens", [0, 4])
def test_deferred_samples_are_computed_again(
    make_harness: MakeHarness, expected: Expected, windows: tuple[int, ...], draft_tokens: int
) -> None:
    """In prefill and in decode, after accepted and rejected drafts, and while other requests run."""
    chance = random.Random(1)
    harness = speculative(make_harness, windows=windows, num_speculative_tokens=draft_tokens)
    execute = harness.execute
    num_deferred = 0

    def deferring(plan: StepPlan) -> StepResult:
        nonlocal num_deferred
        result = execute(plan)
        sampled = [
            sample._replace(token_id=-1, is_deferred=True)
            if sample.request_id != 3 and chance.random() < 0.4
            else sample
            for sample in result.sampled
        ]
        num_deferred += sum(sample.is_deferred for sample in sampled)
        return StepResult(result.step_id, tuple(sampled), result.duration_s)

    harness.execute = deferring
    prompts = {1: PERIODIC, 2: [1, 0] * 9, 3: [0, 0, 1]}
    for request_id, prompt in prompts.items():
        harness.add(request_id, prompt, 40)
    harness.run()
    assert num_deferred > 20
    for request_id, prompt in prompts.items():
        assert harness.outputs[request_id] == expected(prompt, 40, 2)
    assert harness.scheduler.stats().pages_owned == 0


@pytest.mark.parametrize(("wrong_at", "most"), [(None, 14), (1, 40)])
def test_forced_tokens_are_drafts_without_prompt_lookup(
    make_harness: MakeHarness, expected: Expected, wrong_at: int | None, most: int
) -> None:
    """Right and wrong ones; the output is the same, and right ones save steps."""
    prompt = [1, 0, 1, 1]
    tokens = expected(prompt, 40, 2)
    harness = speculative(make_harness, num_speculative_tokens=0)
    execute = harness.execute

    def forcing(plan: StepPlan) -> StepResult:
        result = execute(plan)
        known = len(harness.outputs[1]) + len(result.sampled)
        forced = [token ^ (index == wrong_at) for index, token in enumerate(tokens[known : known + 3])]
        *others, last = result.sampled
        return StepResult(result.step_id, (*others, last._replace(forced=tuple(forced))), result.duration_s)

    harness.execute = forcing
    harness.add(1, prompt, 40)
    assert harness.run() <= most
    assert harness.outputs[1] == tokens


def test_tokens_that_were_forced_once_are_no_drafts_later(make_harness: MakeHarness, expected: Expected) -> None:
    prompt = [1, 0, 1, 1]
    tokens = expected(prompt, 20, 2)
    harness = speculative(make_harness, num_speculative_tokens=0)
    execute = harness.execute

    def forcing_first(plan: StepPlan) -> StepResult:
        result = execute(plan)
        if harness.outputs[1]:
            return result
        (sample,) = result.sampled
        return StepResult(result.step_id, (sample._replace(forced=tuple(tokens[1:4])),), result.duration_s)

    harness.execute = forcing_first
    harness.add(1, prompt, 20)
    harness.run()
    assert harness.outputs[1] == tokens
    stats = harness.scheduler.stats()
    assert stats.draft_tokens == 3
    assert (stats.drafted_by_source, stats.accepted_by_source) == ({"forced": 3}, {"forced": 3})
    assert stats.accepted_by_position == {}, "only of drafters"


@pytest.mark.parametrize(
    ("coefficients", "max_num_seqs", "users", "most"),
    [(CHEAP_ROWS, 8, 1, 7), (CHEAP_ROWS, 8, 7, 1), (CHEAP_ROWS, 8, 8, 0), (DEAR_ROWS, 8, 1, 0)],
    ids=["the rows of a step are the limit", "room for one row", "no room", "rows cost more than tokens"],
)
def test_a_plan_says_how_many_forced_tokens_would_be_drafts(
    make_harness: MakeHarness, coefficients: Coefficients, max_num_seqs: int, users: int, most: int
) -> None:
    harness = speculative(make_harness, coefficients, num_speculative_tokens=0, max_num_seqs=max_num_seqs)
    for request_id in range(users):
        harness.add(request_id, [1, 0, 1], 40)
    plan = harness.step()
    assert plan.num_prefill_tokens, "it looks ahead: the next step decodes"
    assert plan.max_forced == most
    assert harness.step().max_forced == most


@pytest.mark.parametrize(("pause_s", "most"), [(0.0, 0), (5e-4, 2), (1e-3, 3), (5.0, 3)])
def test_a_draft_saves_the_time_between_two_steps_too(make_harness: MakeHarness, pause_s: float, most: int) -> None:
    """It counts up to the time of a step; idle times do not count."""
    harness = speculative(make_harness, Coefficients(0.0, 1e-3, 1e-3, 0.0, 0.0), num_speculative_tokens=0)
    harness.step_s = 1e-3
    for request_id in (1, 2):
        harness.now += 60
        harness.add(request_id, [1, 0, 1], 40)
        for _ in range(39):
            plan = harness.step()
            harness.now += pause_s
        assert plan.max_forced == most
        harness.run()
