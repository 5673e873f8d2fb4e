"""Streams of requests: their laws, their seeds, and what is refused of what a command line says of them."""

from __future__ import annotations

import itertools
import statistics
from collections import Counter
from pathlib import Path
from random import Random

import pytest
from quire.runtime.errors import ConfigError
from quire.runtime.simulation import Workload, make_arrivals
from quire.runtime.simulation.arrivals import Arrival, bursty, parse_lengths, parse_tenants, poisson, rescale


def test_constant_arrivals_come_like_clockwork() -> None:
    arrivals = make_arrivals(Workload(arrivals="constant", rate=4, requests=3, prompt_tokens="7", output_tokens="2"))
    assert arrivals == [Arrival(0.25, 7, 2), Arrival(0.5, 7, 2), Arrival(0.75, 7, 2)]


@pytest.mark.parametrize(("burstiness", "variation"), [(0.25, 2.0), (1.0, 1.0), (4.0, 0.5)])
def test_burstiness_is_the_shape_of_the_gamma_distribution(burstiness: float, variation: float) -> None:
    intervals = list(itertools.islice(bursty(5.0, burstiness, Random(1)), 40_000))
    mean = statistics.mean(intervals)
    assert mean == pytest.approx(1 / 5, rel=0.03)
    assert statistics.pstdev(intervals) / mean == pytest.approx(variation, rel=0.03)


def test_poisson_arrivals_are_exponentially_apart() -> None:
    intervals = list(itertools.islice(poisson(5.0, Random(1)), 40_000))
    mean = statistics.mean(intervals)
    assert mean == pytest.approx(1 / 5, rel=0.03)
    assert statistics.pstdev(intervals) == pytest.approx(mean, rel=0.03)


def test_the_seed_decides_everything() -> None:
    def draw(seed: int) -> list[Arrival]:
        return make_arrivals(Workload(arrivals="bursty", prompt_tokens="1-900", tenants="a=2,b=1", seed=seed))

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)


def test_tenants_come_at_their_relative_rates() -> None:
    counts = Counter(each.tenant for each in make_arrivals(Workload(requests=10_000, tenants="a=20, b=1")))
    assert set(counts) == {"a", "b"}
    assert counts["a"] / counts["b"] == pytest.approx(20, rel=0.15)


def test_lengths() -> None:
    random = Random(1)
    assert {parse_lengths("--x", "5")(random) for _ in range(9)} == {5}
    assert {parse_lengths("--x", "2-4")(random) for _ in range(99)} == {2, 3, 4}
    drawn = [parse_lengths("--x", "lognormal:100,0.5")(random) for _ in range(9_999)]
    assert statistics.median(drawn) == pytest.approx(100, rel=0.03)
    assert min(drawn) >= 1


def test_a_shared_prefix_comes_before_each_prompt() -> None:
    (arrival,) = make_arrivals(Workload(requests=1, prompt_tokens="10", shared_prefix_tokens=64))
    assert (arrival.prompt_tokens, arrival.blocks, arrival.block_tokens) == (74, (0,), 64)


def test_rescaling_keeps_the_pattern() -> None:
    arrivals = [Arrival(10.0, 1, 1), Arrival(11.0, 1, 1), Arrival(14.0, 1, 1)]
    assert [each.time_s for each in rescale(arrivals, 1.0)] == [0.0, 0.5, 2.0]
    with pytest.raises(ConfigError, match="come at once"):
        rescale(arrivals[:1], 1.0)


@pytest.mark.parametrize("text", ["", "0", "x", "-5", "9-3", "1.5", "99999999999", "lognormal:5", "lognormal:0,1", "³"])
def test_lengths_that_cannot_be_meant(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--prompt-tokens: .* is not allowed"):
        parse_lengths("--prompt-tokens", text)


@pytest.mark.parametrize("text", ["", "a", "a=", "a=0", "a=x", "a=1,a=2", "a=1,", "=3", "a=nan"])
def test_tenants_that_cannot_be_meant(text: str) -> None:
    with pytest.raises(ConfigError, match="--tenants"):
        parse_tenants(text)


@pytest.mark.parametrize(
    ("workload", "message"),
    [
        (Workload(rate=0), "--rate must be between"),
        (Workload(rate=float("nan")), "--rate must be between"),
        (Workload(requests=0), "--requests must be between"),
        (Workload(burstiness=0), "--burstiness must be between"),
        (Workload(shared_prefix_tokens=-1), "--shared-prefix-tokens must be between"),
        (Workload(trace=Path("x")), "with --arrivals mooncake or azure"),
        (Workload(arrivals="azure"), "needs --trace FILE"),
        (Workload(arrivals="azure", trace=Path("x"), tenants="a=1"), "are for drawn requests"),
    ],
)
def test_workloads_that_cannot_be_meant(workload: Workload, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_arrivals(workload)
