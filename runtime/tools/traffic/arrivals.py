"""Streams of requests drawn from distributions: when each arrives, and how long its prompt and its answer are.

One `random.Random` decides everything: the same seed gives the same stream on every machine.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random

from ...common.errors import ConfigError

MAX_LENGTH = 10_000_000  # tokens; more than any model takes
MAX_SIGMA = 4.0

Lengths = Callable[[Random], int]  # draws a number of tokens, at least 1


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request. Its prompt starts with `blocks` of `block_tokens` tokens; equal ids mean equal tokens.

    The rest of the prompt is shared with no other request.
    """

    time_s: float
    prompt_tokens: int
    output_tokens: int
    tenant: str = ""
    blocks: tuple[int, ...] = ()
    block_tokens: int = 512
    deadline_s: float | None = None  # for the whole request, from its arrival


def draw_arrivals(
    count: int,
    intervals: Iterator[float],
    prompt_tokens: Lengths,
    output_tokens: Lengths,
    random: Random,
    *,
    tenants: Mapping[str, float] | None = None,
    shared_prefix_tokens: int = 0,
    deadline_s: float | None = None,
) -> list[Arrival]:
    """Draw `count` requests that are `intervals` seconds apart.

    `tenants` maps each tenant to its relative rate. Every prompt starts with `shared_prefix_tokens` that are the same
    for all requests of its tenant, in addition to `prompt_tokens`.
    """
    names, weights = list(tenants or {"": 1.0}), list((tenants or {"": 1.0}).values())
    blocks = (0,) if shared_prefix_tokens else ()
    return [
        Arrival(
            time_s,
            shared_prefix_tokens + prompt_tokens(random),
            output_tokens(random),
            random.choices(names, weights)[0],
            blocks=blocks,
            block_tokens=shared_prefix_tokens or 512,
            deadline_s=deadline_s,
        )
        for time_s in itertools.islice(itertools.accumulate(intervals), count)
    ]


def constant(rate: float) -> Iterator[float]:
    """Return the seconds between requests at a constant `rate` per second."""
    return itertools.repeat(1 / rate)


def poisson(rate: float, random: Random) -> Iterator[float]:
    """Yield the seconds between requests of many independent users."""
    while True:
        yield random.expovariate(rate)


def bursty(rate: float, burstiness: float, random: Random) -> Iterator[float]:
    """Yield the seconds between requests that come in bursts, see `draw_interval`."""
    while True:
        yield draw_interval(rate, burstiness, random)


def draw_interval(rate: float, burstiness: float, random: Random) -> float:
    """Draw gamma-distributed seconds of shape `burstiness`, as in vLLM: 1 is Poisson, below 1 bursty, inf constant."""
    return 1 / rate if math.isinf(burstiness) else random.gammavariate(burstiness, 1 / (rate * burstiness))


def rescale(arrivals: Sequence[Arrival], rate: float, option: str) -> list[Arrival]:
    """Return the same pattern from time 0 on, stretched or squeezed to a mean of `rate` requests per second.

    Raises ConfigError naming `option` if all requests arrive at the same time.
    """
    span = arrivals[-1].time_s - arrivals[0].time_s
    if span <= 0:
        raise ConfigError(f"{option}: {len(arrivals)} requests that arrive at the same time have no rate to change")
    factor = (len(arrivals) - 1) / rate / span
    return [replace(arrival, time_s=(arrival.time_s - arrivals[0].time_s) * factor) for arrival in arrivals]


def parse_lengths(option: str, text: str) -> Lengths:
    """Parse `512`, uniform `64-1024`, or `lognormal:512,0.8` (median, sigma). Raises ConfigError naming `option`."""
    if found := re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", text):
        low, high = int(found[1]), int(found[2] or found[1])
        if 1 <= low <= high <= MAX_LENGTH:
            return lambda random: random.randint(low, high)
    elif found := re.fullmatch(r"lognormal:(\d{1,9}),(\d{1,3}(?:\.\d{1,9})?)", text):
        median, sigma = int(found[1]), float(found[2])
        if 1 <= median <= MAX_LENGTH and sigma <= MAX_SIGMA:
            mu = math.log(median)
            return lambda random: min(MAX_LENGTH, max(1, round(random.lognormvariate(mu, sigma))))
    raise ConfigError(
        f"{option}: {text!r} is not allowed; allowed: tokens from 1 to {MAX_LENGTH} such as 512, a range such as "
        f"64-1024, or lognormal:MEDIAN,SIGMA with a sigma of at most {MAX_SIGMA:g}"
    )


def parse_tenants(text: str) -> dict[str, float]:
    """Parse the relative rates of tenants, such as `a=20,b=1`. Raises ConfigError."""
    tenants: dict[str, float] = {}
    for part in text.split(","):
        found = re.fullmatch(r"\s*([^=\s]+)\s*=\s*(\d{1,9}(?:\.\d{1,9})?)\s*", part)
        if not found or float(found[2]) <= 0 or found[1] in tenants:
            raise ConfigError(
                f"tenants: {part!r} is not allowed; write each tenant once with its relative rate above 0, as in "
                "a=20,b=1"
            )
        tenants[found[1]] = float(found[2])
    return tenants
