"""GGML's block formats in numpy: random blocks, and their values in exact or once-rounded float32 arithmetic."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

BLOCKS = {
    "Q8_0": (32, 34),
    "Q4_0": (32, 18),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
    "MXFP4": (32, 17),
    "Q4_Z": (32, 19),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q2_K": (256, 84),
    "Q3_K": (256, 110),
    "IQ2_XXS": (256, 66),
    "IQ2_XS": (256, 74),
    "IQ2_S": (256, 82),
    "IQ3_XXS": (256, 98),
    "IQ3_S": (256, 110),
    "IQ4_NL": (32, 18),
    "IQ4_XS": (256, 136),
    "TQ1_0": (256, 54),
    "TQ2_0": (256, 66),
}
SCALES = {
    "Q8_0": (0,),
    "Q4_0": (0,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "MXFP4": (),
    "Q4_Z": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "IQ2_XXS": (0,),
    "IQ2_XS": (0,),
    "IQ2_S": (0,),
    "IQ3_XXS": (0,),
    "IQ3_S": (0,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
    "TQ1_0": (52,),
    "TQ2_0": (64,),
}  # offsets of fp16 numbers
# Scales of blocks that turn random bytes into weights of about 1: scales of weights, then scales of minimums.
SIZES = {
    "Q8_0": (1 / 74,),
    "Q4_0": (1 / 4.6,),
    "Q4_K": (1 / 160, 1 / 21),
    "Q5_K": (1 / 330, 1 / 21),
    "Q6_K": (1 / 1400,),
    "MXFP4": (),
    "Q4_Z": (1 / 6,),
    "Q4_1": (1 / 4.6, 1),
    "Q5_0": (1 / 9.2,),
    "Q5_1": (1 / 9.2, 1),
    "Q2_K": (1 / 8, 1 / 16),
    "Q3_K": (1 / 40,),
    "IQ2_XXS": (1 / 45,),
    "IQ2_XS": (1 / 45,),
    "IQ2_S": (1 / 45,),
    "IQ3_XXS": (1 / 120,),
    "IQ3_S": (1 / 130,),
    "IQ4_NL": (1 / 60,),
    "IQ4_XS": (1 / 1000,),
    "TQ1_0": (1,),
    "TQ2_0": (1,),
}


def random_blocks(rng: np.random.Generator, ggml_type: str, rows: int, columns: int, size: float = 1) -> Array:
    """Return random rows of blocks, uint8 [rows, bytes], of weights of about `size`."""
    weights, nbytes = BLOCKS[ggml_type]
    blocks = rng.integers(0, 256, (rows, columns // weights, nbytes), np.uint8)
    for offset, scale in zip(SCALES[ggml_type], SIZES[ggml_type], strict=True):
        scales = (rng.uniform(0.3, 1.7, blocks.shape[:2]) * scale * size).astype(np.float16)
        blocks[:, :, offset : offset + 2] = scales.view(np.uint8).reshape(*scales.shape, 2)
    if ggml_type == "MXFP4":  # a byte e for the scale 2^(e - 127)
        blocks[:, :, 0] = rng.integers(124, 127, blocks.shape[:2]) + int(np.rint(np.log2(size)))
    if ggml_type == "Q4_Z":
        blocks[:, :, 2] %= 16  # the zero point
    return blocks.reshape(rows, columns // weights * nbytes)


def dequantize(blocks: Array, ggml_type: str) -> Array:
    """Return rows of blocks of a type in FORMULAS, uint8 [rows, bytes], as float32 [rows, columns]."""
    split = blocks.reshape(-1, BLOCKS[ggml_type][1])
    columns = blocks.shape[1] // BLOCKS[ggml_type][1] * BLOCKS[ggml_type][0]
    return FORMULAS[ggml_type](split).astype(np.float32).reshape(len(blocks), columns)


def _f16(blocks: Array, offset: int) -> Array:
    return np.ascontiguousarray(blocks[:, offset : offset + 2]).view(np.float16).astype(np.float32)


def _q8_0(blocks: Array) -> Array:
    return _f16(blocks, 0) * np.ascontiguousarray(blocks[:, 2:]).view(np.int8).astype(np.float32)


def _q4_0(blocks: Array) -> Array:
    halves = np.concatenate([blocks[:, 2:] & 15, blocks[:, 2:] >> 4], axis=1)
    return _f16(blocks, 0) * (halves.astype(np.float32) - 8)


def _with_minimums(blocks: Array, weights: Array) -> Array:
    """Scale weights [n, 8, 32] by the 6-bit scales, and subtract the 6-bit minimums, of Q4_K and Q5_K."""
    low, middle, high = (blocks[:, at : at + 4] for at in (4, 8, 12))
    scales = np.concatenate([low & 63, (high & 15) | (low >> 6 << 4)], axis=1).astype(np.float32)
    minimums = np.concatenate([middle & 63, (high >> 4) | (middle >> 6 << 4)], axis=1).astype(np.float32)
    scaled = (_f16(blocks, 0) * scales)[:, :, None] * weights.astype(np.float32)
    return scaled - (_f16(blocks, 2) * minimums)[:, :, None]


def _halves(pairs: Array) -> Array:
    """Return [n, 8, 32] half bytes of four pairs of sub-blocks: low halves are the first sub-block of a pair."""
    pairs = pairs.reshape(len(pairs), 4, 1, 32)
    return np.concatenate([pairs & 15, pairs >> 4], axis=2).reshape(len(pairs), 8, 32)


def _q4_k(blocks: Array) -> Array:
    return _with_minimums(blocks, _halves(blocks[:, 16:]))


def _q5_k(blocks: Array) -> Array:
    fifth = blocks[:, 16:48][:, None, :] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    return _with_minimums(blocks, _halves(blocks[:, 48:]) | fifth << 4)


def _q6_k(blocks: Array) -> Array:
    low, high = blocks[:, :128].reshape(len(blocks), 2, 1, 64), blocks[:, 128:192].reshape(len(blocks), 2, 1, 32)
    low = np.concatenate([low & 15, low >> 4], axis=2).reshape(len(blocks), 2, 4, 32)
    weights = low | (high >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & 3) << 4
    scales = _f16(blocks, 208) * np.ascontiguousarray(blocks[:, 192:208]).view(np.int8).astype(np.float32)
    scaled: Array = scales[:, :, None] * (weights.reshape(len(blocks), 16, 16).astype(np.float32) - 32)
    return scaled


def _mxfp4(blocks: Array) -> Array:
    numbers = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
    exponents = np.where(blocks[:, :1] == 255, np.inf, blocks[:, :1].astype(np.float64) - 127)
    halves = np.concatenate([blocks[:, 1:] & 15, blocks[:, 1:] >> 4], axis=1)
    with np.errstate(invalid="ignore", over="ignore"):
        scaled: Array = np.exp2(exponents) * numbers[halves]
        return scaled.astype(np.float32)


def _q4_z(blocks: Array) -> Array:
    halves = np.concatenate([blocks[:, 3:] & 15, blocks[:, 3:] >> 4], axis=1)
    return _f16(blocks, 0) * (halves.astype(np.float32) - blocks[:, 2:3])


def _with_fifth_bits(blocks: Array, offset: int) -> Array:
    """Return the half bytes after four bytes at `offset`, whose bits are the fifth bits of the 32 weights."""
    fifth = np.unpackbits(blocks[:, offset : offset + 4], axis=1, bitorder="little")
    packed = blocks[:, offset + 4 :]
    whole: Array = np.concatenate([packed & 15, packed >> 4], axis=1) | fifth << 4
    return whole


def _q4_1(blocks: Array) -> Array:
    halves = np.concatenate([blocks[:, 4:] & 15, blocks[:, 4:] >> 4], axis=1)
    return _f16(blocks, 0) * halves.astype(np.float32) + _f16(blocks, 2)


def _q5_0(blocks: Array) -> Array:
    return _f16(blocks, 0) * (_with_fifth_bits(blocks, 2).astype(np.float32) - 16)


def _q5_1(blocks: Array) -> Array:
    return _f16(blocks, 0) * _with_fifth_bits(blocks, 4).astype(np.float32) + _f16(blocks, 2)


FORMULAS = {
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "MXFP4": _mxfp4,
    "Q4_Z": _q4_z,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
}
