"""Who comes when, and with how much: streams of requests, drawn or recorded, for simulations and for load tests."""

from .arrivals import (
    MAX_LENGTH,
    Arrival,
    Lengths,
    Process,
    bursty,
    constant,
    draw_arrivals,
    draw_interval,
    parse_lengths,
    parse_tenants,
    poisson,
    rescale,
)
from .files import text_lines
from .flags import check_number, parse_goodput
from .traces import MOONCAKE_BLOCK, read_azure, read_burstgpt, read_mooncake

__all__ = [
    "MAX_LENGTH",
    "MOONCAKE_BLOCK",
    "Arrival",
    "Lengths",
    "Process",
    "bursty",
    "check_number",
    "constant",
    "draw_arrivals",
    "draw_interval",
    "parse_goodput",
    "parse_lengths",
    "parse_tenants",
    "poisson",
    "read_azure",
    "read_burstgpt",
    "read_mooncake",
    "rescale",
    "text_lines",
]
