"""Beam search on forked pages: same results as a search over whole contexts, and no page is lost."""

from __future__ import annotations

import random

import pytest
from quire.scheduler import (
    BeamSearch,
    BeamSpec,
    CostModel,
    Fair,
    LatencyBudget,
    SampledToken,
    StepPlan,
    StepResult,
    TooLong,
)

from tests.scheduler.conftest import MakeHarness, top_logprobs
from tests.support.forced_preemption import preempt

VOCABULARY = 12
PROMPT = [3, 1, 4, 1, 5]


def search(
    prompt: list[int], width: int, length: int, stops: frozenset[int], min_tokens: int = 0, penalty: float = 1.0
) -> list[tuple[list[int], float]]:
    """Run a reference search over whole contexts. Return (tokens, score), best first."""
    live: list[tuple[list[int], float]] = [([], 0.0)]
    complete: list[tuple[list[int], float]] = []
    for step in range(1, length + 1):
        candidates = []
        for number, (tokens, logprob) in enumerate(live):
            for token, more in top_logprobs([*prompt, *tokens], VOCABULARY)[: 2 * width]:
                candidates.append((-(logprob + more), number, token, [*tokens, token]))
        candidates.sort(key=lambda each: each[:3])
        live = []
        for rank, (cost, _, token, tokens) in enumerate(candidates):
            if token not in stops or step < min_tokens:
                live.append((tokens, -cost))
            elif rank < width:
                complete.append((tokens, -cost / step**penalty))
        live = live[:width]
        if not live:
            break
        best_live = max(logprob / step**penalty for _, logprob in live)
        if len(complete) >= width and sorted((score for _, score in complete), reverse=True)[width - 1] >= best_live:
            live = []
            break
    complete += [(tokens, logprob / length**penalty) for tokens, logprob in live]
    return sorted(complete, key=lambda found: -found[1])[:width]


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("stops", [frozenset[int](), frozenset({2, 7})])
@pytest.mark.parametrize("penalty", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("others", [0, 3])
def test_results_equal_those_of_a_search_over_whole_contexts(
    make_harness: MakeHarness, width: int, stops: frozenset[int], penalty: float, others: int
) -> None:
    harness = make_harness(num_pages=64, vocabulary=VOCABULARY)
    for other in range(others):
        harness.add(10 + other, [*PROMPT[:other], other], max_tokens=9)
    beam = BeamSpec(width, penalty)
    harness.add(1, PROMPT, max_tokens=8, min_tokens=2, stop_token_ids=stops, beam=beam)
    harness.run()
    found = harness.requests[1].hypotheses
    wanted = search(PROMPT, width, 8, stops, min_tokens=2, penalty=penalty)
    assert [[token.token_id for token in each.tokens] for each in found] == [tokens for tokens, _ in wanted]
    assert [each.score for each in found] == pytest.approx([score for _, score in wanted])
    assert harness.ended[1] == found[0].finish_reason


def test_pages_of_dropped_beams_are_released_before_the_next_step(make_harness: MakeHarness) -> None:
    harness = make_harness(num_pages=64, vocabulary=VOCABULARY, enable_prefix_caching=False)
    harness.add(1, PROMPT, max_tokens=12, beam=BeamSpec(4))
    while harness.scheduler.has_work:
        harness.step()  # the audit accounts for every page
        beams = list(harness.scheduler._batch.requests.values())
        pages = {page for beam in beams for page in beam.table.pages[0]}
        assert harness.scheduler.stats().pages_owned == len(pages)
        assert len(beams) <= 4
    stats = harness.scheduler.stats()
    assert (stats.pages_owned, stats.running) == (0, 0)


def test_beams_use_sequence_slots_and_reserve_their_pages(make_harness: MakeHarness) -> None:
    harness = make_harness(num_pages=20, max_num_seqs=4, vocabulary=VOCABULARY)
    harness.add(1, PROMPT, max_tokens=7, beam=BeamSpec(3))  # each beam: 3 pages at its longest and 1 copy
    harness.add(2, PROMPT, max_tokens=4)
    harness.add(3, PROMPT, max_tokens=4)
    harness.step()
    stats = harness.scheduler.stats()
    assert (stats.running, stats.waiting, stats.waiting_by_reason) == (2, 1, {"sequences": 1})
    assert stats.pages_reserved == 3 * 4 - 2  # the beams share 2 pages
    assert not preempt(harness.scheduler, 1)
    harness.run()
    assert harness.scheduler.stats().preemptions == 0


def test_a_search_that_needs_more_pages_than_the_pool_is_refused(make_harness: MakeHarness) -> None:
    harness = make_harness(num_pages=11)
    with pytest.raises(TooLong, match="need 12 pages of 11"):
        harness.add(1, PROMPT, max_tokens=7, beam=BeamSpec(3))


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_cancelling_a_search_drops_every_beam(make_harness: MakeHarness, steps: int) -> None:
    harness = make_harness(num_pages=64, vocabulary=VOCABULARY)
    harness.add(1, PROMPT, max_tokens=8, beam=BeamSpec(4))
    for _ in range(steps):
        harness.step()
    plan = harness.scheduler.schedule()
    assert harness.cancel(1) is None  # the step is in flight
    harness.commit(plan)
    assert harness.ended == {1: "cancelled"}
    assert harness.scheduler.stats().pages_owned == harness.scheduler.stats().pages_reserved == 0
    harness.ended.clear()
    harness.add(1, PROMPT, max_tokens=8, beam=BeamSpec(4))
    harness.run()
    assert harness.ended == {1: "length"}


def test_a_failing_beam_or_step_ends_the_whole_search(make_harness: MakeHarness) -> None:
    harness = make_harness(num_pages=64, vocabulary=VOCABULARY)
    harness.add(1, PROMPT, max_tokens=8, beam=BeamSpec(2))
    harness.step()
    harness.failing[-1] = "NaN"
    harness.step()
    assert harness.ended == {1: "NaN"}
    harness.add(2, PROMPT, max_tokens=8, beam=BeamSpec(2))
    harness.step()
    harness.scheduler.schedule()
    updates = harness.scheduler.abandon("the step failed")
    assert [(update.request_id, update.error) for update in updates] == [(2, "the step failed")]
    assert harness.scheduler.stats().pages_owned == 0


@pytest.mark.parametrize("windows", [(0,), (9,), (0, 9)])
def test_a_search_whose_masks_come_late_has_the_same_results(
    make_harness: MakeHarness, windows: tuple[int, ...]
) -> None:
    """If one beam's sample is deferred, all beams compute their last token again, in prefill and in decode."""
    chance = random.Random(3)
    harness = make_harness(num_pages=64, vocabulary=VOCABULARY, windows=windows)
    execute = harness.execute
    num_deferred = 0

    def deferring(plan: StepPlan) -> StepResult:
        nonlocal num_deferred
        result = execute(plan)
        sampled = [
            SampledToken(sample.request_id, -1, is_deferred=True) if chance.random() < 0.3 else sample
            for sample in result.sampled
        ]
        num_deferred += sum(sample.is_deferred for sample in sampled)
        return StepResult(result.step_id, tuple(sampled), result.duration_s)

    harness.execute = deferring
    harness.add(1, PROMPT, max_tokens=14, stop_token_ids=frozenset({2, 7}), beam=BeamSpec(3))
    harness.run()
    found = [
        ([token.token_id for token in each.tokens], pytest.approx(each.score))
        for each in harness.requests[1].hypotheses
    ]
    assert found == search(PROMPT, 3, 14, frozenset({2, 7}))
    assert num_deferred > 5
    assert harness.scheduler.stats().pages_owned == harness.scheduler.stats().pages_reserved == 0


def test_ties_go_to_the_earlier_hypothesis_then_to_the_lower_token() -> None:
    beam = BeamSearch(2)
    equal = tuple((token, -1.0) for token in (0, 1, 2, 3))
    first = beam.advance([SampledToken(1, 0, None, equal)], frozenset(), 0, 5)
    assert [(each.parent, each.token.token_id) for each in first] == [(0, 0), (0, 1)]
    second = beam.advance([SampledToken(1, 0, None, equal)] * 2, frozenset(), 0, 5)
    assert [(each.parent, each.token.token_id) for each in second] == [(0, 0), (0, 1)]


def test_a_search_wider_than_the_latency_target_allows_runs_alone(make_harness: MakeHarness) -> None:
    harness = make_harness(num_pages=64, vocabulary=VOCABULARY, budget=LatencyBudget(CostModel(), 1e-3, 64))
    harness.add(1, [2, 3], max_tokens=6)
    harness.add(2, PROMPT, max_tokens=6, beam=BeamSpec(4))
    harness.add(3, [4, 5], max_tokens=6)
    harness.run()
    assert set(harness.ended.values()) == {"length"}


def test_every_beam_is_charged_to_its_tenant(make_harness: MakeHarness) -> None:
    """A step costs 2 per beam, as if each beam were a request that decodes."""
    policy = Fair(credit_tokens=0)
    harness = make_harness(num_pages=64, vocabulary=VOCABULARY, policy=policy)
    harness.add(1, PROMPT, max_tokens=3, tenant="search", beam=BeamSpec(4))
    harness.run()
    search = harness.requests[1]
    assert policy.rank(search)[0] == 2 * (1 + 4 + 4)  # the step that computes the prompt has one beam


def test_the_first_token_of_a_search_comes_with_the_step_that_computes_the_prompt(make_harness: MakeHarness) -> None:
    harness = make_harness(num_pages=64, vocabulary=VOCABULARY, max_chunk=3)
    harness.step_s = 1.0
    harness.add(1, PROMPT, max_tokens=3, beam=BeamSpec(2))
    harness.run()
    search = harness.requests[1]
    assert search.first_token_time == 2.0  # time after chunks of 3 and 2 tokens
    counters = search.final_counters()
    assert (counters.prefill_s, counters.decode_s) == (2.0, 2.0)


def test_each_beam_counts_as_a_sequence_when_tenants_are_compared(make_harness: MakeHarness) -> None:
    """Tenant b runs 4 beams and a request, tenant a 2 requests: the third of a displaces the request of b."""
    harness = make_harness(num_pages=64, max_num_seqs=7, vocabulary=VOCABULARY, policy=Fair(credit_tokens=0))
    harness.add(1, PROMPT, max_tokens=20, tenant="b", beam=BeamSpec(4))
    harness.add(2, PROMPT, max_tokens=20, tenant="b")
    for request_id in (3, 4):
        harness.add(request_id, PROMPT, max_tokens=20, tenant="a")
    harness.step()
    harness.add(5, PROMPT, max_tokens=20, tenant="a")
    harness.step()
    assert [harness.requests[each].table is not None for each in (1, 2, 3, 4, 5)] == [True, False, True, True, True]


@pytest.mark.parametrize(("min_tokens", "tokens"), [(1, [7]), (2, [7, 7]), (3, [7, 7, 7])])
def test_a_beam_may_stop_from_min_tokens_on(min_tokens: int, tokens: list[int]) -> None:
    beam = BeamSearch(1)
    sample = SampledToken(1, 7, -0.1, ((7, -0.1), (6, -2.0)))
    while not beam.is_done:
        beam.advance([sample], frozenset({7}), min_tokens, 9)
    assert [token.token_id for token in beam.results[0].tokens] == tokens
    assert beam.results[0].finish_reason == "stop"
