"""Build simulated servers: capacity, pager and scheduler as the engine builds them, on a machine with a roofline."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from ....pager import Pager
from ...common.config import EngineConfig
from ...common.errors import ConfigError
from ...engine.build import build_scheduler
from ...model import DecoderSpec
from ...model.runner import Capacity
from ..bench import Roofline
from ..traffic import Arrival
from .cost import SEQUENCE_S, NoisyCost, StepCost, roofline_cost
from .fleet import Fleet, FleetOptions
from .simulator import RequestOutcome, SimulatedSpill, Simulator, VirtualClock


def given_roofline(read_bytes_per_s: float, int8_ops_per_s: float) -> Roofline:
    """Return a roofline from two figures: bf16 and f32 get a half and a quarter of int8, as on avx512-vnni-bf16."""
    return Roofline(read_bytes_per_s, {"q8": int8_ops_per_s, "bf16": int8_ops_per_s / 2, "f32": int8_ops_per_s / 4})


def build_simulator(
    config: EngineConfig,
    spec: DecoderSpec,
    capacity: Capacity,
    roofline: Roofline,
    arrivals: Sequence[Arrival],
    fleet: FleetOptions | None = None,
    *,
    noise: float = 0.0,
    seed: int = 1,
) -> Simulator | Fleet:
    """Build a simulator of one host, or of a fleet. `noise` is the sigma of a lognormal factor on every step's time.

    Raises ConfigError for settings whose effect depends on the text.
    """
    if config.num_speculative_tokens:
        raise ConfigError(
            "num_speculative_tokens cannot be simulated: how many draft tokens are accepted depends on the text"
        )
    cost: StepCost = roofline_cost(spec, capacity, roofline)

    def build_host(arrivals: Sequence[Arrival], outcomes: list[RequestOutcome], number: int) -> Simulator:
        clock = VirtualClock()
        page_bytes = capacity.layout.page_bytes
        state_bytes = capacity.state_layout.nbytes
        spill = SimulatedSpill(page_bytes, config.kv_spill_size, state_bytes) if config.kv_spill_size else None
        pager = Pager(
            capacity.layout.page_size,
            capacity.num_pages,
            windows=capacity.layout.group_windows,
            enable_prefix_caching=config.enable_prefix_caching,
            store=spill,
            states=capacity.open_states(),
            num_cached_states=capacity.num_cached_states,
            state_interval=capacity.state_interval,
            clock=clock,
        )
        return Simulator(
            build_scheduler(config, pager, capacity.max_num_samples, clock=clock),
            pager,
            clock,
            NoisyCost(cost, noise, seed + number) if noise else cost,
            arrivals,
            max_model_len=capacity.max_model_len,
            spill=spill,
            sequence_s=SEQUENCE_S,
            outcomes=outcomes,
        )

    if fleet is None:
        return build_host(arrivals, [], 0)
    return Fleet(partial(build_host, ()), arrivals, fleet, seed)
