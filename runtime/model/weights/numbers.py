"""The check of a tensor's numbers while it is packed: a damaged file must not become a model that answers.

Quantizing hides errors: a NaN in q8 becomes a small number, and an infinite weight makes its block's scale useless.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ...common.errors import CorruptCheckpoint
from . import READABLE, as_f32

LARGEST = 1 << 18  # larger than any trained weight; the f16 scales of q4 and q8 can hold it
_SCALES = {  # type of blocks -> bytes of a block, and the offsets of its f16 scales
    "Q8_0": (34, (0,)),
    "Q4_0": (18, (0,)),
    "Q4_Z": (19, (0,)),
    "Q4_1": (20, (0, 2)),
    "Q5_0": (22, (0,)),
    "Q5_1": (24, (0, 2)),
    "Q4_K": (144, (0, 2)),
    "Q5_K": (176, (0, 2)),
    "Q6_K": (210, (208,)),
}


def check_numbers(rows: npt.NDArray[Any], kind: str, tensor: str, path: Path) -> None:
    """Raise CorruptCheckpoint unless all numbers of type `kind`, or the scales of blocks, are from -2**18 to 2**18."""
    numbers = rows if kind in READABLE else _scales(rows, kind)
    bits = numbers.view(f"u{numbers.itemsize}")
    magnitudes = bits & bits.dtype.type((1 << 8 * bits.itemsize - 1) - 1)  # ordered as the numbers are, NaN last
    (largest,) = as_f32(magnitudes.max(initial=0, keepdims=True).reshape(-1).view(numbers.dtype)).tolist()
    if not largest <= LARGEST:
        found = "NaN" if largest != largest else "an infinity" if largest == float("inf") else f"{largest:.3g}"
        raise CorruptCheckpoint(f"tensor {tensor} in {path} has {found}; numbers must be from {-LARGEST} to {LARGEST}")


def _scales(rows: npt.NDArray[np.uint8], kind: str) -> npt.NDArray[Any]:
    """Return the scales of rows of blocks: f16, or f32 where they are powers of two."""
    if kind == "MXFP4":
        exponents = rows.reshape(-1, 17)[:, 0].astype(np.uint32) << 23
        return exponents.view(np.float32)  # 255, which stands for NaN, is an infinity
    size, places = _SCALES[kind]
    blocks = rows.reshape(-1, size)
    return np.concatenate([np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2") for at in places])
