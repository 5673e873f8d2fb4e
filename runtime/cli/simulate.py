"""`quire simulate`: predict how a model serves a workload, from its config.json or GGUF header, without loading it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from json import dumps
from pathlib import Path
from typing import Annotated, Any

import msgspec
from cyclopts import Parameter

from ...kernels import available_cpus
from ..common.config import EngineConfig
from ..common.errors import ConfigError
from ..model import DecoderSpec, model_path, read_spec, weights_text
from ..model.runner import Capacity, decide_capacity
from ..tools.bench import Roofline, read_profile
from ..tools.bench.roofline import RooflineMeter
from ..tools.simulation import (
    FleetOptions,
    Workload,
    build_simulator,
    given_roofline,
    make_arrivals,
    parse_objectives,
    summarize,
)
from ..tools.simulation.console import print_report
from .flags import Json, MemoryFlags, ModelFolder, SchedulingFlags, read_settings
from .model_files import with_model_headers

MAX_GIGA = 1e6
MAX_NOISE = 2.0
OBJECTIVES_HELP = "Milliseconds within which a request is good, such as ttft:2000 itl:200; of ttft, tpot, itl and e2el."


@dataclass(frozen=True, kw_only=True)
class MachineOptions:
    """The simulated machine; each field is followed by its help text."""

    bandwidth: float | None = None
    "GB/s that all threads together read from memory. Default: this machine's, measured now."
    peak: float | None = None
    "int8 GOP/s of all threads. Default: this machine's, measured now and scaled to --threads."
    profile: Path | None = None
    "Machine profile from `quire info --measure` in place of measuring now; gives --threads their default too."
    noise: float = 0.0
    "Sigma of a lognormal factor on the time of every step."


def simulate(
    model: ModelFolder = None,
    /,
    *,
    workload: Annotated[Workload | None, Parameter(name="*", group="Workload")] = None,
    goodput: Annotated[tuple[str, ...], Parameter(consume_multiple=True, negative="", help=OBJECTIVES_HELP)] = (),
    json: Json = False,
    machine: Annotated[MachineOptions | None, Parameter(name="*", group="Machine")] = None,
    fleet: Annotated[FleetOptions | None, Parameter(name="*", group="Fleet")] = None,
    memory: MemoryFlags | None = None,
    scheduling: SchedulingFlags | None = None,
) -> None:
    """Simulate and print. Raises ConfigError or ModelError."""
    settings = read_settings(model, memory, scheduling)
    config = settings.engine
    measured = None
    workload = workload or Workload()
    machine = machine or MachineOptions()
    fleet = fleet or FleetOptions()
    _check(machine)
    fleet.check()
    objectives = parse_objectives(goodput)
    arrivals = make_arrivals(workload)
    if machine.profile is not None:
        config, measured = read_profile(machine.profile).configure(config)
    with with_model_headers(msgspec.structs.replace(settings, engine=config)) as settings:
        spec = read_spec(model_path(settings.engine.model))
        capacity = decide_capacity(settings.engine, spec)
    roofline = _roofline(capacity, machine, measured)
    hosts = None if fleet == FleetOptions() else fleet
    simulator = build_simulator(
        config, spec, capacity, roofline, arrivals, hosts, noise=machine.noise, seed=workload.seed
    )
    start = time.process_time()
    simulator.run()
    spent_s = time.process_time() - start
    about = _configuration(config, spec, capacity, roofline)
    report = summarize(simulator, objectives, config.tenant_weights)
    if json:
        print(dumps({**about, **report.as_dict()}, indent=1))
    else:
        print_report(about, report)
        speed = sum(host.computed_tokens for host in simulator.hosts) / spent_s
        print(f"simulated in {spent_s:.1f} s of CPU time, {speed:,.0f} tokens per second")


def _check(machine: MachineOptions) -> None:
    for flag, value in (("--bandwidth", machine.bandwidth), ("--peak", machine.peak)):
        if value is not None and not 0 < value <= MAX_GIGA:
            raise ConfigError(f"{flag} must be above 0 and at most {MAX_GIGA:g}, not {value:g}")
    if not 0 <= machine.noise <= MAX_NOISE:
        raise ConfigError(f"--noise must be between 0 and {MAX_NOISE:g}, not {machine.noise:g}")


def _roofline(capacity: Capacity, machine: MachineOptions, measured: Roofline | None) -> Roofline:
    """Return the machine's roofline: given, from a profile, or measured here."""
    bandwidth = machine.bandwidth
    peak = machine.peak
    if bandwidth is not None and peak is not None:
        return given_roofline(bandwidth * 1e9, peak * 1e9)
    if measured is None:
        measured = _measure(capacity, needs_bandwidth=bandwidth is None)
    return Roofline(
        measured.read_bytes_per_s if bandwidth is None else bandwidth * 1e9,
        measured.peak_ops_per_s if peak is None else given_roofline(1, peak * 1e9).peak_ops_per_s,
    )


def _measure(capacity: Capacity, needs_bandwidth: bool) -> Roofline:
    """Measure this machine; for more threads than it has CPUs, a peak grows with the threads, a bandwidth does not."""
    threads = capacity.cpus.threads
    cpus = available_cpus().threads
    if threads > cpus and needs_bandwidth:
        raise ConfigError(
            f"--bandwidth is needed: this machine has {cpus} CPUs, fewer than the {threads} threads to simulate"
        )
    measured = RooflineMeter(min(threads, cpus), capacity.isa).measure()
    more = max(1.0, threads / cpus)
    return Roofline(measured.read_bytes_per_s, {dtype: more * ops for dtype, ops in measured.peak_ops_per_s.items()})


def _configuration(config: EngineConfig, spec: DecoderSpec, capacity: Capacity, roofline: Roofline) -> dict[str, Any]:
    return {
        "model": config.model or "bundled demo",
        "weights": weights_text(spec, config.weights),
        "kv_cache_dtype": config.kv_cache_dtype,
        "threads": capacity.cpus.threads,
        "pages": capacity.num_pages,
        "page_size": capacity.layout.page_size,
        "memory_bytes": capacity.memory.total_bytes,
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "read_bytes_per_s": roofline.read_bytes_per_s,
        "peak_ops_per_s": dict(roofline.peak_ops_per_s),
    }
