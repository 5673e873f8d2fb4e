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
    assert arrivals == [Arrival(0.25, 7, 2), Arrival(0.5, 7, 2), Arrival(0.75, 7, 2)]


def test_requests_depend_on_the_seed_only() -> None:
    def draw(seed: int) -> list[Arrival]:
        return make_arrivals(Workload(arrivals="bursty", prompt_tokens="1-900", tenants="a=2,b=1", seed=seed))

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)


def test_tenants_send_at_their_relative_rates() -> None:
    counts = Counter(each.tenant for each in make_arrivals(Workload(num_prompts=10_000, tenants="a=20, b=1")))
    assert set(counts) == {"a", "b"}
    assert counts["a"] / counts["b"] == pytest.approx(20, rel=0.15)


def test_a_shared_prefix_comes_before_each_prompt() -> None:
    (arrival,) = make_arrivals(Workload(num_prompts=1, prompt_tokens="10", shared_prefix_tokens=64))
    assert (arrival.prompt_tokens, arrival.blocks, arrival.block_tokens) == (74, (0,), 64)


@pytest.mark.parametrize(
    ("workload", "message"),
    [
        (Workload(request_rate=0), "request_rate must be between"),
        (Workload(request_rate=float("nan")), "request_rate must be between"),
        (Workload(num_prompts=0), "num_prompts must be between"),
        (Workload(burstiness=0), "burstiness must be between"),
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
