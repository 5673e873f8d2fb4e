"""Measure the machine's roofline: read bandwidth and peak arithmetic, with the threads and ISA level of the engine.

A shared machine changes by the minute, so measure before and after the speeds that are compared with the roofline. A
measurement is a median of passes, because a shared machine briefly reads much faster (58 GB/s instead of 34).
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ....kernels import Pool, peak_ops_per_s, read_bytes_per_s
from ....kernels.ops import DType
from ....pager import OutOfMemory, map_memory
from ...common.errors import ConfigError

MEMORY_BYTES = 512 << 20  # larger than any cache
DTYPES: tuple[DType, ...] = ("q8", "bf16", "f32")
PEAK_NAMES: dict[DType, str] = {"q8": "int8", "bf16": "bf16", "f32": "f32"}


@dataclass(frozen=True, slots=True)
class Roofline:
    """The peaks of all threads together: bytes per second read from memory, operations per second by operand dtype."""

    read_bytes_per_s: float
    peak_ops_per_s: Mapping[DType, float]


class RooflineMeter:
    """The threads and memory for measuring rooflines. Raises ConfigError if there is too little memory."""

    def __init__(self, threads: int, isa: str) -> None:
        self._isa = isa
        self._pool = Pool(threads)
        try:
            self._memory = map_memory(MEMORY_BYTES)
        except OutOfMemory as error:
            raise ConfigError(f"the read bandwidth cannot be measured: {error}") from error
        self._memory.fill(1)  # pages never written would share one physical page of zeros

    def measure(self) -> Roofline:
        """Measure a roofline; takes about half a second."""
        return Roofline(
            float(read_bytes_per_s(self._memory, self._pool, self._isa)),
            {dtype: float(peak_ops_per_s(dtype, self._pool, self._isa)) for dtype in DTYPES},
        )


def mean_roofline(measured: Sequence[Roofline]) -> Roofline:
    """Return the mean of several measurements."""
    return Roofline(
        statistics.mean(each.read_bytes_per_s for each in measured),
        {dtype: statistics.mean(each.peak_ops_per_s[dtype] for each in measured) for dtype in DTYPES},
    )
