"""Ten times the requests that can be served: accepted ones are served as usual, the others are refused at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from quire.runtime.tools.simulation import Workload, make_arrivals

CAPACITY = 1.2  # requests per second of 256 prompt and 128 output tokens
QUEUE = 32
TARGET_S = 0.15


def overload(serve: Callable[..., Any], factor: float, requests: int) -> Any:
    workload = Workload(request_rate=factor * CAPACITY, num_prompts=requests, prompt_tokens="256", output_tokens="128")
    arrivals = make_arrivals(workload)
    return serve(arrivals, itl_target_s=TARGET_S, max_num_seqs=16, max_num_waiting=QUEUE)


def test_the_queue_is_limited_and_other_requests_are_refused(serve: Callable[..., Any]) -> None:
    report = overload(serve, 10, 1000).report
    assert set(report.refused) == {"QueueFull"}
    assert report.refused["QueueFull"] > 0.8 * report.offered
    assert report.most_waiting <= QUEUE


def test_throughput_does_not_fall(serve: Callable[..., Any]) -> None:
    busy = overload(serve, 1, 200)
    overloaded = overload(serve, 10, 1000)
    assert overloaded.report.request_throughput > 0.95 * busy.report.request_throughput


def test_the_latency_of_running_requests_stays_flat(serve: Callable[..., Any]) -> None:
    """It equals that of a server that is just full, and does not grow over time."""
    full = overload(serve, 1.5, 300)
    overloaded = overload(serve, 10, 1000)
    assert overloaded.itl() < TARGET_S
    half = overloaded.simulator.clock.now / 2
    for percent in (50, 99):
        assert overloaded.itl(percent=percent) < 1.1 * full.itl(percent=percent)
        assert overloaded.itl(percent=percent, during=(half, 2 * half)) < 1.1 * overloaded.itl(
            percent=percent, during=(0, half)
        )


def test_waiting_time_is_limited_by_the_queue(serve: Callable[..., Any]) -> None:
    """No request waits longer than serving the full queue ahead of it takes."""
    overloaded = overload(serve, 10, 1000)
    assert overloaded.ttft(percent=100) < 1.2 * (QUEUE + 16) / CAPACITY
