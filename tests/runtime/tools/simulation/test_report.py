"""The figures of simulations, worked out by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from quire.runtime.common.errors import ConfigError
from quire.runtime.tools.percentiles import LatencySummary
from quire.runtime.tools.simulation import Arrival, RequestOutcome, Simulator, parse_objectives, summarize
from quire.runtime.tools.simulation.report import fairness_index


def outcome(arrival_s: float, *token_times: float) -> RequestOutcome:
    return RequestOutcome(Arrival(arrival_s, 10, len(token_times)), list(token_times), finish_reason="length")


def test_latencies_have_vllms_definitions() -> None:
    request = outcome(1.0, 1.5, 1.7, 2.5)
    assert request.ttft_s == 0.5
    assert request.itl_s == pytest.approx([0.2, 0.8])
    assert request.tpot_s == pytest.approx(0.5)
    assert request.e2e_s == 1.5


def test_percentiles_are_linear_between_neighbors() -> None:
    found = LatencySummary.of(value / 1000 for value in range(101))
    assert found is not None
    assert (found.mean, found.p50, found.p90, found.p95, found.p99, found.max) == (50, 50, 90, 95, 99, 100)
    assert LatencySummary.of(()) is None


@pytest.mark.parametrize(
    ("objectives", "good"),
    [
        ((), 1.0),
        (("ttft:500",), 1.0),
        (("ttft:499",), 0.0),
        (("tpot:500",), 1.0),
        (("itl:500",), 0.0),  # one gap of 800 ms
        (("e2el:1500", "tpot:499.9"), 0.0),
    ],
)
def test_a_good_request_meets_all_objectives(objectives: tuple[str, ...], good: float) -> None:
    request = outcome(1.0, 1.5, 1.7, 2.5)
    assert all(objective.is_met(request) for objective in parse_objectives(objectives)) == bool(good)


def test_goodput_is_a_share_of_the_offered_requests(make_simulator: Callable[..., Simulator]) -> None:
    arrivals = [Arrival(0.0, 100, 1), Arrival(0.0, 1000, 1), Arrival(0.0, 10**6, 1), Arrival(2.0, 100, 1)]
    simulator = make_simulator(arrivals, max_num_seqs=1, max_model_len=2000)
    simulator.run()
    report = summarize(simulator, parse_objectives(["ttft:150"]))
    assert (report.offered, report.finished, report.goodput_share) == (4, 3, 0.5)
    assert report.goodput == pytest.approx(2 / 2.1)


@pytest.mark.parametrize("text", ["", "ttft", "ttft:", "ttft:x", "ttft:-1", "latency:5", "ttft:nan"])
def test_invalid_objectives_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"goodput: .* is not allowed"):
        parse_objectives([text])


def test_a_repeated_objective_is_refused() -> None:
    with pytest.raises(ConfigError, match="at most once"):
        parse_objectives(["ttft:1", "ttft:2"])


@pytest.mark.parametrize(
    ("served", "asked", "index"),
    [
        ({"a": 100, "b": 100}, {"a": 100, "b": 100}, 1.0),
        ({"a": 900, "b": 100}, {"a": 2000, "b": 100}, 1.0),  # a gets the rest of b's share
        ({"a": 500, "b": 500}, {"a": 2000, "b": 2000}, 1.0),
        ({"a": 950, "b": 50}, {"a": 2000, "b": 100}, (950 / 900 + 0.5) ** 2 / (2 * ((950 / 900) ** 2 + 0.25))),
        ({"a": 1000, "b": 0}, {"a": 2000, "b": 2000}, 0.5),  # one of two gets everything
        ({"a": 0, "b": 0}, {"a": 10, "b": 10}, 1.0),
        ({}, {}, 1.0),
    ],
)
def test_fairness_is_relative_to_max_min_shares(
    served: dict[str, float], asked: dict[str, float], index: float
) -> None:
    assert fairness_index(served, asked) == pytest.approx(index)


def test_a_larger_weight_entitles_to_a_larger_share() -> None:
    assert fairness_index({"a": 600, "b": 300}, {"a": 2000, "b": 2000}, {"a": 2.0}) == pytest.approx(1.0)
    assert fairness_index({"a": 450, "b": 450}, {"a": 2000, "b": 2000}, {"a": 2.0}) < 0.95
