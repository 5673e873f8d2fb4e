"""Quantised types of GGML as float32, and the types that the kernels do not pack themselves: Q4_1, Q5_0 and Q5_1.

llama.cpp uses these three in k-quant files for matrices whose rows are not a multiple of 256.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ....kernels.pack import BLOCK_DTYPES, GGML_DTYPES, widen_blocks

Blocks = npt.NDArray[np.uint8]  # [rows, row bytes], or [blocks, bytes of a block]
Integers = npt.NDArray[np.integer[Any]]

SUPPORTED = (*GGML_DTYPES, "Q4_1", "Q5_0", "Q5_1")


def q5_0_as_q8_0(rows: Blocks) -> Blocks:
    """Return rows of Q5_0 blocks as Q8_0 blocks with the same scales and numbers."""
    blocks = rows.reshape(-1, 22)
    numbers = (_with_fifth_bits(blocks[:, 6:], blocks[:, 2:6]).astype(np.int8) - 16).view(np.uint8)
    return np.concatenate([blocks[:, :2], numbers], axis=1).reshape(len(rows), -1)


def widen(rows: Blocks, kind: str) -> npt.NDArray[np.float32]:
    """Return rows of blocks of a type in `SUPPORTED`, or Q4_Z, as float32 [rows, columns], by GGML's formula."""
    if kind in BLOCK_DTYPES:
        return widen_blocks(rows, kind)
    if kind == "Q5_0":
        return widen_blocks(q5_0_as_q8_0(rows), "Q8_0")
    blocks = rows.reshape(-1, {"Q4_1": 20, "Q5_1": 24}[kind])
    scales, minimums = (np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2").astype(np.float32) for at in (0, 2))
    numbers = _nibbles(blocks[:, 4:]) if kind == "Q4_1" else _with_fifth_bits(blocks[:, 8:], blocks[:, 4:8])
    with np.errstate(invalid="ignore", over="ignore"):
        return (scales * numbers.astype(np.float32) + minimums).reshape(len(rows), -1)


def _nibbles(packed: Blocks) -> Integers:
    """Return the low halves of all bytes of each block, then the high halves."""
    return np.concatenate([packed & 15, packed >> 4], axis=1)


def _with_fifth_bits(packed: Blocks, bits: Blocks) -> Integers:
    """Return `_nibbles(packed)` with 16 added where the element's bit in 4 bytes is set."""
    return _nibbles(packed) | np.unpackbits(bits, axis=1, bitorder="little") << 4
