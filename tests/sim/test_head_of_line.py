"""A long prompt arrives while sixteen requests decode: decoding continues and the prompt progresses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from quire.runtime.tools.simulation import Arrival

READERS = [Arrival(0.0, 128, 500, "reader") for _ in range(16)]
LONG = Arrival(20.0, 4096, 8, "long")


@pytest.fixture
def arrives(serve: Callable[..., Any]) -> Callable[..., tuple[float, float]]:
    """Return the p99 inter-token latency during the prompt, and the prompt's TTFT relative to running alone."""
    alone_s = serve([Arrival(0.0, 4096, 8)]).ttft()

    def arrives(**options: Any) -> tuple[float, float]:
        served = serve([*READERS, LONG], max_num_seqs=32, **options)
        ttft_s = served.ttft("long")
        return served.itl("reader", during=(LONG.time_s, LONG.time_s + ttft_s)), ttft_s / alone_s

    return arrives


@pytest.mark.parametrize("noise", [0.0, 0.1])
@pytest.mark.parametrize("target_s", [0.15, 0.2, 0.3])
def test_latency_stays_near_the_target_and_the_prompt_progresses(
    target_s: float, noise: float, arrives: Callable[..., tuple[float, float]]
) -> None:
    itl_s, ttft_ratio = arrives(itl_target_s=target_s, noise=noise)
    assert itl_s < 1.5 * target_s
    assert ttft_ratio < 2.2


def test_without_noise_latency_stays_within_the_target(arrives: Callable[..., tuple[float, float]]) -> None:
    assert arrives(itl_target_s=0.15)[0] < 0.15


@pytest.mark.parametrize("target_s", [0.005, 0.01, 0.02])
def test_a_target_that_one_sequence_cannot_meet_does_not_serialize_requests(
    target_s: float, serve: Callable[..., Any]
) -> None:
    """Decoding one sequence takes 0.023 s. Eight requests one after another would take 2.4 times as long."""
    arrivals = [Arrival(0.01 * index, 512, 128) for index in range(8)]
    without = serve(arrivals)
    served = serve(arrivals, itl_target_s=target_s)
    assert served.report.duration_s < 1.2 * without.report.duration_s
    assert served.ttft(percent=100) < 1.6 * without.ttft(percent=100)


def test_a_token_budget_trades_latency_for_prefill_speed(arrives: Callable[..., tuple[float, float]]) -> None:
    """A token count cannot express a latency target: how many tokens fit depends on machine, model and contexts."""
    large = arrives(max_num_batched_tokens=512)
    small = arrives(max_num_batched_tokens=64)
    assert large[0] > 1.0 > 0.3 > small[0]
    assert large[1] < 1.1 < small[1]
