"""The check of a tensor's numbers while it is packed: a damaged file must not become a model that answers.

Quantizing hides errors: a NaN in q8 becomes a small number, and an infinite weight makes its block's scale useless.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy.typing as npt

from ....kernels.pack import largest_number
from ...common.errors import CorruptCheckpoint
from . import READABLE, as_f32

LARGEST = 1 << 18  # larger than any trained weight; the f16 scales of q4 and q8 can hold it


def check_numbers(rows: npt.NDArray[Any], kind: str, tensor: str, path: Path) -> None:
    """Raise CorruptCheckpoint unless all numbers of type `kind`, or the scales of blocks, are from -2**18 to 2**18.

    The scales of blocks that become others while they are packed are small enough for weights in this range.
    """
    largest = _largest_element(rows) if kind in READABLE else largest_number(rows, kind)
    if not largest <= LARGEST:
        found = "NaN" if largest != largest else "an infinity" if largest == float("inf") else f"{largest:.3g}"
        raise CorruptCheckpoint(f"tensor {tensor} in {path} has {found}; numbers must be from {-LARGEST} to {LARGEST}")


def _largest_element(numbers: npt.NDArray[Any]) -> float:
    bits = numbers.view(f"u{numbers.itemsize}")
    magnitudes = bits & bits.dtype.type((1 << 8 * bits.itemsize - 1) - 1)  # ordered as the numbers are, NaN last
    return float(as_f32(magnitudes.max(initial=0, keepdims=True).reshape(-1).view(numbers.dtype))[0])
