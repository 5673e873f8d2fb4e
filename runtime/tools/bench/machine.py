"""Measure a whole machine in one run: roofline, cost of an op, single functions by level, and models of one shape.

Nothing but the installed package is needed: the decoder has random weights in the shape of Qwen3-0.6B, in a temporary
folder of 1.2 GB, and the encoder is the bundled one.
"""

from __future__ import annotations

import math
import os
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import msgspec
from rich.console import Console

from ....kernels import available_cpus, supported_levels, unsupported_levels
from ....kernels.cpus import processor_id
from ....kernels.ops import Linear
from ...common.config import EngineConfig
from ...common.errors import ConfigError
from ...llm import LLM
from ...model.runner import ModelRunner, pick_cpus, pick_isa
from ...model.runner.tuning import Effort, Times, layers_of, rivals_of
from .checkpoint import QWEN3_SHAPE, write_checkpoint
from .console import SpeedReport
from .embedding import EmbeddingResult, measure_embedding
from .overhead import measure_overhead
from .profile import MachineProfile, measure_profile
from .roofline import DTYPES, PEAK_NAMES
from .speed import Shape, bench_config, measure_shapes, parse_shapes
from .thread_sweep import bench_table, least_op_seconds, parse_thread_counts

DECODERS: tuple[tuple[Literal["q8", "bf16"], Literal["int8", "bf16"], str], ...] = (
    ("q8", "int8", "1x128,8x128,32x128,1x2048"),
    ("bf16", "bf16", "1x128,8x128"),
)  # weights, KV cache, shapes
TEXT_SHAPES = "1x16,1x128,32x16,32x128"
TOKENS_PER_USER = 16
REPEATS = 3
FUNCTION_EFFORT = Effort(rounds=15, seconds=30.0, slow=math.inf)


@dataclass(frozen=True, slots=True)
class MachineReport:
    """The figures of a machine."""

    about: dict[str, Any]  # versions, processor, levels, load average before the run
    profile: MachineProfile
    least_op_s: dict[int, float]  # threads -> see `least_op_seconds`
    functions: dict[str, dict[str, float]]  # function -> level -> seconds in one layer of the decoder, median
    layer_bytes: int  # linear weights of that layer
    decoders: list[SpeedReport]
    texts: list[EmbeddingResult]

    def as_dict(self) -> dict[str, Any]:
        """Return the figures, with the units of `SpeedReport.as_dict`."""
        return {
            **self.about,
            "profile": msgspec.to_builtins(self.profile),
            "least_op_s": self.least_op_s,
            "layer_bytes": self.layer_bytes,
            "function_s": self.functions,
            "decoders": [report.as_dict() for report in self.decoders],
            "texts": [result.as_dict() for result in self.texts],
        }

    def print(self) -> None:
        console = Console(width=100, highlight=False)
        for name, value in self.about.items():
            console.print(f"{name.replace('_', ' ')}: {value}")
        self._print_rooflines(console)
        self._print_functions(console)
        for report in self.decoders:
            report.print()
        table = bench_table("bundled embedding model, q8", ("texts", "tokens", "texts/s", "tokens/s", "ms/request"))
        for each in self.texts:
            rates = (f"{each.texts_per_s:,.1f}", f"{each.tokens_per_s:,.0f}", f"{each.request_ms:,.2f}")
            table.add_row(str(each.num_texts), str(each.text_tokens), *rates)
        console.print(table)

    def _print_rooflines(self, console: Console) -> None:
        peaks = [f"{PEAK_NAMES[dtype]} GOP/s" for dtype in DTYPES]
        table = bench_table("machine", ("level", "threads", "read GB/s", *peaks, "least op µs"))
        for each in self.profile.rooflines:
            rates = [f"{each.peak_ops_per_s[dtype] / 1e9:,.0f}" for dtype in DTYPES]
            least = f"{self.least_op_s[each.threads] * 1e6:.2f}" if each.isa == self.profile.isa else ""
            table.add_row(each.isa, str(each.threads), f"{each.read_bytes_per_s / 1e9:.1f}", *rates, least)
        console.print(table)

    def _print_functions(self, console: Console) -> None:
        levels = list(dict.fromkeys(level for times in self.functions.values() for level in times))
        columns = ("function", *(f"{level}, µs" for level in levels), "weights GB/s")
        table = bench_table("one layer of the decoder, q8 and int8", columns)
        for name, times in self.functions.items():
            cells = [f"{times[level] * 1e6:,.0f}" if level in times else "" for level in levels]
            rate = f"{self.layer_bytes / min(times.values()) / 1e9:.1f}" if name.startswith("linear") else ""
            table.add_row(name, *cells, rate)
        console.print(table)


def measure_machine(config: EngineConfig, report: Callable[[str], None]) -> MachineReport:
    """Measure with the threads and the level of `config`; call `report` with the name of each measurement.

    Raises ConfigError if there is too little memory, or no room for the temporary folder.
    """
    isa = pick_isa(config)
    threads = pick_cpus(config).threads
    about = _about()
    profile = measure_profile(isa, threads, report)
    least_op_s = {count: least_op_seconds(count, isa) for count in parse_thread_counts((), available_cpus().threads)}
    functions: dict[str, dict[str, float]] = {}
    layer_bytes = 0
    decoders = []
    with tempfile.TemporaryDirectory(prefix="quire-bench-") as folder:
        report("writing random weights")
        _write(Path(folder))
        for weights, kv, text in DECODERS:
            shapes = parse_shapes(text)
            of_model = msgspec.structs.replace(config, model=folder, weights=weights, kv_cache_dtype=kv)
            with LLM.from_config(bench_config(of_model, shapes, TOKENS_PER_USER)) as llm:
                runner = llm.engine.core.runner
                named = partial(_report_of, report, weights)
                results = list(measure_shapes(llm, shapes, TOKENS_PER_USER, REPEATS, named))
                if not functions:
                    functions, layer_bytes = _time_functions(runner, [isa, *rivals_of(isa)])
                of: dict[str, Any] = {"model": "Qwen3-0.6B's shape", "weights": weights, "kv_cache_dtype": kv}
                of |= {"isa": isa, "threads": threads, "tuned": dict(runner.tuned)}
            decoders.append(SpeedReport(of, results, measure_overhead(config)))
    texts = _measure_texts(config, parse_shapes(TEXT_SHAPES), report)
    return MachineReport(about, profile, least_op_s, functions, layer_bytes, decoders, texts)


def _about() -> dict[str, Any]:
    return {
        "quire": version("quire"),
        "kernel": os.uname().release,
        "processor": processor_id(),
        "cpus": available_cpus().threads,
        "levels": ", ".join(supported_levels()),
        "missing_levels": "; ".join(f"{level}: {reason}" for level, reason in unsupported_levels().items()),
        "load_average_before": os.getloadavg()[0],
    }


def _write(folder: Path) -> None:
    try:
        write_checkpoint(folder, QWEN3_SHAPE)
    except OSError as error:
        raise ConfigError(f"the random weights, 1.2 GB, cannot be written to {folder}: {error.strerror}") from error


def _report_of(report: Callable[[str], None], weights: str, run: str) -> None:
    report(f"{weights}, {run}")


def _time_functions(runner: ModelRunner, levels: Sequence[str]) -> tuple[dict[str, dict[str, float]], int]:
    """Return the median seconds of each function by level, and the bytes of the linear weights of the layer."""
    measured = runner.time_functions(levels, FUNCTION_EFFORT)
    first, end = layers_of(runner.ops)[0]
    layer_bytes = sum(op.weight.nbytes for op in runner.ops[first:end] if isinstance(op, Linear))
    return {name: _medians(trials[-1]) for name, trials in measured.items()}, layer_bytes


def _medians(times: Times) -> dict[str, float]:
    return {level: statistics.median(seconds) for level, seconds in times.items()}


def _measure_texts(
    config: EngineConfig, shapes: Sequence[Shape], report: Callable[[str], None]
) -> list[EmbeddingResult]:
    of_model = msgspec.structs.replace(config, model="demo_embedding", weights="q8")
    with LLM.from_config(of_model) as llm:
        return list(measure_embedding(llm, shapes, REPEATS, report))
