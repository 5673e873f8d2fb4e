"""The same shapes on several thread counts: the scaling of speed, and the roofline measured at each count."""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from ....kernels import PackedMatrix, Pool, Program, packed_nbytes
from ....kernels.ops import BLOCK, Linear, Region
from ....pager import KVLayout, map_memory
from ...common.errors import ConfigError
from .console import range_text, shape_as_dict
from .roofline import DTYPES, PEAK_NAMES
from .speed import ShapeResult

MAX_THREADS = 1024
OPS = 256
PASSES = 9


def parse_thread_counts(values: Sequence[str], cpus: int) -> list[int]:
    """Return the counts in `values` in ascending order; without values 1, 2, 4 and so on up to `cpus`.

    A value is one count or several with commas. Raises ConfigError.
    """
    if not values:
        return sorted({cpus, *(1 << power for power in range(cpus.bit_length()))})
    return sorted({_parse_count(text.strip(), value) for value in values for text in value.split(",")})


def _parse_count(text: str, value: str) -> int:
    if not (re.fullmatch(r"[0-9]{1,9}", text) and 1 <= int(text) <= MAX_THREADS):
        raise ConfigError(f"threads_sweep: {value[:80]!r} is not allowed; write counts from 1 to {MAX_THREADS}: 1,2,4")
    return int(text)


def least_op_seconds(threads: int, isa: str) -> float:
    """Return the median seconds of a linear layer with one block of 32 x 32 weights for each thread.

    The arithmetic takes about 0.1 µs; the rest is the fixed cost of an op: distributing it, waiting for its end, and
    one 256th of the start of a step.
    """
    nbytes = packed_nbytes(BLOCK * threads, BLOCK, "f32")
    weight = PackedMatrix(BLOCK * threads, BLOCK, "f32", map_memory(nbytes))
    x = Region(0, 1, BLOCK, "f32")
    out = Region(x.nbytes, 1, BLOCK * threads, "f32")
    layout = KVLayout(1, 1, BLOCK)
    one = np.zeros(1, np.int32)
    program = Program(
        [Linear(x, weight, None, out, "store")] * OPS,
        out.offset + out.nbytes,
        np.zeros(layout.page_bytes, np.uint8),
        layout,
        1,
        Pool(threads),
        max_rows=1,
        max_samples=1,
        max_sequences=1,
        vocab_size=1,
        isa=isa,
    )
    starts = np.array([0, 1], np.int32)
    seconds = []
    for _ in range(PASSES):
        start = time.perf_counter()
        program.run(one, starts, one, one, starts, one[:0])
        seconds.append((time.perf_counter() - start) / OPS)
    return statistics.median(seconds)


@dataclass(frozen=True, slots=True)
class ThreadResult:
    """The results on one number of threads."""

    threads: int
    least_op_s: float  # see `least_op_seconds`
    shapes: list[ShapeResult]


@dataclass(frozen=True, slots=True)
class ThreadSweep:
    """The results on all thread counts, ascending, for the same shapes."""

    about: dict[str, Any]  # model, weights, kv_cache_dtype, isa
    results: list[ThreadResult]

    def as_dict(self) -> dict[str, Any]:
        """Return the figures, with the units of `SpeedReport.as_dict`; ratios compare tokens per second."""
        return {**self.about, "thread_counts": [self._result_as_dict(result) for result in self.results]}

    def _result_as_dict(self, result: ThreadResult) -> dict[str, Any]:
        shapes = []
        for shape, fewest in zip(result.shapes, self.results[0].shapes, strict=True):
            figures = shape_as_dict(shape)
            for phase, ratio in zip(("prefill", "decode"), _ratios(shape, fewest), strict=True):
                figures[phase]["ratio_to_fewest_threads"] = ratio
            shapes.append(figures)
        return {"threads": result.threads, "least_op_s": result.least_op_s, "shapes": shapes}

    def print(self) -> None:
        about = self.about
        console = Console(width=100, highlight=False)
        console.print(
            f"{about['model']}: weights {about['weights']}, KV {about['kv_cache_dtype']}, {about['isa']}, "
            f"on {', '.join(str(result.threads) for result in self.results)} threads"
        )
        console.print(self._machine_table())
        console.print(self._speed_table())

    def _machine_table(self) -> Table:
        names = [f"{PEAK_NAMES[dtype]}\nGOP/s" for dtype in DTYPES]
        table = bench_table("machine during the run", ("threads", "read\nGB/s", *names, "least op\nµs"))
        for result in self.results:
            rooflines = [shape.roofline for shape in result.shapes]
            reads = range_text([each.read_bytes_per_s / 1e9 for each in rooflines], ".1f")
            peaks = (range_text([each.peak_ops_per_s[dtype] / 1e9 for each in rooflines], ".0f") for dtype in DTYPES)
            table.add_row(str(result.threads), reads, *peaks, f"{result.least_op_s * 1e6:.2f}")
        return table

    def _speed_table(self) -> Table:
        ratio = f"ratio to\n{self.results[0].threads}"
        columns = ("prefill\ntok/s", ratio, "share of\npeak", "decode\ntok/s", ratio, "share of read\nbandwidth")
        table = bench_table("speed", ("threads", "users x prompt", *columns))
        for result in self.results:
            for shape, fewest in zip(result.shapes, self.results[0].shapes, strict=True):
                prefill_ratio, decode_ratio = _ratios(shape, fewest)
                table.add_row(
                    str(result.threads),
                    str(shape.shape),
                    f"{shape.prefill.tokens_per_s:,.1f}",
                    f"{prefill_ratio:.2f}x",
                    f"{shape.prefill.share_of_peak(shape.roofline):.0%}",
                    f"{shape.decode.tokens_per_s:,.1f}",
                    f"{decode_ratio:.2f}x",
                    f"{shape.decode.share_of_bandwidth(shape.roofline):.0%}",
                )
        return table


def _ratios(shape: ShapeResult, fewest: ShapeResult) -> tuple[float, float]:
    """Return the speedups of prefill and of decode over the fewest threads."""
    return (
        shape.prefill.tokens_per_s / fewest.prefill.tokens_per_s,
        shape.decode.tokens_per_s / fewest.decode.tokens_per_s,
    )


def bench_table(title: str, columns: Sequence[str]) -> Table:
    """Return an empty table whose cells are aligned to the right."""
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", title_style="bold")
    for column in columns:
        table.add_column(column, justify="right")
    return table
