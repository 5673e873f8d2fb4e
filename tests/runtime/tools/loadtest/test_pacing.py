"""When requests are sent: mean and variation of intervals, ramps, durations, and invalid options."""

from __future__ import annotations

import statistics
from itertools import pairwise
from typing import Any

import pytest
from quire.runtime.common.errors import ConfigError
from quire.runtime.tools.loadtest.load import draw_times, ramp_rate
from quire.runtime.tools.loadtest.options import Pacing, check_pacing


def gaps(times: list[float]) -> list[float]:
    return [later - earlier for earlier, later in pairwise([0.0, *times])]


@pytest.mark.parametrize(("burstiness", "variation"), [(0.25, 2.0), (1.0, 1.0), (4.0, 0.5)])
def test_intervals_are_gamma_distributed_with_the_exact_mean_rate(burstiness: float, variation: float) -> None:
    times = draw_times(Pacing(request_rate=5, burstiness=burstiness), 20_000, 1)
    assert times[-1] == pytest.approx(20_000 / 5)
    intervals = gaps(times)
    assert statistics.pstdev(intervals) / statistics.mean(intervals) == pytest.approx(variation, rel=0.04)


def test_infinite_burstiness_gives_constant_intervals() -> None:
    times = draw_times(Pacing(request_rate=4, burstiness=float("inf")), 3, 1)
    assert times == pytest.approx([0.25, 0.5, 0.75])


def test_an_infinite_rate_sends_all_at_once() -> None:
    assert draw_times(Pacing(), 3, 1) == [0.0, 0.0, 0.0]


def test_times_depend_on_the_seed() -> None:
    pacing = Pacing(request_rate=5)
    assert draw_times(pacing, 50, 1) == draw_times(pacing, 50, 1)
    assert draw_times(pacing, 50, 1) != draw_times(pacing, 50, 2)


def test_a_ramp_rises_over_the_requests() -> None:
    linear = Pacing(ramp_up_strategy="linear", ramp_up_start_rps=1, ramp_up_end_rps=5)
    assert [ramp_rate(linear, index, 5) for index in range(5)] == [1, 2, 3, 4, 5]
    exponential = Pacing(ramp_up_strategy="exponential", ramp_up_start_rps=1, ramp_up_end_rps=16)
    assert [ramp_rate(exponential, index, 5) for index in range(5)] == pytest.approx([1, 2, 4, 8, 16])
    times = draw_times(Pacing(**{**vars(linear), "burstiness": float("inf")}), 5, 1)
    assert gaps(times) == pytest.approx([1, 1 / 2, 1 / 3, 1 / 4, 1 / 5])


def test_a_duration_limits_the_requests() -> None:
    times = draw_times(Pacing(request_rate=100, duration=5), None, 1)
    assert times[-1] < 5
    assert len(times) == pytest.approx(500, rel=0.2)
    assert len(draw_times(Pacing(request_rate=1, burstiness=float("inf"), duration=3.5), 100, 1)) == 3


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"request_rate": 0}, "request_rate must be between"),
        ({"request_rate": float("nan")}, "request_rate must be between"),
        ({"request_rate": -float("inf")}, "request_rate must be between"),
        ({"burstiness": 0}, "burstiness must be between"),
        ({"max_concurrency": 0}, "max_concurrency must be between"),
        ({"duration": 0}, "duration must be between"),
        ({"num_warmups": -1}, "num_warmups must be between"),
        ({"ramp_up_start_rps": 1}, "need ramp_up_strategy"),
        ({"ramp_up_strategy": "linear"}, "needs both"),
        (
            {"ramp_up_strategy": "linear", "ramp_up_start_rps": 1, "ramp_up_end_rps": 2, "request_rate": 3},
            "leave out request_rate",
        ),
        ({"ramp_up_strategy": "linear", "ramp_up_start_rps": 3, "ramp_up_end_rps": 2}, "ramp_up_end_rps must be"),
        ({"ramp_up_strategy": "exponential", "ramp_up_start_rps": 0, "ramp_up_end_rps": 2}, "ramp_up_start_rps"),
    ],
)
def test_invalid_pacing_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_pacing(Pacing(**fields))


def test_a_duration_without_a_rate_is_refused() -> None:
    with pytest.raises(ConfigError, match="`duration` needs"):
        draw_times(Pacing(duration=5), None, 1)
