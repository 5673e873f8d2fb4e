"""`History`: rates of the last two minutes, second by second, and quantiles of latencies over the last five.

It reads the instruments of the metrics. Its memory is fixed at start. Must not import Prometheus or HTTP.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import accumulate

import msgspec

from ...common.errors import QuireError
from ...engine.facade import EngineStats
from .instruments import Counter, Histogram

HISTORY_TICK_S = 1.0
TICKS = 120  # kept for rates: 2 minutes
TICKS_PER_SLICE = 10
NUM_SLICES = 30  # kept for quantiles: 5 minutes

FINE_BOUNDS_S = tuple(1e-4 * 10 ** (step / 24) for step in range(24 * 7))  # 10 % apart, from 0.1 ms to 1,000 s


class Quantiles(msgspec.Struct, frozen=True):
    """Quantiles in seconds, within 10 %, the distance of two bounds. None where nothing was observed."""

    count: int
    p50: float | None
    p90: float | None
    p99: float | None


class Tick(msgspec.Struct, frozen=True, kw_only=True):
    """One second of the history. While the engine does not answer, its gauges are 0."""

    generation_tokens_per_s: float
    prefill_tokens_per_s: float
    running: int
    waiting: int
    kv_cache_usage: float  # 0 to 1


class Window:
    """The last `NUM_SLICES` slices of a histogram: current counts minus the counts at the start of the oldest slice."""

    def __init__(self, histogram: Histogram) -> None:
        self._histogram = histogram
        self._earlier: deque[tuple[tuple[int, ...], float]] = deque(maxlen=NUM_SLICES)
        self.turn()

    def turn(self) -> None:
        """Begin a new slice."""
        self._earlier.append((tuple(self._histogram.counts), self._histogram.total))

    def quantiles(self) -> Quantiles:
        counts = self._counts()
        bounds = self._histogram.bounds
        return Quantiles(sum(counts), *(histogram_quantile(bounds, counts, share) for share in (0.5, 0.9, 0.99)))

    def mean(self) -> float | None:
        count = sum(self._counts())
        return (self._histogram.total - self._earlier[0][1]) / count if count else None

    def _counts(self) -> list[int]:
        return [now - before for now, before in zip(self._histogram.counts, self._earlier[0][0], strict=True)]


class History:
    """The recent past of one server. `watch` calls `tick` once a second."""

    def __init__(
        self,
        stats: Callable[[], EngineStats],
        generation_tokens: Counter,
        prefill_tokens: Counter,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stats = stats
        self._counters = (generation_tokens, prefill_tokens)
        self._clock = clock
        self._counted = (0, 0)
        self._ticked_at = clock()
        self._num_ticks = 0
        self._windows: list[Window] = []
        self.ticks: deque[Tick] = deque(maxlen=TICKS)

    def window(self, histogram: Histogram) -> Window:
        window = Window(histogram)
        self._windows.append(window)
        return window

    async def watch(self) -> None:
        while True:
            await asyncio.sleep(HISTORY_TICK_S)
            self.tick()

    def tick(self) -> None:
        now = self._clock()
        elapsed_s = now - self._ticked_at
        self._ticked_at = now
        generated, prefilled = (counter.value for counter in self._counters)
        generated_before, prefilled_before = self._counted
        self._counted = generated, prefilled
        running, waiting, usage = self._gauges()
        self.ticks.append(
            Tick(
                generation_tokens_per_s=(generated - generated_before) / elapsed_s,
                prefill_tokens_per_s=(prefilled - prefilled_before) / elapsed_s,
                running=running,
                waiting=waiting,
                kv_cache_usage=usage,
            )
        )
        self._num_ticks += 1
        if self._num_ticks % TICKS_PER_SLICE == 0:
            for window in self._windows:
                window.turn()

    def _gauges(self) -> tuple[int, int, float]:
        try:
            stats = self._stats()
        except QuireError:
            return 0, 0, 0.0
        return stats.running, stats.waiting, kv_cache_usage(stats)


def kv_cache_usage(stats: EngineStats) -> float:
    """Return the share of pages that live requests own, 0 to 1."""
    return stats.pages_owned / stats.pages_total if stats.pages_total else 0.0


def histogram_quantile(bounds: Sequence[float], counts: Sequence[int], share: float) -> float | None:
    """Return the value below which `share` of the values lie, linear within its bucket; at most the last bound."""
    up_to = list(accumulate(counts))
    rank = share * up_to[-1]
    if not rank:
        return None
    bucket = next(index for index, count in enumerate(up_to) if count >= rank)
    if bucket == len(bounds):
        return bounds[-1]
    below = bounds[bucket - 1] if bucket else 0.0
    return below + (bounds[bucket] - below) * (1 - (up_to[bucket] - rank) / counts[bucket])
