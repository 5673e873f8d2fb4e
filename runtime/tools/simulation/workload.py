"""The options of a workload, and its requests."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Literal

from ...common.errors import ConfigError
from ..checks import check_number
from ..traffic import (
    MAX_LENGTH,
    Arrival,
    Lengths,
    bursty,
    constant,
    draw_arrivals,
    parse_lengths,
    parse_seconds,
    parse_tenants,
    poisson,
    read_azure,
    read_mooncake,
    rescale,
)

Process = Literal["poisson", "bursty", "constant", "mooncake", "azure"]

MAX_REQUESTS = 1_000_000
MAX_TURNS = 1000
DEFAULT_REQUESTS = 500
DEFAULT_RATE = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The requests of a simulation, as flags of `quire simulate`; each field is followed by its help text.

    A trace has its own lengths, times and number of requests, unless `request_rate` or `num_prompts` are given.
    """

    arrivals: Process = "poisson"
    "poisson, bursty, constant, or the format of a recorded trace: mooncake (JSONL) or azure (CSV)."
    dataset_path: Path | None = None
    "File of a recorded trace."
    request_rate: float | None = None
    "Requests per second, or conversations that begin. Default 1, or as recorded."
    num_prompts: int | None = None
    "Number of requests, or of conversations. Default 500, or all that were recorded."
    burstiness: float = 0.25
    "Shape of the gamma distribution of bursty arrivals; 1 is Poisson, lower numbers make longer bursts."
    prompt_tokens: str = "512"
    "Prompt lengths: 512, a range 64-1024, or lognormal:MEDIAN,SIGMA."
    output_tokens: str = "128"
    "Output lengths, in the same form."
    shared_prefix_tokens: int = 0
    "Tokens at the beginning of each prompt that all requests of a tenant share."
    num_prefixes: int = 1
    "Number of different beginnings, such as system prompts, that a tenant's requests share."
    turns: str = "1"
    "Requests of one conversation, in the form of lengths, at most 1000. Each continues the one before."
    think_time: str = "5-25"
    "Seconds between an answer and the next request of its conversation, such as 5, or a range."
    tenants: str | None = None
    "Tenants and their relative request rates, such as a=20,b=1."
    deadline_ms: float | None = None
    "Deadline of every request, from its arrival. Default: none."
    seed: int = 1
    "Seed of the random numbers."


def make_arrivals(workload: Workload) -> list[Arrival]:
    """Return the requests of a workload. Raises ConfigError."""
    check_number("request_rate", workload.request_rate, 1e-6, 1e6)
    check_number("num_prompts", workload.num_prompts, 1, MAX_REQUESTS)
    check_number("burstiness", workload.burstiness, 1e-3, 1e3)
    check_number("shared_prefix_tokens", workload.shared_prefix_tokens, 0, MAX_LENGTH)
    check_number("num_prefixes", workload.num_prefixes, 1, MAX_REQUESTS)
    check_number("deadline_ms", workload.deadline_ms, 1, 1e9)
    if workload.arrivals in ("mooncake", "azure"):
        return _recorded(workload)
    if workload.dataset_path is not None:
        raise ConfigError("trace needs the format of the file: add `arrivals` mooncake or `arrivals` azure")
    return _random(workload)


def _recorded(workload: Workload) -> list[Arrival]:
    if workload.dataset_path is None:
        raise ConfigError(f"`arrivals` {workload.arrivals} needs `dataset_path` FILE")
    if workload.tenants is not None or workload.shared_prefix_tokens or workload.turns != "1":
        raise ConfigError(
            "`tenants`, shared_prefix_tokens and `turns` are for random requests, not for those of a trace"
        )
    read = read_mooncake if workload.arrivals == "mooncake" else read_azure
    arrivals = read(workload.dataset_path, workload.num_prompts or MAX_REQUESTS)
    if workload.request_rate is not None:
        arrivals = rescale(arrivals, workload.request_rate, "request_rate")
    return [replace(arrival, deadline_s=_deadline_s(workload)) for arrival in arrivals]


def _random(workload: Workload) -> list[Arrival]:
    random = Random(workload.seed)
    return draw_arrivals(
        workload.num_prompts or DEFAULT_REQUESTS,
        _intervals(workload, random),
        parse_lengths("prompt_tokens", workload.prompt_tokens),
        parse_lengths("output_tokens", workload.output_tokens),
        random,
        tenants=None if workload.tenants is None else parse_tenants(workload.tenants),
        shared_prefix_tokens=workload.shared_prefix_tokens,
        num_prefixes=workload.num_prefixes,
        turns=None if workload.turns == "1" else _turns(workload.turns),
        think_s=parse_seconds("think_time", workload.think_time),
        deadline_s=_deadline_s(workload),
    )


def _turns(text: str) -> Lengths:
    turns = parse_lengths("turns", text)
    return lambda random: min(MAX_TURNS, turns(random))


def _intervals(workload: Workload, random: Random) -> Iterator[float]:
    rate = DEFAULT_RATE if workload.request_rate is None else workload.request_rate
    if workload.arrivals == "constant":
        return constant(rate)
    if workload.arrivals == "bursty":
        return bursty(rate, workload.burstiness, random)
    return poisson(rate, random)


def _deadline_s(workload: Workload) -> float | None:
    return None if workload.deadline_ms is None else workload.deadline_ms / 1000
