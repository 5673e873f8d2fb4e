"""Thousands of requests, bursts, and shared prefixes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from quire.runtime.tools.simulation import Workload, make_arrivals

USERS = 10_000


def test_thousands_of_users_are_all_served(serve: Callable[..., Any]) -> None:
    tenants = ",".join(f"tenant-{number}=1" for number in range(100))
    workload = Workload(
        request_rate=6, num_prompts=USERS // 4, prompt_tokens="16-64", output_tokens="2-8", tenants=tenants
    )
    served = serve(make_arrivals(workload), max_num_seqs=256)
    report = served.report
    assert (report.finished, report.refused) == (USERS // 4, {})
    assert report.output_tokens == sum(outcome.arrival.output_tokens for outcome in served.outcomes)
    assert report.output_tokens > 10_000
    assert served.ttft(percent=99) < 0.5
    assert served.itl(percent=99) < 0.3
    assert report.fairness > 0.99


def test_ten_thousand_users_at_once_are_served_in_turn(serve: Callable[..., Any]) -> None:
    workload = Workload(arrivals="constant", request_rate=1e6, num_prompts=USERS, prompt_tokens="16", output_tokens="4")
    served = serve(make_arrivals(workload), max_num_waiting=USERS)
    assert served.report.finished == USERS
    firsts = [outcome.token_times[0] for outcome in served.outcomes]
    assert firsts == sorted(firsts)


def test_bursts_cost_waiting_not_throughput(serve: Callable[..., Any]) -> None:
    def offered(process: Any) -> Any:
        workload = Workload(
            arrivals=process,
            request_rate=0.8,
            num_prompts=300,
            prompt_tokens="256",
            output_tokens="128",
            burstiness=0.1,
        )
        return serve(make_arrivals(workload))

    constant = offered("constant")
    poisson = offered("poisson")
    bursty = offered("bursty")
    assert constant.ttft(percent=99) < poisson.ttft(percent=99) < bursty.ttft(percent=99)
    assert bursty.report.finished == 300
    assert bursty.report.request_throughput > 0.95 * constant.report.request_throughput


def test_a_shared_prefix_is_computed_once(serve: Callable[..., Any]) -> None:
    def offered(shared: int, own: int) -> Any:
        workload = Workload(
            request_rate=0.8, num_prompts=200, prompt_tokens=str(own), output_tokens="64", shared_prefix_tokens=shared
        )
        return serve(make_arrivals(workload))

    own = offered(0, 512)
    shared = offered(480, 32)
    assert own.report.cached_share == 0
    assert shared.report.cached_share > 0.9
    assert shared.ttft() < own.ttft() / 4
