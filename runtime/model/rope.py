"""The rotary table: cos and sin of every position that a model may reach, as the kernels read them
(RoPE: Su et al., 2021).

Frequencies and angles are rounded to f32 where transformers rounds them, because models are trained with these angles;
at position 40,000 an unrounded angle differs by 2e-3.

The table has the same bits on every machine: cosines, powers and logarithms of numpy and libm may differ between
processors, so they are computed here, by addition and multiplication or in decimal arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from decimal import Decimal

import numpy as np
import numpy.typing as npt

from .spec import FrequencyDivisors, LinearScaling, Llama3Scaling, LongRopeScaling, QueryScales, Rope, YarnScaling

Table = npt.NDArray[np.float32]  # [positions, rotary_dim]: cos in the first half of the columns, sin in the second
Frequencies = npt.NDArray[np.float32]  # [rotary_dim / 2]

Angles = npt.NDArray[np.float64]

# Coefficients of z = x^2, highest power first: sin(x) = x + x z S(z), cos(x) = 1 - z/2 + z^2 C(z) for |x| <= pi / 4.
_SIN = (
    1.58969099521155010221e-10,
    -2.50507602534068634195e-08,
    2.75573137070700676789e-06,
    -1.98412698298579493134e-04,
    8.33333333332248946124e-03,
    -1.66666666666666324348e-01,
)
_COS = (
    -1.13596475577881948265e-11,
    2.08757232129817482790e-09,
    -2.75573143513906633035e-07,
    2.48015872894767294178e-05,
    -1.38888888888741095749e-03,
    4.16666666666666019037e-02,
)

ROWS_AT_ONCE = 4096  # positions whose angles are held in f64 at a time


def rotary_tables(ropes: Sequence[Rope | None], head_dim: int, max_positions: int) -> tuple[Table | None, ...]:
    """Return the table of each layer, None where heads are not rotated. Layers with equal `ropes` share a table."""
    tables = {rope: rotary_table(rope, head_dim, max_positions) for rope in set(ropes) if rope is not None}
    return tuple(None if rope is None else tables[rope] for rope in ropes)


def planned_tables(ropes: Sequence[Rope | None], head_dim: int, max_positions: int) -> tuple[Table | None, ...]:
    """Return tables of the right shapes without memory, to plan a program that is never run."""
    shapes = [None if rope is None else (max_positions, rotary_dim(rope, head_dim)) for rope in ropes]
    return tuple(None if shape is None else np.broadcast_to(np.float32(0), shape) for shape in shapes)


def rotary_nbytes(ropes: Sequence[Rope | None], head_dim: int, max_positions: int) -> int:
    """Return the bytes of `rotary_tables`."""
    return sum(max_positions * rotary_dim(rope, head_dim) * 4 for rope in set(ropes) if rope is not None)


def query_scales(scales: QueryScales, max_positions: int) -> Frequencies:
    """Return the factor of the queries of positions 0 to `max_positions` - 1."""
    periods = [float(Decimal(1 + number).ln()) for number in range(-(-max_positions // scales.period))]
    factors = (1 + scales.beta * np.array(periods)).astype(np.float32)
    return np.repeat(factors, scales.period)[:max_positions]


def rotary_dim(rope: Rope, head_dim: int) -> int:
    """Return the number of elements of a head that are rotated."""
    return head_dim if rope.dim is None else rope.dim


def rotary_table(rope: Rope, head_dim: int, max_positions: int) -> Table:
    """Return the cosines and sines of positions 0 to `max_positions` - 1."""
    dim = rotary_dim(rope, head_dim)
    frequencies, factor = inverse_frequencies(rope, dim, max_positions)
    table = np.empty((max_positions, dim), np.float32)
    for start in range(0, max_positions, ROWS_AT_ONCE):
        rows = table[start : start + ROWS_AT_ONCE]
        positions = np.arange(start, start + len(rows), dtype=np.float32)
        angles = (positions[:, None] * frequencies).astype(np.float64)
        cos, sin = _cos_sin(angles)
        rows[:, : dim // 2] = cos * factor
        rows[:, dim // 2 :] = sin * factor
    return table


def _cos_sin(angles: Angles) -> tuple[Angles, Angles]:
    """Return both of `angles`, 0 to 1.6 million radians, within 2 ulp: the reduction and the polynomials of fdlibm."""
    quarters = np.rint(angles * (2 / math.pi))
    x = angles
    for part in (1.57079632673412561417e00, 6.07710050630396597660e-11, 2.02226624879595063154e-21):  # parts of pi / 2
        x = x - quarters * part
    z = x * x
    sin, cos = np.full_like(x, _SIN[0]), np.full_like(x, _COS[0])
    for a, b in zip(_SIN[1:], _COS[1:], strict=True):
        sin, cos = sin * z + a, cos * z + b
    sin, cos = x + x * z * sin, 1 - (0.5 * z - z * z * cos)
    quadrant = quarters.astype(np.int64) % 4
    odd = quadrant % 2 == 1
    return (
        np.where((quadrant == 1) | (quadrant == 2), -1.0, 1.0) * np.where(odd, sin, cos),
        np.where(quadrant >= 2, -1.0, 1.0) * np.where(odd, cos, sin),
    )


def inverse_frequencies(rope: Rope, dim: int, max_positions: int) -> tuple[Frequencies, float]:
    """Return the radians per position of each pair of `dim` rotated elements, and the factor on cos and sin."""
    exponents = np.arange(0, dim, 2, dtype=np.float32) / np.float32(rope.span or dim)
    theta = Decimal(rope.theta)
    wavelengths = np.array([theta ** Decimal(float(x)) for x in exponents], np.float64).astype(np.float32)  # unit: 2 pi
    plain = np.float32(1) / wavelengths
    match rope.scaling:
        case None:
            return plain, 1.0
        case LinearScaling(factor):
            return plain / np.float32(factor), 1.0
        case FrequencyDivisors(divisors):
            by: Frequencies = np.array(divisors, np.float32)
            return plain / by, 1.0
        case Llama3Scaling():
            return _llama3(plain, rope.scaling), 1.0
        case YarnScaling():
            return _yarn(wavelengths, rope.theta, dim, rope.scaling), rope.scaling.attention_factor
        case LongRopeScaling():
            is_long = uses_long_factors([rope], max_positions)
            factors = np.array(rope.scaling.long_factors if is_long else rope.scaling.short_factors, np.float32)
            return np.float32(1) / (factors * wavelengths), rope.scaling.attention_factor


def uses_long_factors(ropes: Sequence[Rope | None], max_positions: int) -> bool:
    """Return whether LongRoPE's factors for long contexts apply, so that keys differ from a short context's."""
    short = short_context(ropes)
    return short is not None and max_positions > short


def short_context(ropes: Sequence[Rope | None]) -> int | None:
    """Return the longest context, in tokens, for LongRoPE's short factors; None for a model without both kinds."""
    scalings = [rope.scaling for rope in ropes if rope is not None and isinstance(rope.scaling, LongRopeScaling)]
    return min((scaling.original_max_position_embeddings for scaling in scalings), default=None)


def _llama3(plain: Frequencies, scaling: Llama3Scaling) -> Frequencies:
    """Divide frequencies with few turns in the original context by `factor`; keep high ones; interpolate others."""
    wavelengths = np.float32(2 * math.pi) / plain
    turns = np.float32(scaling.original_max_position_embeddings) / wavelengths
    low, high = np.float32(scaling.low_freq_factor), np.float32(scaling.high_freq_factor)
    slowed = plain / np.float32(scaling.factor)
    kept = (turns - low) / (high - low)
    between = (1 - kept) * slowed + kept * plain
    frequencies: Frequencies = np.where(turns < low, slowed, np.where(turns > high, plain, between))
    return frequencies


def _yarn(wavelengths: Frequencies, theta: float, head_dim: int, scaling: YarnScaling) -> Frequencies:
    """Keep fast dimensions' frequencies, divide slow ones' by `factor`, with a linear ramp in between."""
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
        return head_dim * float(Decimal(wavelength).ln()) / (2 * float(Decimal(theta).ln()))

    first, last = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    return first, last if last != first else last + 0.001
