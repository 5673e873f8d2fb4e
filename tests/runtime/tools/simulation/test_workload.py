"""Workloads: their requests, their seeds, and invalid options."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from quire.runtime.common.errors import ConfigError
from quire.runtime.tools.simulation import Arrival, Workload, make_arrivals

DATA = Path(__file__).parents[3] / "data"


def test_constant_arrivals() -> None:
    arrivals = make_arrivals(
        Workload(arrivals="constant", request_rate=4, num_prompts=3, prompt_tokens="7", output_tokens="2")
    )
    assert arrivals == [Arrival(0.25 * (number + 1), 7, 2, conversation=number) for number in range(3)]


def test_requests_depend_on_the_seed_only() -> None:
    def draw(seed: int) -> list[Arrival]:
        return make_arrivals(Workload(arrivals="bursty", prompt_tokens="1-900", tenants="a=2,b=1", seed=seed))

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)


def test_tenants_send_at_their_relative_rates() -> None:
    counts = Counter(each.tenant for each in make_arrivals(Workload(num_prompts=10_000, tenants="a=20, b=1")))
    assert set(counts) == {"a", "b"}
    assert counts["a"] / counts["b"] == pytest.approx(20, rel=0.15)


def test_every_request_has_the_deadline_of_the_workload() -> None:
    assert [each.deadline_s for each in make_arrivals(Workload(num_prompts=2, deadline_ms=250))] == [0.25, 0.25]


def test_a_shared_prefix_comes_before_each_prompt() -> None:
    (arrival,) = make_arrivals(Workload(num_prompts=1, prompt_tokens="10", shared_prefix_tokens=64))
    assert (arrival.prompt_tokens, arrival.blocks, arrival.block_tokens) == (74, (0,), 64)


def test_turns_continue_a_conversation() -> None:
    workload = Workload(num_prompts=200, turns="1-3", think_time="2-4", prompt_tokens="10-20", output_tokens="5-9")
    arrivals = make_arrivals(workload)
    assert {len(arrival.turns) for arrival in arrivals} == {0, 1, 2}
    assert [arrival.conversation for arrival in arrivals] == list(range(200))
    turns = [turn for arrival in arrivals for turn in arrival.turns]
    assert 2 <= min(turn.think_s for turn in turns) < 2.2 < 3.8 < max(turn.think_s for turn in turns) <= 4
    assert {turn.new_tokens for turn in turns} == set(range(10, 21))
    first = next(arrival for arrival in arrivals if len(arrival.turns) == 2)
    second = first.next_turn(100.0)
    assert second is not None
    history = first.prompt_tokens + first.output_tokens
    assert second.history_tokens == history
    assert second.prompt_tokens == history + first.turns[0].new_tokens
    assert (second.time_s, second.conversation) == (100.0 + first.turns[0].think_s, first.conversation)
    assert second.turns == first.turns[1:]
    third = second.next_turn(200.0)
    assert third is not None
    assert third.next_turn(300.0) is None


def test_conversations_share_one_of_several_prefixes() -> None:
    arrivals = make_arrivals(Workload(num_prompts=100, shared_prefix_tokens=64, num_prefixes=3))
    assert {arrival.blocks for arrival in arrivals} == {(0,), (1,), (2,)}


@pytest.mark.parametrize(
    ("workload", "message"),
    [
        (Workload(request_rate=0), "request_rate must be between"),
        (Workload(request_rate=float("nan")), "request_rate must be between"),
        (Workload(num_prompts=0), "num_prompts must be between"),
        (Workload(burstiness=0), "burstiness must be between"),
        (Workload(num_prefixes=0), "num_prefixes must be between"),
        (Workload(turns="0"), "turns: '0' is not allowed; allowed: a number from 1 to"),
        (Workload(think_time="5-1"), "think_time: '5-1' is not allowed; allowed: seconds such as 5"),
        (Workload(arrivals="azure", dataset_path=Path("x"), turns="2"), "are for random requests"),
        (Workload(shared_prefix_tokens=-1), "shared_prefix_tokens must be between"),
        (Workload(dataset_path=Path("x")), "add `arrivals` mooncake or `arrivals` azure"),
        (Workload(arrivals="azure"), "needs `dataset_path` FILE"),
        (Workload(arrivals="azure", dataset_path=Path("x"), tenants="a=1"), "are for random requests"),
    ],
)
def test_invalid_workloads_are_refused(workload: Workload, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_arrivals(workload)


def test_a_rate_rescales_a_trace() -> None:
    arrivals = make_arrivals(Workload(arrivals="azure", dataset_path=DATA / "azure.csv", request_rate=2))
    assert [round(each.time_s, 3) for each in arrivals] == [0.0, 0.95, 1.0]
