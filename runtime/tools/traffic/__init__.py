"""Streams of requests for simulations and load tests: drawn from distributions, or read from recorded traces."""

from .arrivals import (
    MAX_LENGTH,
    Arrival,
    Lengths,
    NextTurn,
    bursty,
    constant,
    draw_arrivals,
    draw_interval,
    parse_lengths,
    parse_seconds,
    parse_tenants,
    poisson,
    rescale,
)
from .traces import read_azure, read_burstgpt, read_mooncake, text_lines

__all__ = [
    "MAX_LENGTH",
    "Arrival",
    "Lengths",
    "NextTurn",
    "bursty",
    "constant",
    "draw_arrivals",
    "draw_interval",
    "parse_lengths",
    "parse_seconds",
    "parse_tenants",
    "poisson",
    "read_azure",
    "read_burstgpt",
    "read_mooncake",
    "rescale",
    "text_lines",
]
