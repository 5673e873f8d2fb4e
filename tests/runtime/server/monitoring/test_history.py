"""The history: rates second by second, and quantiles of the last five minutes, in fixed memory."""

from __future__ import annotations

import random

import msgspec
import pytest
from quire.runtime.common.errors import Unavailable
from quire.runtime.engine.facade import EngineStats
from quire.runtime.server.monitoring.history import (
    FINE_BOUNDS_S,
    NUM_SLICES,
    TICKS,
    TICKS_PER_SLICE,
    History,
    Tick,
    histogram_quantile,
)
from quire.runtime.server.monitoring.instruments import Counter, Histogram

from tests.support import samples

STATS = msgspec.structs.replace(
    samples.STATS,
    prefix_queries_tokens=0,
    prefix_hits_tokens=0,
    preemptions=0,
)


class Watched:
    """A history on a clock that a test moves."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.stats: EngineStats | None = STATS
        self.generation, self.prefill = Counter("generation_tokens", ""), Counter("prefill_tokens", "")
        self.latency = Histogram("latency_seconds", "", (0.1, 1), FINE_BOUNDS_S)
        self.history = History(self._stats, self.generation, self.prefill, lambda: self.now_s)
        self.window = self.history.window(self.latency)

    def _stats(self) -> EngineStats:
        if self.stats is None:
            raise Unavailable("gone")
        return self.stats

    def tick(self, times: int = 1) -> None:
        for _ in range(times):
            self.now_s += 1
            self.history.tick()


def tick(generation: float, prefill: float, running: int = 2, waiting: int = 1, kv_cache_usage: float = 0.4) -> Tick:
    return Tick(
        generation_tokens_per_s=generation,
        prefill_tokens_per_s=prefill,
        running=running,
        waiting=waiting,
        kv_cache_usage=kv_cache_usage,
    )


@pytest.fixture
def watched() -> Watched:
    return Watched()


def test_a_tick_has_the_rates_since_the_last_one(watched: Watched) -> None:
    watched.generation.value = 50
    watched.prefill.value = 400
    watched.tick()
    watched.generation.value += 30
    watched.now_s += 1  # a tick that comes late
    watched.tick()
    assert list(watched.history.ticks) == [tick(50, 400), tick(15, 0)]


def test_rates_are_known_while_the_engine_does_not_answer(watched: Watched) -> None:
    watched.stats = None
    watched.generation.value = 5
    watched.tick()
    assert list(watched.history.ticks) == [tick(5, 0, running=0, waiting=0, kv_cache_usage=0)]


def test_memory_is_fixed(watched: Watched) -> None:
    watched.tick(3 * TICKS)
    assert len(watched.history.ticks) == TICKS


def test_quantiles_cover_the_window_only(watched: Watched) -> None:
    watched.latency.observe(5)
    assert watched.window.quantiles().count == 1
    watched.tick((NUM_SLICES - 1) * TICKS_PER_SLICE)
    assert watched.window.quantiles().count == 1
    assert watched.window.mean() == 5
    watched.tick(TICKS_PER_SLICE)
    assert watched.window.quantiles().count == 0
    assert watched.window.quantiles().p50 is None
    assert watched.window.mean() is None


def test_quantiles_are_within_ten_percent(watched: Watched) -> None:
    draw = random.Random(3)
    values = sorted(draw.lognormvariate(-3, 1.5) for _ in range(5000))
    for value in values:
        watched.latency.observe(value)
    found = watched.window.quantiles()
    assert found.count == 5000
    assert found.p50 == pytest.approx(values[2500], rel=0.1)
    assert found.p90 == pytest.approx(values[4500], rel=0.1)
    assert found.p99 == pytest.approx(values[4950], rel=0.1)


def test_quantiles_are_linear_between_bounds() -> None:
    assert histogram_quantile((1, 2, 4), (0, 0, 4, 0), 0.5) == 3
    assert histogram_quantile((1, 2, 4), (2, 2, 0, 0), 0.75) == 1.5
    assert histogram_quantile((1, 2, 4), (1, 0, 0, 9), 0.9) == 4  # a value beyond all bounds
    assert histogram_quantile((1, 2, 4), (0, 0, 0, 0), 0.9) is None


def test_finer_bounds_are_not_exposed(watched: Watched) -> None:
    for value in (0.05, 0.1, 0.3, 7):
        watched.latency.observe(value)
    family = watched.latency.family()
    assert [
        (sample.labels.get("le"), sample.value) for sample in family.samples if sample.name.endswith("_bucket")
    ] == [
        ("0.1", 2),
        ("1.0", 3),
        ("+Inf", 4),
    ]
