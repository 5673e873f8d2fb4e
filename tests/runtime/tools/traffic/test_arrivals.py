"""Random streams of requests: distributions of intervals and lengths, tenants, and invalid options."""

from __future__ import annotations

import itertools
import statistics
from random import Random

import pytest
from quire.runtime.common.errors import ConfigError
from quire.runtime.tools.traffic import Arrival, bursty, draw_interval, parse_lengths, parse_tenants, poisson, rescale


@pytest.mark.parametrize(("burstiness", "variation"), [(0.25, 2.0), (1.0, 1.0), (4.0, 0.5)])
def test_burstiness_is_the_shape_of_the_gamma_distribution(burstiness: float, variation: float) -> None:
    intervals = list(itertools.islice(bursty(5.0, burstiness, Random(1)), 40_000))
    mean = statistics.mean(intervals)
    assert mean == pytest.approx(1 / 5, rel=0.03)
    assert statistics.pstdev(intervals) / mean == pytest.approx(variation, rel=0.03)


def test_infinite_burstiness_gives_constant_intervals() -> None:
    assert draw_interval(4.0, float("inf"), Random(1)) == 0.25


def test_poisson_intervals_are_exponential() -> None:
    intervals = list(itertools.islice(poisson(5.0, Random(1)), 40_000))
    mean = statistics.mean(intervals)
    assert mean == pytest.approx(1 / 5, rel=0.03)
    assert statistics.pstdev(intervals) == pytest.approx(mean, rel=0.03)


def test_lengths() -> None:
    random = Random(1)
    assert {parse_lengths("x", "5")(random) for _ in range(9)} == {5}
    assert {parse_lengths("x", "2-4")(random) for _ in range(99)} == {2, 3, 4}
    drawn = [parse_lengths("x", "lognormal:100,0.5")(random) for _ in range(9_999)]
    assert statistics.median(drawn) == pytest.approx(100, rel=0.03)
    assert min(drawn) >= 1


def test_rescaling_keeps_the_pattern() -> None:
    arrivals = [Arrival(10.0, 1, 1), Arrival(11.0, 1, 1), Arrival(14.0, 1, 1)]
    assert [each.time_s for each in rescale(arrivals, 1.0, "rate")] == [0.0, 0.5, 2.0]
    with pytest.raises(ConfigError, match="rate: 1 requests that arrive at the same time"):
        rescale(arrivals[:1], 1.0, "rate")


@pytest.mark.parametrize("text", ["", "0", "x", "-5", "9-3", "1.5", "99999999999", "lognormal:5", "lognormal:0,1", "³"])
def test_invalid_lengths_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"prompt_tokens: .* is not allowed"):
        parse_lengths("prompt_tokens", text)


@pytest.mark.parametrize("text", ["", "a", "a=", "a=0", "a=x", "a=1,a=2", "a=1,", "=3", "a=nan"])
def test_invalid_tenants_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="tenants"):
        parse_tenants(text)
