"""A workload as the command line describes it, and the requests of which it consists."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

from ...common.errors import ConfigError
from ..checks import check_number
from ..traffic import (
    MAX_LENGTH,
    Arrival,
    Process,
    bursty,
    constant,
    draw_arrivals,
    parse_lengths,
    parse_tenants,
    poisson,
    read_azure,
    read_mooncake,
    rescale,
)

MAX_REQUESTS = 1_000_000
DEFAULT_REQUESTS = 500
DEFAULT_RATE = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A stream of requests. For the syntax of lengths and tenants see `parse_lengths` and `parse_tenants`.

    A trace has its own lengths, times and number of requests, unless `rate` or `requests` are given.
    """

    arrivals: Process = "poisson"
    trace: Path | None = None
    rate: float | None = None  # requests per second
    requests: int | None = None
    burstiness: float = 0.25
    prompt_tokens: str = "512"
    output_tokens: str = "128"
    shared_prefix_tokens: int = 0
    tenants: str | None = None
    deadline_ms: float | None = None  # of every request
    seed: int = 1


def make_arrivals(workload: Workload) -> list[Arrival]:
    """Return the requests of a workload. Raises ConfigError."""
    check_number("--rate", workload.rate, 1e-6, 1e6)
    check_number("--requests", workload.requests, 1, MAX_REQUESTS)
    check_number("--burstiness", workload.burstiness, 1e-3, 1e3)
    check_number("--shared-prefix-tokens", workload.shared_prefix_tokens, 0, MAX_LENGTH)
    check_number("--deadline-ms", workload.deadline_ms, 1, 1e9)
    if workload.arrivals in ("mooncake", "azure"):
        return _recorded(workload)
    if workload.trace is not None:
        raise ConfigError("--trace needs the format of the file: add --arrivals mooncake or --arrivals azure")
    return _random(workload)


def _recorded(workload: Workload) -> list[Arrival]:
    if workload.trace is None:
        raise ConfigError(f"--arrivals {workload.arrivals} needs --trace FILE")
    if workload.tenants is not None or workload.shared_prefix_tokens:
        raise ConfigError("--tenants and --shared-prefix-tokens are for random requests, not for those of a trace")
    read = read_mooncake if workload.arrivals == "mooncake" else read_azure
    arrivals = read(workload.trace, workload.requests or MAX_REQUESTS)
    if workload.rate is not None:
        arrivals = rescale(arrivals, workload.rate, "--rate")
    return [replace(arrival, deadline_s=_deadline_s(workload)) for arrival in arrivals]


def _random(workload: Workload) -> list[Arrival]:
    random = Random(workload.seed)
    return draw_arrivals(
        workload.requests or DEFAULT_REQUESTS,
        _intervals(workload, random),
        parse_lengths("--prompt-tokens", workload.prompt_tokens),
        parse_lengths("--output-tokens", workload.output_tokens),
        random,
        tenants=None if workload.tenants is None else parse_tenants(workload.tenants),
        shared_prefix_tokens=workload.shared_prefix_tokens,
        deadline_s=_deadline_s(workload),
    )


def _intervals(workload: Workload, random: Random) -> Iterator[float]:
    rate = DEFAULT_RATE if workload.rate is None else workload.rate
    if workload.arrivals == "constant":
        return constant(rate)
    if workload.arrivals == "bursty":
        return bursty(rate, workload.burstiness, random)
    return poisson(rate, random)


def _deadline_s(workload: Workload) -> float | None:
    return None if workload.deadline_ms is None else workload.deadline_ms / 1000
