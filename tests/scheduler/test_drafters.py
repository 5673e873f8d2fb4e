"""Drafters: the tokens they propose, the memory of the histories, and whose text they may propose."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Sequence
from typing import Any

import pytest
from quire.scheduler import Coefficients, CostModel, LatencyBudget, Request, RequestSpec
from quire.scheduler.drafters import ALL_HISTORY_TOKENS, HISTORY_TOKENS, SuffixLookup
from quire.scheduler.suffix_automaton import ROOT, SuffixAutomaton

from tests.scheduler.conftest import Expected, MakeHarness, SchedulerHarness

CHEAP_ROWS = Coefficients(20e-3, 1e-4, 1e-3, 0.0, 0.0)


def state_of(automaton: SuffixAutomaton, text: Sequence[int]) -> int:
    """Add a text, and return its state."""
    state = ROOT
    for token in text:
        state = automaton.extend(state, token)
    return state


def request_with(tokens: Sequence[int], request_id: int = 1, prompt: int = 1, **fields: Any) -> Request:
    spec = RequestSpec(request_id, tuple(tokens[:prompt]), max_tokens=len(tokens) + 100, **fields)
    return Request(spec, tokens[prompt:])


def longest_known_end(texts: Sequence[Sequence[int]], text: Sequence[int]) -> list[tuple[int, int]]:
    """Return (length, next token) for each occurrence of the longest end of `text` that a token follows."""
    for length in range(len(text), 0, -1):
        end = list(text[len(text) - length :])
        found = [
            (length, other[at + length])
            for other in texts
            for at in range(len(other) - length)
            if list(other[at : at + length]) == end
        ]
        if found:
            return found
    return []


@pytest.mark.parametrize("seed", range(20))
def test_the_longest_end_that_occurs_elsewhere_is_continued(seed: int) -> None:
    """Texts that grow in turns, compared with a search through all of them."""
    chance = random.Random(seed)
    automaton = SuffixAutomaton()
    texts: list[list[int]] = [[] for _ in range(3)]
    states = [ROOT] * 3
    for _ in range(120):
        index = chance.randrange(3)
        token = chance.randrange(2 + seed % 3)
        texts[index].append(token)
        states[index] = automaton.extend(states[index], token)
        found = longest_known_end(texts, texts[index])
        length = found[0][0] if found else 0
        proposed = automaton.continuation(states[index], max(length, 1), 1)
        assert bool(proposed) == bool(found)
        assert not found or proposed[0] in {token for _, token in found}
        assert not automaton.continuation(states[index], length + 1, 1)


def test_a_continuation_follows_the_newest_text_as_far_as_it_goes() -> None:
    automaton = SuffixAutomaton()
    state_of(automaton, [1, 2, 3, 4, 5, 6])
    state_of(automaton, [1, 2, 3, 7, 8])
    assert automaton.continuation(state_of(automaton, [9, 1, 2, 3]), 2, 9) == [7, 8]
    assert automaton.continuation(state_of(automaton, [9, 3, 4]), 2, 2) == [5, 6]
    assert automaton.continuation(state_of(automaton, [0, 3]), 2, 2) == []


def test_outputs_of_the_same_tenant_and_salt_are_proposed_and_no_others() -> None:
    lookup = SuffixLookup()
    text = [1, 10, 11, 12, 13, 14]
    lookup.propose(request_with(text, tenant="a"), 4)
    lookup.propose(request_with([1, 20, 21, 22], 2, tenant="a", cache_salt="s"), 4)
    proposals = {
        (tenant, salt): lookup.propose(request_with([1, 10, 11, 12], 3 + i, tenant=tenant, cache_salt=salt), 4)
        for i, (tenant, salt) in enumerate([("a", ""), ("b", ""), ("a", "s"), ("", "")])
    }
    assert proposals == {("a", ""): [13, 14], ("b", ""): [], ("a", "s"): [], ("", ""): []}


def test_the_text_of_an_ended_request_stays_in_the_history() -> None:
    lookup = SuffixLookup()
    request = request_with([1, 2, 3])
    lookup.propose(request, 4)
    request.token_ids += [4, 5, 6]
    lookup.forget(request)
    assert lookup.propose(request_with([9, 3, 4], 2), 4) == [5, 6]
    lookup.forget(request_with([7, 7], 3))  # never proposed for: the text is unknown
    assert lookup.num_tokens == 9


def test_a_text_continues_after_a_gap_with_its_last_tokens() -> None:
    lookup = SuffixLookup()
    request = request_with([1, 2, 3])
    lookup.propose(request, 4)
    request.token_ids += range(1000, 2000)
    lookup.propose(request, 4)
    assert lookup.num_tokens == 3 + 256
    assert lookup.propose(request_with([9, 1998, 1999], 2), 4) == []
    assert lookup.propose(request_with([9, 1997, 1998], 3), 4) == [1999]


def test_histories_are_bounded_and_the_one_unused_for_longest_is_dropped_first() -> None:
    lookup = SuffixLookup()
    for tenant in "abcab":
        for number in range(HISTORY_TOKENS // 256 + 1):
            lookup.propose(request_with(range(number, number + 256), number, tenant=tenant, prompt=256), 1)
            lookup.forget(request_with([0], number))
        assert lookup.num_tokens <= ALL_HISTORY_TOKENS


def test_a_full_history_of_random_tokens_takes_at_most_600_bytes_per_token() -> None:
    chance = random.Random(1)
    texts = [[chance.randrange(100_000) for _ in range(256)] for _ in range(40)]
    automaton = SuffixAutomaton()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for text in texts:
        state_of(automaton, text)
    nbytes = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert nbytes / (40 * 256) < 600


def replace_drafters(harness: SchedulerHarness, drafter: Any) -> None:
    speculator: Any = harness.scheduler._speculator
    speculator._drafters = (drafter,)
    speculator._rates = speculator._rates[:1]


class RandomDrafter:
    """Proposes random tokens, of which `share` are right."""

    def __init__(self, seed: int, right: Any, share: float = 0.0) -> None:
        self._chance = random.Random(seed)
        self._right = right
        self._share = share

    def propose(self, request: Request, limit: int) -> Sequence[int]:
        tokens = self._right(list(request.token_ids), limit, 50)
        return [t if self._chance.random() < self._share else self._chance.randrange(50) for t in tokens]

    def forget(self, request: Request) -> None:
        pass


@pytest.mark.parametrize("windows", [(0,), (3, 0)])
@pytest.mark.parametrize("share", [0.0, 0.5, 0.9])
def test_a_wrong_drafter_changes_nothing_but_the_number_of_steps(
    make_harness: MakeHarness, expected: Expected, windows: tuple[int, ...], share: float
) -> None:
    harness = make_harness(
        cost=CostModel(CHEAP_ROWS), num_pages=24, windows=windows, num_speculative_tokens=6, max_num_samples=30
    )
    replace_drafters(harness, RandomDrafter(1, expected, share))
    prompts = {number: [number, 7, 3, number] for number in range(5)}
    for number, prompt in prompts.items():
        harness.add(number, prompt, 25)
    harness.run()
    assert {number: harness.outputs[number] for number in prompts} == {
        number: expected(prompt, 25, 50) for number, prompt in prompts.items()
    }
    stats = harness.scheduler.stats()
    assert stats.draft_tokens > 20
    assert stats.accepted_draft_tokens >= 40 * share
    assert stats.pages_owned == 0


def test_drafts_settle_within_50_tokens_where_the_text_changes(make_harness: MakeHarness, expected: Expected) -> None:
    """A drafter that is right, wrong and right again for 100 tokens each: the last half of each hundred is settled."""
    harness = make_harness(cost=CostModel(Coefficients(20e-3, 2e-3, 1e-3, 0.0, 0.0)), num_pages=100)
    speculator: Any = harness.scheduler._speculator
    speculator._num_tokens, speculator._max_rows = 4, 8
    wanted = expected([1, 2, 3], 300, 50)

    class Changing:
        def propose(self, request: Request, limit: int) -> Sequence[int]:
            known = request.num_output_tokens
            right = wanted[known : known + limit]
            return [(t + 1) % 50 for t in right] if 100 <= known < 200 else right

        def forget(self, request: Request) -> None:
            pass

    replace_drafters(harness, Changing())
    harness.add(1, [1, 2, 3], 300)
    drafted_at: list[tuple[int, int]] = []
    while not harness.ended:
        known = len(harness.outputs.get(1, ()))
        plan = harness.step()
        drafted_at.append((known, plan.sequences[0].num_samples - 1))
    assert harness.outputs[1] == wanted
    assert {drafted for known, drafted in drafted_at if 50 <= known < 96} == {4}
    wasted = sum(drafted for known, drafted in drafted_at if 150 <= known < 196)
    assert wasted <= 5
    assert {drafted for known, drafted in drafted_at if 250 <= known < 290} == {4}


def test_no_request_is_drafted_beside_31_others(make_harness: MakeHarness, expected: Expected) -> None:
    harness = make_harness(
        cost=CostModel(Coefficients(20e-3, 2e-3, 1e-3, 0.0, 0.0)),
        num_pages=32 * 14,
        max_num_seqs=32,
        max_num_batched_tokens=200,
        num_speculative_tokens=4,
        max_num_samples=100,
    )
    replace_drafters(harness, RandomDrafter(1, expected, 1.0))
    for number in range(32):
        harness.add(number, [number, 1], 40)
    harness.run()
    assert harness.scheduler.stats().draft_tokens == 0


@pytest.mark.parametrize(("target_s", "most"), [(10.0, 5), (0.0235, 2), (0.021, 0)])
def test_drafts_stay_within_the_latency_target(
    make_harness: MakeHarness, expected: Expected, target_s: float, most: int
) -> None:
    cost = CostModel(Coefficients(20e-3, 1e-3, 1e-3, 0.0, 0.0))
    cost.is_warm = True
    harness = make_harness(
        cost=cost, budget=LatencyBudget(cost, target_s / 0.9, 32), num_speculative_tokens=5, max_num_seqs=8
    )
    replace_drafters(harness, RandomDrafter(1, expected, 1.0))
    harness.add(1, [1, 2], 30)
    drafted = set()
    while not harness.ended:
        drafted.add(harness.step().sequences[0].num_samples - 1)
    assert max(drafted) == most
