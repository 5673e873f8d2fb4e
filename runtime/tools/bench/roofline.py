"""The machine's roofs, measured in the same run as the speeds that are held against them.

Shared machines drift by the minute, so a meter is asked before and after whatever is measured. One invariant: as many
threads and the same ISA level as the engine's steps.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ....kernels import Pool, peak_ops_per_s, read_bytes_per_s
from ....kernels.ops import Form
from ....pager import OutOfMemory, map_memory
from ...common.errors import ConfigError

BLOCK_BYTES = 512 << 20  # much larger than any cache
FORMS: tuple[Form, ...] = ("q8", "bf16", "f32")
PEAK_NAMES: dict[Form, str] = {"q8": "int8", "bf16": "bf16", "f32": "f32"}


@dataclass(frozen=True, slots=True)
class Roofline:
    """What all threads together reach: bytes per second read from memory, operations per second by form of operands."""

    read_bytes_per_s: float
    peak_ops_per_s: Mapping[Form, float]


class RooflineMeter:
    """Raises ConfigError when there is no memory to be read."""

    def __init__(self, threads: int, isa: str, block_bytes: int = BLOCK_BYTES) -> None:
        self._isa = isa
        self._pool = Pool(threads)
        try:
            self._memory = map_memory(block_bytes)
        except OutOfMemory as error:
            raise ConfigError(f"the read bandwidth cannot be measured: {error}") from error
        self._memory.fill(1)  # pages of its own, whatever the system's age

    def measure(self) -> Roofline:
        """Takes about half a second."""
        return Roofline(
            float(read_bytes_per_s(self._memory, self._pool, self._isa)),
            {form: float(peak_ops_per_s(form, self._pool, self._isa)) for form in FORMS},
        )


def mean_roofline(measured: Sequence[Roofline]) -> Roofline:
    return Roofline(
        statistics.mean(roof.read_bytes_per_s for roof in measured),
        {form: statistics.mean(roof.peak_ops_per_s[form] for roof in measured) for form in FORMS},
    )
