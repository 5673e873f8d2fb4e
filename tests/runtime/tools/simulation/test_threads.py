"""The effect of the number of threads on the cost of a step: uneven shares, waits, and the bandwidth of few readers."""

from __future__ import annotations

from pathlib import Path

import pytest
from quire.runtime.common.config import EngineConfig
from quire.runtime.model import read_spec
from quire.runtime.model.runner import decide_capacity
from quire.runtime.tools.bench import Roofline
from quire.runtime.tools.simulation import RooflineCost, given_roofline, roofline_cost
from quire.runtime.tools.simulation.threads import busy_share, finish_seconds, start_seconds
from quire.scheduler import ScheduledSequence, StepPlan

SHAPE = Path(__file__).parents[3] / "data" / "qwen3-0.6b"
SOCKET = given_roofline(300e9, 64 * 460e9)


def cost_on(threads: int, roofline: Roofline = SOCKET) -> RooflineCost:
    spec = read_spec(SHAPE)
    config = EngineConfig(weights="q8", kv_cache_dtype="int8", kv_cache_memory=1 << 30, threads=threads)
    return roofline_cost(spec, decide_capacity(config, spec), roofline)


def plan(users: int, first: int, rows: int) -> StepPlan:
    sequences = (ScheduledSequence(i, ((),), first, [0] * rows, 1, None, (), 0) for i in range(users))
    return StepPlan(1, tuple(sequences), 0, 0)


@pytest.mark.parametrize(
    ("units", "threads", "share"),
    [(32, 1, 1), (32, 2, 1), (32, 64, 1 / 2), (96, 64, 3 / 4), (128, 64, 1), (32, 96, 1 / 3), (3, 2, 3 / 4)],
)
def test_the_busy_share_counts_workers_while_the_slowest_works(units: int, threads: int, share: float) -> None:
    assert busy_share(units, threads) == pytest.approx(share)


def test_one_thread_does_not_wait() -> None:
    assert (finish_seconds(1), start_seconds(1)) == (0, 0)


def test_waits_and_starts_grow_with_the_threads() -> None:
    for cost in (finish_seconds, start_seconds):
        seconds = [cost(threads) for threads in (1, 2, 8, 9, 16, 32, 64, 128)]
        assert seconds == sorted(set(seconds))
    assert finish_seconds(2) == pytest.approx(0.1e-6, rel=0.5)  # measured


@pytest.mark.parametrize(("rows", "groups"), [(100, 1), (512, 3)])
def test_threads_that_layers_with_few_blocks_leave_idle_slow_prefill(rows: int, groups: int) -> None:
    """On 64 threads o and down have 32 blocks, gate and up 96, qkv 128, for each group of at most 192 rows."""
    layers = {128: 4096 * 1024, 32: 1024 * 2048 + 1024 * 3072, 96: 6144 * 1024}  # blocks: weights
    slower = sum(count / busy_share(blocks * groups, 64) for blocks, count in layers.items()) / sum(layers.values())
    assert slower > 1.1
    assert cost_on(64).linear_seconds(rows, 0) / cost_on(2).linear_seconds(rows, 0) == pytest.approx(slower)


def test_few_readers_of_a_layer_do_not_reach_the_bandwidth_of_fast_memory() -> None:
    """32 blocks have 32 readers, which read 576 GB/s; with 300 GB/s the memory is the limit."""
    assert cost_on(64).weights_s == pytest.approx(cost_on(2).weights_s)
    assert cost_on(64, given_roofline(1152e9, 1e13)).weights_s > cost_on(64).weights_s / (1152 / 300) * 1.1


@pytest.mark.parametrize(("users", "first", "rows"), [(1, 200, 1), (32, 2_000, 1), (1, 0, 512)])
def test_threads_that_bring_no_bandwidth_and_no_arithmetic_make_no_step_faster(
    users: int, first: int, rows: int
) -> None:
    seconds = [cost_on(threads)(plan(users, first, rows)) for threads in (32, 64, 128)]
    assert seconds == sorted(seconds)


def test_a_sequence_with_few_heads_leaves_threads_idle() -> None:
    """8 of 64 threads work on one short sequence with 8 KV heads; 8 such sequences take no longer."""
    cost = cost_on(64)

    def attention_s(users: int) -> float:
        linear_s = max(cost.weights_s, cost.linear_seconds(users, users))
        return cost(plan(users, 3, 1)) - cost.step_s - linear_s

    assert attention_s(8) == pytest.approx(attention_s(1), rel=0.15)
    assert attention_s(16) == pytest.approx(2 * attention_s(1), rel=0.15)
