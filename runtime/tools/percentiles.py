"""Percentiles and summaries of latencies, for all tools. Percentiles are interpolated linearly, as in vLLM."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike


def percentiles(values: ArrayLike, percents: Sequence[float]) -> list[float]:
    """Return the `percents` (0 to 100) of `values`; NaN where there are no values."""
    array = np.asarray(values, np.float64)
    return [float(value) for value in np.percentile(array, percents)] if array.size else [math.nan] * len(percents)


def percentile(values: ArrayLike, percent: float) -> float:
    """Return one percentile of `values`; NaN where there are no values."""
    return percentiles(values, (percent,))[0]


@dataclass(frozen=True, slots=True)
class LatencySummary:
    """Mean, percentiles and maximum of a latency, in milliseconds."""

    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float

    @classmethod
    def of(cls, seconds: Iterable[float]) -> LatencySummary | None:
        """Summarize latencies in seconds. None: there are none."""
        values = np.fromiter(seconds, np.float64) * 1000
        if not values.size:
            return None
        p50, p90, p95, p99 = percentiles(values, (50, 90, 95, 99))
        return cls(float(values.mean()), p50, p90, p95, p99, float(values.max()))
