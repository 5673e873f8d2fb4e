"""The rotary table: cos and sin of every position that a model may reach, as the kernels read them
(RoPE: Su et al., 2021).

Frequencies and angles are rounded to f32 where transformers rounds them, because models are trained with these angles;
at position 40,000 an unrounded angle differs by 2e-3.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from .spec import LinearScaling, Llama3Scaling, Rope, YarnScaling

Frequencies = npt.NDArray[np.float32]  # [head_dim / 2]

ROWS_AT_ONCE = 4096  # positions whose angles are held in f64 at a time


def rotary_nbytes(max_positions: int, head_dim: int) -> int:
    """Return the bytes of `rotary_table`."""
    return max_positions * head_dim * 4


def rotary_table(rope: Rope, head_dim: int, max_positions: int) -> npt.NDArray[np.float32]:
    """Return f32 [max_positions, head_dim]: cos in the first half of the columns, sin in the second."""
    frequencies, factor = inverse_frequencies(rope, head_dim)
    table = np.empty((max_positions, head_dim), np.float32)
    for start in range(0, max_positions, ROWS_AT_ONCE):
        rows = table[start : start + ROWS_AT_ONCE]
        positions = np.arange(start, start + len(rows), dtype=np.float32)
        angles = (positions[:, None] * frequencies).astype(np.float64)
        rows[:, : head_dim // 2] = np.cos(angles) * factor
        rows[:, head_dim // 2 :] = np.sin(angles) * factor
    return table


def inverse_frequencies(rope: Rope, head_dim: int) -> tuple[Frequencies, float]:
    """Return the radians per position of each pair of dimensions, and the factor on cos and sin."""
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    wavelengths = (np.float64(rope.theta) ** exponents.astype(np.float64)).astype(np.float32)  # over 2 pi
    plain = np.float32(1) / wavelengths
    match rope.scaling:
        case None:
            return plain, 1.0
        case LinearScaling(factor):
            return plain / np.float32(factor), 1.0
        case Llama3Scaling():
            return _llama3(plain, rope.scaling), 1.0
        case YarnScaling():
            return _yarn(wavelengths, rope.theta, head_dim, rope.scaling), rope.scaling.attention_factor


def _llama3(plain: Frequencies, scaling: Llama3Scaling) -> Frequencies:
    """Divide the frequencies with few turns in the original context by `factor`, keep those with many, interpolate."""
    wavelengths = np.float32(2 * math.pi) / plain
    turns = np.float32(scaling.original_max_position_embeddings) / wavelengths
    low, high = np.float32(scaling.low_freq_factor), np.float32(scaling.high_freq_factor)
    slowed = plain / np.float32(scaling.factor)
    kept = (turns - low) / (high - low)
    between = (1 - kept) * slowed + kept * plain
    frequencies: Frequencies = np.where(turns < low, slowed, np.where(turns > high, plain, between))
    return frequencies


def _yarn(wavelengths: Frequencies, theta: float, head_dim: int, scaling: YarnScaling) -> Frequencies:
    """Keep the frequency of fast dimensions, divide that of slow ones by `factor`, with a linear ramp in between."""
    first, last = _yarn_ramp(theta, head_dim, scaling)
    ramp = (np.arange(head_dim // 2, dtype=np.float32) - np.float32(first)) / np.float32(last - first)
    kept = 1 - np.clip(ramp, 0, 1)
    slowed = np.float32(1) / (np.float32(scaling.factor) * wavelengths)
    frequencies: Frequencies = slowed * (1 - kept) + np.float32(1) / wavelengths * kept
    return frequencies


def _yarn_ramp(theta: float, head_dim: int, scaling: YarnScaling) -> tuple[float, float]:
    """Return the dimensions that turn `beta_fast` and `beta_slow` times in the original context."""

    def dimension(turns: float) -> float:
        wavelength = scaling.original_max_position_embeddings / (turns * 2 * math.pi)
        return head_dim * math.log(wavelength) / (2 * math.log(theta))

    first, last = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    return first, last if last != first else last + 0.001
