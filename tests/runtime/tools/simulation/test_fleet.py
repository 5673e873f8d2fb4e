"""Fleets: requests go to hosts by the real router, and end once whatever happens to hosts."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import asdict
from functools import cache

import pytest
from quire.runtime.common.errors import ConfigError
from quire.runtime.tools.percentiles import percentile
from quire.runtime.tools.simulation import (
    Arrival,
    Fleet,
    FleetOptions,
    SimulationReport,
    Simulator,
    Workload,
    make_arrivals,
    summarize,
)
from quire.runtime.tools.simulation.fleet import HOST_START_S, Routing
from quire.runtime.tools.simulation.simulator import RequestOutcome
from quire.runtime.tools.traffic import NextTurn
from quire.scheduler import StepPlan

from .conftest import make_simulator

CHATS = Workload(
    request_rate=3,
    num_prompts=80,
    prompt_tokens="16-128",
    output_tokens="8-24",
    shared_prefix_tokens=256,
    num_prefixes=4,
    turns="1-8",
    think_time="2-6",
)


def cost(plan: StepPlan) -> float:
    return 0.02 + 0.0015 * plan.num_prefill_tokens + 0.002 * plan.num_decode_rows


def fleet(arrivals: Sequence[Arrival], seed: int = 1, **options: object) -> Fleet:
    """Return a fleet that has served all requests."""

    def build_host(outcomes: list[RequestOutcome], number: int) -> Simulator:
        host = make_simulator((), cost, num_pages=600, debug=False)
        host.outcomes = outcomes
        return host

    simulated = Fleet(build_host, arrivals, FleetOptions(**options), seed)  # type: ignore[arg-type]
    simulated.run()
    return simulated


@cache
def chats(hosts: int, routing: Routing, api_servers: int) -> SimulationReport:
    return summarize(fleet(make_arrivals(CHATS), hosts=hosts, routing=routing, api_servers=api_servers))


def share_of_ideal(report: SimulationReport) -> float:
    assert report.fleet is not None
    return report.cached_share / report.fleet.ideal_cached_share


def test_a_fleet_of_one_host_is_the_simulator() -> None:
    arrivals = make_arrivals(CHATS)[:30]
    alone = make_simulator(arrivals, cost, num_pages=600, debug=False)
    alone.run()
    assert fleet(arrivals, hosts=1).outcomes == alone.outcomes


def test_conversations_find_their_prompts_cached_whichever_api_server_gets_a_turn() -> None:
    one = chats(8, "home", 1)
    eight = chats(8, "home", 8)
    assert share_of_ideal(one) >= 0.93
    assert share_of_ideal(eight) == pytest.approx(share_of_ideal(one), abs=0.02)
    assert share_of_ideal(chats(8, "round-robin", 1)) < 0.7


def test_homes_shorten_the_wait_for_the_first_token() -> None:
    home = chats(8, "home", 8).ttft_ms
    turns = chats(8, "round-robin", 8).ttft_ms
    assert home is not None
    assert turns is not None
    assert home.p50 < 0.5 * turns.p50
    assert home.p99 < 0.75 * turns.p99


def test_every_host_gets_conversations() -> None:
    report = chats(8, "home", 8).fleet
    assert report is not None
    assert report.fewest_requests > 0.4 * report.mean_requests
    assert report.most_requests < 1.8 * report.mean_requests


def test_taking_turns_gives_every_host_as_many_requests() -> None:
    report = chats(8, "round-robin", 1).fleet
    assert report is not None
    assert report.most_requests - report.fewest_requests <= 1


def test_the_least_loaded_host_is_idle() -> None:
    arrivals = [Arrival(0.01 * number, 10, 100, conversation=number) for number in range(4)]
    assert set(fleet(arrivals, hosts=4, routing="least-loaded").requests_of.values()) == {1}


@pytest.mark.parametrize(("routing", "counts"), [("least-loaded", [0, 2]), ("round-robin", [1, 1])])
def test_an_api_server_does_not_see_at_once_what_another_one_sends(
    routing: Routing, counts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both find all hosts idle; servers that take turns begin with different hosts."""
    servers = itertools.cycle(range(2))
    monkeypatch.setattr("random.Random.choice", lambda self, choices: choices[next(servers)])
    arrivals = [Arrival(0.01 * number, 10, 100, conversation=number) for number in range(2)]
    simulated = fleet(arrivals, hosts=2, routing=routing, api_servers=2)
    assert sorted(simulated.requests_of.values()) == counts


def test_the_same_seed_gives_the_same_figures() -> None:
    arrivals = make_arrivals(CHATS)[:20]

    def figures(seed: int) -> dict[str, object]:
        return asdict(summarize(fleet(arrivals, seed, hosts=4, api_servers=4, host_losses=0.5)))

    assert figures(1) == figures(1)
    assert figures(1) != figures(2)


def test_every_request_ends_once_when_hosts_are_lost() -> None:
    simulated = fleet(make_arrivals(CHATS), hosts=8, api_servers=4, host_losses=1.0)
    report = summarize(simulated)
    assert report.fleet is not None
    assert report.fleet.lost_hosts >= 3
    assert report.fleet.moved_requests > 0
    assert report.finished == report.offered == len(simulated.outcomes)
    for outcome in simulated.outcomes:
        assert len(outcome.token_times) == outcome.arrival.output_tokens
        assert outcome.token_times == sorted(outcome.token_times)
        assert outcome.cached_tokens < outcome.arrival.prompt_tokens
    assert 0 < report.wasted_share < 0.05


def test_a_request_of_a_lost_host_computes_its_tokens_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host of the only request is lost at 5 s; it is noticed a second later."""
    monkeypatch.setattr(Fleet, "_loss_times", lambda self, rate, last_s: [5.0])
    monkeypatch.setattr("random.Random.choice", lambda self, choices: choices[0])
    arrivals = [Arrival(0.0, 64, 1000, conversation=number) for number in range(8)]
    simulated = fleet(arrivals, hosts=2, host_losses=0.1)
    moved = [outcome for outcome in simulated.outcomes if outcome.num_moves]
    assert 0 < len(moved) == simulated.requests_of.total() - 8
    for outcome in moved:
        before, after = [time for time in outcome.token_times if time < 5], outcome.token_times
        assert len(after) == 1000
        assert after[len(before)] > 6
        assert outcome.lost_tokens == 64 + len(before) - 1
        assert outcome.recomputed_tokens == outcome.lost_tokens


def test_a_lost_host_is_replaced_by_an_empty_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Fleet, "_loss_times", lambda self, rate, last_s: [5.0])
    turns = (NextTurn(10.0, 10, 1), NextTurn(HOST_START_S, 10, 1), NextTurn(1.0, 10, 1))
    arrivals = [Arrival(0.0, 64, 1, conversation=number, turns=turns) for number in range(8)]
    simulated = fleet(arrivals, hosts=2, host_losses=0.1)
    assert len(simulated.hosts) == 3
    cached = [outcome.cached_tokens for outcome in simulated.outcomes]
    assert cached[:8] == [0] * 8
    num_lost = cached[8:16].count(0)
    assert 0 < num_lost < 8, "the second turn of its conversations is computed elsewhere"
    assert cached[16:24].count(0) == num_lost, "the third returns to the empty host"
    assert 0 not in cached[24:]


def test_the_last_host_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Fleet, "_loss_times", lambda self, rate, last_s: [0.1, 0.2, 0.3])
    simulated = fleet([Arrival(0.0, 64, 50, conversation=number) for number in range(8)], hosts=2, host_losses=0.1)
    assert simulated.num_lost == 1
    assert all(outcome.finished for outcome in simulated.outcomes)


def test_requests_of_a_trace_go_by_the_beginning_of_their_prompt() -> None:
    arrivals = [Arrival(float(number), 1100, 1, blocks=(number % 3, 9)) for number in range(12)]
    simulated = fleet(arrivals, hosts=16, api_servers=4)
    assert sum(count > 0 for count in simulated.requests_of.values()) <= 3
    assert [outcome.cached_tokens > 1000 for outcome in simulated.outcomes] == [False] * 3 + [True] * 9


def test_deadlines_pass_on_every_host() -> None:
    arrivals = [Arrival(0.0, 64, 500, conversation=number, deadline_s=1.0) for number in range(4)]
    assert [outcome.refused for outcome in fleet(arrivals, hosts=2).outcomes] == ["DeadlineExceeded"] * 4


def test_percentiles_are_of_all_hosts() -> None:
    simulated = fleet(make_arrivals(CHATS)[:30], hosts=4)
    report = summarize(simulated)
    assert report.ttft_ms is not None
    seconds = [outcome.ttft_s for outcome in simulated.outcomes]
    assert report.ttft_ms.p99 == pytest.approx(1000 * percentile(seconds, 99))
    assert report.steps == sum(host.num_steps for host in simulated.hosts)
    assert 0 < report.pool_mean < report.pool_max <= 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (FleetOptions(hosts=0), "hosts must be between 1 and 10000, not 0"),
        (FleetOptions(api_servers=0), "api_servers must be between 1 and 10000, not 0"),
        (FleetOptions(hosts=2, host_losses=1.5), "host_losses must be between 0 and 1, not 1.5"),
        (FleetOptions(host_losses=0.1), "host_losses needs at least 2 `hosts`"),
    ],
)
def test_invalid_fleets_are_refused(options: FleetOptions, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        options.check()
