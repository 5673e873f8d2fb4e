"""Streams of requests drawn from distributions: their times of arrival, and the lengths of prompts and answers.

One `random.Random` makes all draws: the same seed gives the same stream on every machine.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import NamedTuple

from ...common.errors import ConfigError

MAX_LENGTH = 10_000_000  # tokens; more than any model takes
MAX_SIGMA = 4.0

Lengths = Callable[[Random], int]  # draws a number of tokens, at least 1


class NextTurn(NamedTuple):
    """A later request of a conversation: its prompt continues the prompt of the request before and the answer."""

    think_s: float  # pause after the answer
    new_tokens: int  # prompt tokens after the conversation so far
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request. Its prompt starts with `blocks` of `block_tokens` tokens; equal ids mean equal tokens.

    The rest of the prompt is shared only with requests of the same `conversation`, if there is one.
    """

    time_s: float
    prompt_tokens: int
    output_tokens: int
    tenant: str = ""
    blocks: tuple[int, ...] = ()
    block_tokens: int = 512
    deadline_s: float | None = None  # limit for the whole request, from its arrival
    conversation: int | None = None  # None: identified by the beginning of its prompt
    history_tokens: int = 0  # prompt tokens of the conversation so far
    turns: tuple[NextTurn, ...] = ()  # turns that follow

    def next_turn(self, now: float) -> Arrival | None:
        """Return the request that follows an answer which ended `now`; None after the last turn."""
        if not self.turns:
            return None
        think_s, new_tokens, output_tokens = self.turns[0]
        history = self.prompt_tokens + self.output_tokens
        return replace(
            self,
            time_s=now + think_s,
            prompt_tokens=history + new_tokens,
            output_tokens=output_tokens,
            history_tokens=history,
            turns=self.turns[1:],
        )


def draw_arrivals(
    count: int,
    intervals: Iterator[float],
    prompt_tokens: Lengths,
    output_tokens: Lengths,
    random: Random,
    *,
    tenants: Mapping[str, float] | None = None,
    shared_prefix_tokens: int = 0,
    num_prefixes: int = 1,
    deadline_s: float | None = None,
    turns: Lengths | None = None,
    think_s: tuple[float, float] = (0.0, 0.0),
) -> list[Arrival]:
    """Draw `count` conversations that begin `intervals` seconds apart.

    `tenants` maps each tenant to its relative rate. Every prompt starts with `shared_prefix_tokens`, one of
    `num_prefixes` that its tenant's conversations share, in addition to `prompt_tokens`. `turns` draws the number of
    requests of a conversation, by default one. Before each request except the first, its user thinks for `think_s`, a
    range of seconds.
    """
    names = list(tenants or {"": 1.0})
    weights = list((tenants or {"": 1.0}).values())

    def draw(index: int, time_s: float) -> Arrival:
        prompt = prompt_tokens(random)
        output = output_tokens(random)
        tenant = random.choices(names, weights)[0]
        prefix = random.randrange(num_prefixes) if num_prefixes > 1 else 0
        later = range(turns(random) - 1 if turns else 0)
        return Arrival(
            time_s,
            shared_prefix_tokens + prompt,
            output,
            tenant,
            blocks=(prefix,) if shared_prefix_tokens else (),
            block_tokens=shared_prefix_tokens or 512,
            deadline_s=deadline_s,
            conversation=index,
            turns=tuple(
                NextTurn(random.uniform(*think_s), prompt_tokens(random), output_tokens(random)) for _ in later
            ),
        )

    return [
        draw(index, time_s) for index, time_s in enumerate(itertools.islice(itertools.accumulate(intervals), count))
    ]


def constant(rate: float) -> Iterator[float]:
    """Return the seconds between requests at a constant `rate` per second."""
    return itertools.repeat(1 / rate)


def poisson(rate: float, random: Random) -> Iterator[float]:
    """Yield the seconds between requests of many independent users."""
    while True:
        yield random.expovariate(rate)


def bursty(rate: float, burstiness: float, random: Random) -> Iterator[float]:
    """Yield the seconds between requests that arrive in bursts, see `draw_interval`."""
    while True:
        yield draw_interval(rate, burstiness, random)


def draw_interval(rate: float, burstiness: float, random: Random) -> float:
    """Draw gamma-distributed seconds of shape `burstiness`, as in vLLM: 1 is Poisson, below 1 bursty, inf constant."""
    return 1 / rate if math.isinf(burstiness) else random.gammavariate(burstiness, 1 / (rate * burstiness))


def rescale(arrivals: Sequence[Arrival], rate: float, option: str) -> list[Arrival]:
    """Return the same pattern from time 0 on, rescaled to a mean of `rate` requests per second.

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
        median = int(found[1])
        sigma = float(found[2])
        if 1 <= median <= MAX_LENGTH and sigma <= MAX_SIGMA:
            mu = math.log(median)
            return lambda random: min(MAX_LENGTH, max(1, round(random.lognormvariate(mu, sigma))))
    raise ConfigError(
        f"{option}: {text!r} is not allowed; allowed: a number from 1 to {MAX_LENGTH} such as 512, a range such as "
        f"64-1024, or lognormal:MEDIAN,SIGMA with a sigma of at most {MAX_SIGMA:g}"
    )


def parse_seconds(option: str, text: str) -> tuple[float, float]:
    """Parse `5`, or a range such as `5-25`. Raises ConfigError naming `option`."""
    found = re.fullmatch(r"(\d{1,6}(?:\.\d{1,9})?)(?:-(\d{1,6}(?:\.\d{1,9})?))?", text)
    low, high = (float(found[1]), float(found[2] or found[1])) if found else (1.0, 0.0)
    if low > high:
        raise ConfigError(f"{option}: {text!r} is not allowed; allowed: seconds such as 5, or a range such as 5-25")
    return low, high


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
