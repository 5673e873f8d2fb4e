"""Quantised types of GGML: blocks of integers with scales, as float32.

Each formula is that of GGML's reference, in float32 and in the same order, so the results are the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

Blocks = npt.NDArray[np.uint8]  # [blocks, bytes of a block]
Integers = npt.NDArray[np.integer[Any]]
Floats = npt.NDArray[np.float32]


def dequantise(rows: Blocks, kind: str) -> Floats:
    """Return rows of blocks, uint8 [rows, row bytes], as float32 [rows, columns]. `kind` is a key of BLOCKS."""
    nbytes, widen = BLOCKS[kind]
    return widen(rows.reshape(-1, nbytes)).reshape(len(rows), -1)


def _half(blocks: Blocks, begin: int) -> Floats:
    """Return the float16 at byte `begin` of each block, [blocks, 1]."""
    return np.ascontiguousarray(blocks[:, begin : begin + 2]).view("<f2").astype(np.float32)


def _nibbles(packed: Blocks) -> Blocks:
    """Return the low halves of all bytes of a block, then the high halves."""
    return np.concatenate([packed & 15, packed >> 4], axis=1)


def _fifth_bits(blocks: Blocks, begin: int) -> Integers:
    """Return 16 for each of 32 elements whose bit is set in the 4 bytes from `begin` on, else 0."""
    return np.unpackbits(blocks[:, begin : begin + 4], axis=1, bitorder="little") << 4


def _signed(values: Integers, zero: int) -> Floats:
    return values.astype(np.float32) - np.float32(zero)


def _q8_0(blocks: Blocks) -> Floats:
    return _half(blocks, 0) * blocks[:, 2:].view(np.int8).astype(np.float32)


def _q4_0(blocks: Blocks) -> Floats:
    return _half(blocks, 0) * _signed(_nibbles(blocks[:, 2:]), 8)


def _q4_1(blocks: Blocks) -> Floats:
    return _half(blocks, 0) * _nibbles(blocks[:, 4:]).astype(np.float32) + _half(blocks, 2)


def _q5_0(blocks: Blocks) -> Floats:
    return _half(blocks, 0) * _signed(_nibbles(blocks[:, 6:]) | _fifth_bits(blocks, 2), 16)


def _q5_1(blocks: Blocks) -> Floats:
    values = _nibbles(blocks[:, 8:]) | _fifth_bits(blocks, 4)
    return _half(blocks, 0) * values.astype(np.float32) + _half(blocks, 2)


def _scales_and_minimums(packed: Blocks) -> tuple[Floats, Floats]:
    """Return the 8 scales and the 8 minimums of 6 bits in 12 bytes, [blocks, 8] each."""
    low, high, both = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate([low & 63, both & 15 | low >> 6 << 4], axis=1)
    minimums = np.concatenate([high & 63, both >> 4 | high >> 6 << 4], axis=1)
    return scales.astype(np.float32), minimums.astype(np.float32)


def _scaled(blocks: Blocks, values: Integers) -> Floats:
    """Return values [blocks, 8, 32] of Q4_K or Q5_K times their scales, less their minimums."""
    scales, minimums = _scales_and_minimums(blocks[:, 4:16])
    scales, minimums = _half(blocks, 0) * scales, _half(blocks, 2) * minimums
    return scales[..., None] * values.astype(np.float32) - minimums[..., None]


def _pairs_of_halves(packed: Blocks) -> npt.NDArray[np.uint8]:
    """Return [blocks, 8, 32]: each 32 bytes hold 32 elements in their low halves, and the next 32 in the high ones."""
    groups = packed.reshape(-1, 4, 1, 32)
    return np.concatenate([groups & 15, groups >> 4], axis=2).reshape(-1, 8, 32)


def _q4_k(blocks: Blocks) -> Floats:
    return _scaled(blocks, _pairs_of_halves(np.ascontiguousarray(blocks[:, 16:])))


def _q5_k(blocks: Blocks) -> Floats:
    fifth = blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    return _scaled(blocks, _pairs_of_halves(np.ascontiguousarray(blocks[:, 48:])) | fifth << 4)


def _q6_k(blocks: Blocks) -> Floats:
    halves = np.ascontiguousarray(blocks[:, :128]).reshape(-1, 2, 1, 64)
    low = np.concatenate([halves & 15, halves >> 4], axis=2).reshape(-1, 2, 4, 32)
    quarters = np.ascontiguousarray(blocks[:, 128:192]).reshape(-1, 2, 1, 32)
    high = quarters >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & 3
    values = _signed(low | high << 4, 32).reshape(-1, 16, 16)
    scales = blocks[:, 192:208].view(np.int8).astype(np.float32)
    return (_half(blocks, 208) * scales)[..., None] * values


# type -> bytes of a block, and the function that widens blocks to [blocks, …], elements in order
BLOCKS: dict[str, tuple[int, Callable[[Blocks], Floats]]] = {
    "Q8_0": (34, _q8_0),
    "Q4_0": (18, _q4_0),
    "Q4_1": (20, _q4_1),
    "Q5_0": (22, _q5_0),
    "Q5_1": (24, _q5_1),
    "Q4_K": (144, _q4_k),
    "Q5_K": (176, _q5_k),
    "Q6_K": (210, _q6_k),
}
