"""Policies under overload: fair shares between tenants, and priorities."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from quire.runtime.tools.simulation import Arrival, Workload, make_arrivals
from quire.scheduler import Fair, FirstComeFirstServed, Policy, Priority, Request

UNLIMITED = 10_000  # requests in the queue
RATE = 0.03  # requests per second of the modest tenant


def stream(tenant: str, rate: float, requests: int, prompt_tokens: int, seed: int) -> list[Arrival]:
    workload = Workload(
        request_rate=rate, num_prompts=requests, prompt_tokens=str(prompt_tokens), output_tokens="64", seed=seed
    )
    return [replace(arrival, tenant=tenant) for arrival in make_arrivals(workload)]


def by_time(arrivals: list[Arrival]) -> list[Arrival]:
    return sorted(arrivals, key=lambda arrival: arrival.time_s)


@pytest.fixture(params=[1024, 2048])
def flood(request: pytest.FixtureRequest, serve: Callable[..., Any]) -> Callable[[Policy], tuple[float, float]]:
    """Return the median TTFT of a tenant relative to being alone, and the fairness index, under a policy.

    Another tenant sends twenty times as much, several times what can be served.
    """
    prompt_tokens: int = request.param
    options: dict[str, Any] = {"max_num_seqs": 16, "itl_target_s": 0.2, "max_num_waiting": UNLIMITED}
    modest = stream("modest", RATE, 20, prompt_tokens, seed=2)
    flooding = stream("flooding", 20 * RATE, 400, prompt_tokens, seed=3)
    alone_s = serve(modest, **options).ttft()

    def flood(policy: Policy) -> tuple[float, float]:
        served = serve(by_time(modest + flooding), policy=policy, **options)
        return served.ttft("modest") / alone_s, served.report.fairness

    return flood


def test_fair_protects_a_tenant_from_a_flooding_one(flood: Callable[[Policy], tuple[float, float]]) -> None:
    slowdown, fairness = flood(Fair())
    assert slowdown < 1.3
    assert fairness > 0.99


def test_first_come_first_served_does_not(flood: Callable[[Policy], tuple[float, float]]) -> None:
    slowdown, fairness = flood(FirstComeFirstServed())
    assert slowdown > 20
    assert fairness < 0.97


def test_tenants_share_service_by_weight(serve: Callable[..., Any]) -> None:
    """Both tenants always have requests in the queue."""
    arrivals = by_time(stream("a", 2, 300, 128, seed=1) + stream("b", 2, 300, 128, seed=2))
    last = arrivals[-1].time_s
    for weights, ratio in (({}, 1.0), ({"a": 3.0}, 3.0)):
        served = serve(
            arrivals, policy=Fair(weights), max_num_waiting=UNLIMITED, max_num_seqs=8, max_num_batched_tokens=128
        )
        tokens = {
            tenant: sum(time < last for outcome in served.of(tenant) for time in outcome.token_times)
            for tenant in ("a", "b")
        }
        assert tokens["a"] / tokens["b"] == pytest.approx(ratio, rel=0.1)


class UrgentTenant(Priority):
    """Priority that puts the requests of tenant `urgent` first."""

    def push(self, request: Request) -> None:
        if request.spec.tenant == "urgent":
            request.spec = replace(request.spec, priority=-5)
        super().push(request)


def test_urgent_requests_come_first_and_others_age(serve: Callable[..., Any]) -> None:
    arrivals = [
        replace(arrival, tenant="urgent") if number % 10 == 0 else arrival
        for number, arrival in enumerate(stream("patient", 2, 300, 256, seed=1))
    ]
    served = {
        ageing_s: serve(arrivals, policy=UrgentTenant(ageing_s), max_num_seqs=16, max_num_waiting=UNLIMITED)
        for ageing_s in (10.0, 0.01)
    }
    unordered = serve(arrivals, policy=FirstComeFirstServed(), max_num_seqs=16, max_num_waiting=UNLIMITED)
    assert served[10.0].ttft("urgent", 99) < unordered.ttft("urgent") / 4
    assert served[10.0].ttft("patient", 99) < 1.2 * unordered.ttft("patient", 99)
    assert served[0.01].ttft("urgent") > 0.9 * unordered.ttft("urgent")
