"""Beam search: the hypotheses of a search over whole contexts, on forked pages that go back when a beam is dropped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from quire.scheduler import BeamSearch, BeamSpec, CostModel, Fair, LatencyBudget, SampledToken, TooLong

from tests.scheduler.conftest import top_logprobs

MakeWorld = Callable[..., Any]
VOCABULARY = 12
PROMPT = [3, 1, 4, 1, 5]


def search(
    prompt: list[int], width: int, length: int, stops: frozenset[int], min_tokens: int = 0, penalty: float = 1.0
) -> list[tuple[list[int], float]]:
    """Written once more, without pages, parents or early ending: (tokens, score), best first."""
    live: list[tuple[list[int], float]] = [([], 0.0)]
    complete: list[tuple[list[int], float]] = []
    for step in range(1, length + 1):
        candidates = []
        for number, (tokens, logprob) in enumerate(live):
            for token, more in top_logprobs([*prompt, *tokens], VOCABULARY)[: 2 * width]:
                candidates.append((-(logprob + more), number, token, [*tokens, token]))
        candidates.sort(key=lambda each: each[:3])
        live = []
        for place, (cost, _, token, tokens) in enumerate(candidates):
            if token not in stops or step < min_tokens:
                live.append((tokens, -cost))
            elif place < width:
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
@pytest.mark.parametrize("company", [0, 3])
def test_it_finds_what_a_search_over_contexts_finds(
    make_world: MakeWorld, width: int, stops: frozenset[int], penalty: float, company: int
) -> None:
    world = make_world(num_pages=64, vocabulary=VOCABULARY)
    for other in range(company):
        world.add(10 + other, [*PROMPT[:other], other], max_tokens=9)
    beam = BeamSpec(width, penalty)
    world.add(1, PROMPT, max_tokens=8, min_tokens=2, stop_token_ids=stops, beam=beam)
    world.run()
    found = world.requests[1].hypotheses
    wanted = search(PROMPT, width, 8, stops, min_tokens=2, penalty=penalty)
    assert [[token.token_id for token in each.tokens] for each in found] == [tokens for tokens, _ in wanted]
    assert [each.score for each in found] == pytest.approx([score for _, score in wanted])
    assert world.ended[1] == found[0].finish_reason


def test_pages_of_dropped_beams_are_back_before_the_next_step(make_world: MakeWorld) -> None:
    world = make_world(num_pages=64, vocabulary=VOCABULARY, enable_prefix_caching=False)
    world.add(1, PROMPT, max_tokens=12, beam=BeamSpec(4))
    while world.scheduler.has_work:
        world.step()  # the audit explains every page by a live table
        beams = list(world.scheduler._batch.requests.values())
        pages = {page for beam in beams for page in beam.table.pages[0]}
        assert world.scheduler.stats().pages_owned == len(pages)
        assert len(beams) <= 4
    assert world.scheduler.stats().pages_owned == 0


def test_beams_count_as_places_and_their_pages_are_reserved(make_world: MakeWorld) -> None:
    world = make_world(num_pages=20, max_num_seqs=4, vocabulary=VOCABULARY)
    world.add(1, PROMPT, max_tokens=7, beam=BeamSpec(3))  # 3 pages at its longest, and 1 to copy: 3 times
    world.add(2, PROMPT, max_tokens=4)
    world.add(3, PROMPT, max_tokens=4)
    world.step()
    stats = world.scheduler.stats()
    assert (stats.running, stats.waiting, stats.waiting_by_reason) == (2, 1, {"sequences": 1})
    assert stats.pages_reserved == 3 * 4 - 2  # they have 2 pages, and share them
    assert not world.scheduler.preempt(1)
    world.run()
    assert world.scheduler.stats().preemptions == 0


def test_a_search_that_cannot_fit_is_refused(make_world: MakeWorld) -> None:
    world = make_world(num_pages=11)
    with pytest.raises(TooLong, match="need 12 pages of 11"):
        world.add(1, PROMPT, max_tokens=7, beam=BeamSpec(3))


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_cancelling_drops_every_beam(make_world: MakeWorld, steps: int) -> None:
    world = make_world(num_pages=64, vocabulary=VOCABULARY)
    world.add(1, PROMPT, max_tokens=8, beam=BeamSpec(4))
    for _ in range(steps):
        world.step()
    plan = world.scheduler.schedule()
    assert world.cancel(1) is None  # in flight
    world.commit(plan)
    assert world.ended == {1: "cancelled"}
    assert world.scheduler.stats().pages_owned == world.scheduler.stats().pages_reserved == 0
    world.ended.clear()
    world.add(1, PROMPT, max_tokens=8, beam=BeamSpec(4))
    world.run()
    assert world.ended == {1: "length"}


def test_a_failing_beam_or_step_ends_the_whole_search(make_world: MakeWorld) -> None:
    world = make_world(num_pages=64, vocabulary=VOCABULARY)
    world.add(1, PROMPT, max_tokens=8, beam=BeamSpec(2))
    world.step()
    world.failing[-1] = "not numbers"
    world.step()
    assert world.ended == {1: "not numbers"}
    world.add(2, PROMPT, max_tokens=8, beam=BeamSpec(2))
    world.step()
    world.scheduler.schedule()
    updates = world.scheduler.abandon("the step failed")
    assert [(update.request_id, update.error) for update in updates] == [(2, "the step failed")]
    assert world.scheduler.stats().pages_owned == 0


def test_ties_go_to_the_earlier_hypothesis_then_to_the_lower_token() -> None:
    beam = BeamSearch(2)
    equal = tuple((token, -1.0) for token in (0, 1, 2, 3))
    first = beam.advance([SampledToken(1, 0, None, equal)], frozenset(), 0, 5)
    assert [(each.parent, each.token.token_id) for each in first] == [(0, 0), (0, 1)]
    second = beam.advance([SampledToken(1, 0, None, equal)] * 2, frozenset(), 0, 5)
    assert [(each.parent, each.token.token_id) for each in second] == [(0, 0), (0, 1)]


def test_a_search_wider_than_the_latency_target_allows_runs_alone(make_world: MakeWorld) -> None:
    world = make_world(num_pages=64, vocabulary=VOCABULARY, budget=LatencyBudget(CostModel(), 1e-3, 64))
    world.add(1, [2, 3], max_tokens=6)
    world.add(2, PROMPT, max_tokens=6, beam=BeamSpec(4))
    world.add(3, [4, 5], max_tokens=6)
    world.run()
    assert set(world.ended.values()) == {"length"}


def test_every_beam_is_charged_to_its_tenant(make_world: MakeWorld) -> None:
    """A step costs 2 per beam, as if each beam were a request that decodes."""
    policy = Fair(credit_tokens=0)
    world = make_world(num_pages=64, vocabulary=VOCABULARY, policy=policy)
    world.add(1, PROMPT, max_tokens=3, tenant="search", beam=BeamSpec(4))
    world.run()
    search = world.requests[1]
    assert policy.rank(search)[0] == 2 * (1 + 4 + 4)  # the step that computes the prompt has one beam
