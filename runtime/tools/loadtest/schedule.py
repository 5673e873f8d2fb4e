"""When requests are sent: rates, bursts and ramps become seconds from the start.

It must not know what is sent. One invariant: the same seed gives the same seconds.

As in vLLM, `count` drawn intervals are stretched to end exactly at count / rate, so that no seed is luckier than
another; a ramp goes up over the requests, not over the seconds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate, repeat, takewhile
from random import Random
from typing import Literal

from ...common.errors import ConfigError
from ..traffic import check_number, draw_interval

MAX_RATE = 1e6  # requests per second
MAX_SECONDS = 1e7

RampUp = Literal["linear", "exponential"]


@dataclass(frozen=True, kw_only=True)
class Pacing:
    """How requests come. Open loop: at `request_rate` or by the ramp, whatever the server does. Closed loop, where the
    rate is inf and `max_concurrency` is given: so many users, each of whom sends again when answered.
    """

    request_rate: float = math.inf
    "Requests per second; inf sends all at once, or with --max-concurrency whenever one has ended."
    burstiness: float = 1.0
    "Shape of the gamma distribution of intervals: 1 is Poisson, less comes in bursts, inf like clockwork."
    max_concurrency: int | None = None
    "Requests under way at most."
    ramp_up_strategy: RampUp | None = None
    "linear or exponential, from --ramp-up-start-rps to --ramp-up-end-rps over all requests."
    ramp_up_start_rps: float | None = None
    "Requests per second at the start."
    ramp_up_end_rps: float | None = None
    "Requests per second at the end."
    duration: float | None = None
    "Seconds after which nothing more is sent; what is under way still ends."
    self_timed: bool | None = None
    "Send when a recorded trace says, at a --request-rate stretched to that. Default on for traces."
    num_warmups: int = 0
    "Requests sent before, and not measured."

    @property
    def closed_loop(self) -> bool:
        return self.max_concurrency is not None and self.ramp_up_strategy is None and math.isinf(self.request_rate)


def check_pacing(pacing: Pacing) -> None:
    """Raises ConfigError."""
    if not math.isinf(pacing.request_rate) or pacing.request_rate < 0:
        check_number("--request-rate", pacing.request_rate, 1e-6, MAX_RATE)
    if not math.isinf(pacing.burstiness) or pacing.burstiness < 0:
        check_number("--burstiness", pacing.burstiness, 1e-3, 1e3)
    check_number("--max-concurrency", pacing.max_concurrency, 1, 100_000)
    check_number("--num-warmups", pacing.num_warmups, 0, 100_000)
    check_number("--duration", pacing.duration, 1e-3, MAX_SECONDS)
    start, end = pacing.ramp_up_start_rps, pacing.ramp_up_end_rps
    if pacing.ramp_up_strategy is None:
        if start is not None or end is not None:
            raise ConfigError("--ramp-up-start-rps and --ramp-up-end-rps need --ramp-up-strategy linear or exponential")
        return
    if start is None or end is None:
        raise ConfigError("--ramp-up-strategy needs both --ramp-up-start-rps and --ramp-up-end-rps")
    if not math.isinf(pacing.request_rate):
        raise ConfigError("--ramp-up-strategy sets the rate: leave out --request-rate")
    check_number("--ramp-up-start-rps", start, 1e-6, MAX_RATE)
    check_number("--ramp-up-end-rps", end, start, MAX_RATE)


def draw_times(pacing: Pacing, count: int | None, seed: int) -> list[float]:
    """Seconds from the start of `count` requests, or of all before the duration. Raises ConfigError."""
    random = Random(seed)
    limit = math.inf if pacing.duration is None else pacing.duration
    if count is not None:
        return [time_s for time_s in _counted(pacing, count, random) if time_s < limit]
    if math.isinf(limit) or math.isinf(pacing.request_rate):
        raise ConfigError("without --num-prompts, --duration needs a --request-rate or --max-concurrency")
    return list(takewhile(lambda time_s: time_s < limit, _times(repeat(pacing.request_rate), pacing, random)))


def ramp_rate(pacing: Pacing, index: int, count: int) -> float:
    """Requests per second when request `index` of `count` is sent."""
    start, end = pacing.ramp_up_start_rps, pacing.ramp_up_end_rps
    if pacing.ramp_up_strategy is None or start is None or end is None:
        return pacing.request_rate
    progress = index / max(1, count - 1)
    if pacing.ramp_up_strategy == "linear":
        return start + (end - start) * progress
    return float(start * (end / start) ** progress)


def _counted(pacing: Pacing, count: int, random: Random) -> list[float]:
    rates = (ramp_rate(pacing, index, count) for index in range(count))
    if pacing.ramp_up_strategy is not None:
        return list(_times(rates, pacing, random))
    if math.isinf(pacing.request_rate):
        return [0.0] * count
    times = list(_times(rates, pacing, random))
    stretch = count / pacing.request_rate / times[-1]
    return [time_s * stretch for time_s in times]


def _times(rates: Iterable[float], pacing: Pacing, random: Random) -> Iterator[float]:
    return accumulate(draw_interval(rate, pacing.burstiness, random) for rate in rates)
