"""A simulated server of Qwen3-0.6B's shape (q8, int8 KV) on the machine of tests/bench/LOG.md.

The machine reads 34.5 GB/s and computes 920 GOP/s.
Budget, policy and every other option of the scheduler are plugged in by the scenario.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from quire.pager import Pager, check
from quire.runtime.common.config import EngineConfig
from quire.runtime.model import read_spec
from quire.runtime.model.runner import decide_capacity
from quire.runtime.tools.simulation import (
    Arrival,
    NoisyCost,
    RequestOutcome,
    RooflineCost,
    SimulatedSpill,
    Simulator,
    VirtualClock,
    given_roofline,
    roofline_cost,
    summarize,
)
from quire.runtime.tools.simulation.cost import SEQUENCE_S
from quire.scheduler import CostModel, LatencyBudget, Policy, Scheduler, SchedulerConfig, TokenBudget

SHAPE = Path(__file__).parents[1] / "data" / "qwen3-0.6b"
PAGE_SIZE = 32
PAGE_BYTES = PAGE_SIZE * 60_032  # int8 keys and values of 28 layers with 8 KV heads


class Served:
    """A finished simulation: every request has ended and no page is lost."""

    def __init__(self, simulator: Simulator) -> None:
        assert not simulator.scheduler.has_work
        assert all(outcome.finished or outcome.refused for outcome in simulator.outcomes)
        assert simulator.pager.pool.num_owned == simulator.pager.num_spilled == 0
        check(simulator.pager, [])
        self.simulator = simulator
        self.outcomes = simulator.outcomes
        self.report = summarize(simulator)

    def of(self, tenant: str | None = None) -> list[RequestOutcome]:
        """Return the finished requests, of all tenants or of one."""
        return [each for each in self.outcomes if each.finished and tenant in (None, each.arrival.tenant)]

    def ttft(self, tenant: str | None = None, percent: float = 50) -> float:
        """Return a percentile of the time to first token in seconds."""
        return float(np.percentile([outcome.ttft_s for outcome in self.of(tenant)], percent))

    def itl(self, tenant: str | None = None, percent: float = 99, during: tuple[float, float] = (0, math.inf)) -> float:
        """Return a percentile of the inter-token latency in seconds, of gaps that overlap `during`."""
        start, end = during
        gaps = [
            after - before
            for outcome in self.of(tenant)
            for before, after in pairwise(outcome.token_times)
            if after > start and before < end
        ]
        return float(np.percentile(gaps, percent))


@pytest.fixture(scope="session")
def cost() -> RooflineCost:
    spec = read_spec(SHAPE)
    config = EngineConfig(weights="q8", kv_cache_dtype="int8", kv_cache_memory=1 << 30, threads=2)
    return roofline_cost(spec, decide_capacity(config, spec), given_roofline(34.5e9, 920e9))


@pytest.fixture(scope="session")
def serve(cost: RooflineCost) -> Callable[..., Served]:
    def serve(
        arrivals: Iterable[Arrival],
        *,
        num_tokens: int = 65_536,
        max_num_batched_tokens: int = 512,
        max_num_seqs: int = 64,
        noise: float = 0.0,
        spill_bytes: int = 0,
        itl_target_s: float | None = None,
        policy: Policy | None = None,
        **limits: Any,
    ) -> Served:
        clock = VirtualClock()
        spill = SimulatedSpill(PAGE_BYTES, spill_bytes) if spill_bytes else None
        pager = Pager(PAGE_SIZE, num_tokens // PAGE_SIZE, store=spill, clock=clock)
        learned = CostModel()
        budget = (
            TokenBudget(max_num_batched_tokens)
            if itl_target_s is None
            else LatencyBudget(learned, itl_target_s, max_num_batched_tokens)
        )
        config = SchedulerConfig(max_num_seqs=max_num_seqs, **limits)
        scheduler = Scheduler(pager, budget, config, cost=learned, policy=policy, clock=clock)
        true_cost = NoisyCost(cost, noise, seed=1) if noise else cost
        simulator = Simulator(scheduler, pager, clock, true_cost, arrivals, spill=spill, sequence_s=SEQUENCE_S)
        simulator.run()
        return Served(simulator)

    return serve
