"""A simulated server: capacity, pager and scheduler as the engine has them, on a machine of given roofs.

It must not measure the machine. One invariant: the same configuration decides what it decides for serving.
"""

from __future__ import annotations

from collections.abc import Iterable

from ....pager import Pager
from ...common.config import EngineConfig
from ...common.errors import ConfigError
from ...engine.build import build_scheduler
from ...model import DecoderSpec
from ...model.runner import Capacity
from ..bench import Roofline
from ..traffic import Arrival
from .cost import Cost, Noisy, roofline_cost
from .simulator import Simulator, VirtualClock
from .spill import SimulatedSpill


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
    """`noise` is the sigma of a lognormal factor on every step's time. Raises ConfigError for what depends on text."""
    if config.num_speculative_tokens:
        raise ConfigError(
            "--num-speculative-tokens cannot be simulated: how many guesses are right depends on the text"
        )
    cost: Cost = roofline_cost(spec, capacity, roof)
    clock = VirtualClock()
    spill = SimulatedSpill(capacity.layout.page_bytes, config.kv_spill_size) if config.kv_spill_size else None
    pager = Pager(
        capacity.layout.page_size,
        capacity.num_pages,
        windows=capacity.layout.group_windows,
        enable_prefix_caching=config.enable_prefix_caching,
        store=spill,
        clock=clock,
    )
    return Simulator(
        build_scheduler(config, pager, capacity.max_num_samples, clock=clock),
        pager,
        clock,
        Noisy(cost, noise, seed) if noise else cost,
        arrivals,
        max_model_len=capacity.max_model_len,
        spill=spill,
    )
