"""A simulated server: capacity, scheduler and pager as the engine would have them, on a machine of given roofs.

It must not measure the machine. One invariant: the same configuration decides what it decides for serving.
"""

from __future__ import annotations

from collections.abc import Iterable

from ...pager import Pager
from ...scheduler import Limits, Scheduler, TokenBudget
from ..bench import Roofline
from ..config import EngineConfig
from ..execution import Capacity
from ..models import DecoderSpec
from .arrivals import Arrival
from .cost import Cost, Noisy, roofline_cost
from .simulator import Simulator, VirtualClock


def given_roofline(read_bytes_per_s: float, int8_ops_per_s: float) -> Roofline:
    """A machine known by two figures; bf16 and f32 at a half and a quarter of int8, as measured at avx512-vnni-bf16."""
    return Roofline(read_bytes_per_s, {"q8": int8_ops_per_s, "bf16": int8_ops_per_s / 2, "f32": int8_ops_per_s / 4})


def build_simulator(
    config: EngineConfig,
    spec: DecoderSpec,
    capacity: Capacity,
    roof: Roofline,
    arrivals: Iterable[Arrival],
    *,
    noise: float = 0.0,
    seed: int = 1,
) -> Simulator:
    """`noise` is the sigma of the lognormal factor on every step's time."""
    cost: Cost = roofline_cost(spec, capacity, roof)
    clock = VirtualClock()
    pager = Pager(
        capacity.layout.page_size,
        capacity.num_pages,
        windows=capacity.layout.group_windows,
        enable_prefix_caching=config.enable_prefix_caching,
    )
    scheduler = Scheduler(
        pager,
        budget=TokenBudget(config.max_num_batched_tokens),
        max_num_seqs=config.max_num_seqs,
        limits=Limits(max_num_waiting=config.max_num_waiting),
        clock=clock,
    )
    return Simulator(
        scheduler,
        pager,
        clock,
        Noisy(cost, noise, seed) if noise else cost,
        arrivals,
        max_model_len=capacity.max_model_len,
    )
