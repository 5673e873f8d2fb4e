"""`quire simulate`: model, memory and arrival rate in, what to expect out. Nothing is loaded; config.json is enough."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

from ..common.config import EngineConfig
from ..common.errors import ConfigError
from ..model import model_folder, read_spec
from ..model.runner import Capacity, decide_capacity
from ..tools.bench import Roofline
from ..tools.bench.roofline import RooflineMeter
from ..tools.simulation import Workload, build_simulator, given_roofline, make_arrivals, parse_objectives, summarize
from ..tools.simulation.console import print_report

MAX_GIGA = 1e6
MAX_NOISE = 2.0


def simulate(
    config: EngineConfig,
    workload: Workload,
    goodput: Sequence[str],
    as_json: bool,
    *,
    bandwidth: float | None,
    peak: float | None,
    noise: float,
) -> None:
    """`bandwidth` in GB/s, `peak` in int8 GOP/s; measured where not given. Raises ConfigError or ModelError."""
    for flag, value in (("--bandwidth", bandwidth), ("--peak", peak)):
        if value is not None and not 0 < value <= MAX_GIGA:
            raise ConfigError(f"{flag} must be above 0 and at most {MAX_GIGA:g}, not {value:g}")
    if not 0 <= noise <= MAX_NOISE:
        raise ConfigError(f"--noise must be between 0 and {MAX_NOISE:g}, not {noise:g}")
    objectives = parse_objectives(goodput)
    arrivals = make_arrivals(workload)
    spec = read_spec(model_folder(config.model))
    capacity = decide_capacity(config, spec)
    roofline = _roofline(capacity, bandwidth, peak)
    simulator = build_simulator(config, spec, capacity, roofline, arrivals, noise=noise, seed=workload.seed)
    start = time.process_time()
    simulator.run()
    spent_s = time.process_time() - start
    about = _circumstances(config, capacity, roofline)
    report = summarize(simulator, objectives, config.tenant_weights)
    if as_json:
        print(json.dumps({**about, **report.as_dict()}, indent=1))
    else:
        print_report(about, report)
        print(f"simulated in {spent_s:.1f} s of CPU time, {simulator.computed_tokens / spent_s:,.0f} tokens per second")


def _roofline(capacity: Capacity, bandwidth: float | None, peak: float | None) -> Roofline:
    if bandwidth is not None and peak is not None:
        return given_roofline(bandwidth * 1e9, peak * 1e9)
    measured = RooflineMeter(capacity.cpus.threads, capacity.isa).measure()
    return Roofline(
        measured.read_bytes_per_s if bandwidth is None else bandwidth * 1e9,
        measured.peak_ops_per_s if peak is None else given_roofline(1, peak * 1e9).peak_ops_per_s,
    )


def _circumstances(config: EngineConfig, capacity: Capacity, roofline: Roofline) -> dict[str, Any]:
    return {
        "model": config.model or "bundled demo",
        "weights": config.weights,
        "kv_cache_dtype": config.kv_cache_dtype,
        "pages": capacity.num_pages,
        "page_size": capacity.layout.page_size,
        "memory_bytes": capacity.memory.total_bytes,
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "read_bytes_per_s": roofline.read_bytes_per_s,
        "peak_ops_per_s": dict(roofline.peak_ops_per_s),
    }
