"""A simulated server with pages of 32 tokens and a cost of steps that the test chooses."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
from quire.pager import Pager
from quire.runtime.tools.simulation import Arrival, SimulatedSpill, Simulator, VirtualClock
from quire.scheduler import Scheduler, SchedulerConfig, StepPlan, TokenBudget


def millisecond_per_row(plan: StepPlan) -> float:
    return 0.001 * (plan.num_decode_rows + plan.num_prefill_tokens)


def make_simulator(
    arrivals: Iterable[Arrival],
    cost: Callable[[StepPlan], float] = millisecond_per_row,
    *,
    num_pages: int = 100,
    max_num_batched_tokens: int = 2048,
    max_num_seqs: int = 8,
    max_model_len: int | None = None,
    max_num_waiting: int = 1024,
    spill: SimulatedSpill | None = None,
    sequence_s: float = 0.0,
    debug: bool = True,
    **options: Any,
) -> Simulator:
    clock = VirtualClock()
    pager = Pager(32, num_pages)
    scheduler = Scheduler(
        pager,
        TokenBudget(max_num_batched_tokens),
        SchedulerConfig(max_num_seqs=max_num_seqs, max_num_waiting=max_num_waiting),
        clock=clock,
        debug=debug,
        **options,
    )
    return Simulator(
        scheduler, pager, clock, cost, arrivals, max_model_len=max_model_len, spill=spill, sequence_s=sequence_s
    )


@pytest.fixture(name="make_simulator")
def fixture() -> Callable[..., Simulator]:
    return make_simulator
