"""The weights of Mamba-2 mixers: which rows of which tensors form which matrix."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ....kernels.pack import PackedMatrix
from ...common.errors import CorruptCheckpoint
from ..spec import Mamba, TensorNames
from .packing import MatrixPlan, Part, Vector, WeightFactory, decay_rates, named, scaled, stacked


@dataclass(frozen=True, slots=True)
class MambaWeights:
    """The weights of a Mamba-2 mixer. Biases and norms that the family does not have are None."""

    into: PackedMatrix  # [inner_size + conv_size, hidden]: gates, x, B, C
    into_bias: Vector | None
    times: PackedMatrix  # f32 [heads, hidden]: inputs of the time step; columns multiplied by the norm's weights
    times_bias: Vector | None  # [heads]
    taps: Vector  # [taps, conv_size], the weights of the oldest token first, with the scales of x, B and C
    taps_bias: Vector | None  # [conv_size]
    a: Vector  # [heads], negative
    bias: Vector  # [heads], added to the inputs of the time step
    skip: Vector  # [heads]
    norm: Vector | None  # [inner_size]
    out: PackedMatrix  # [hidden, inner_size]
    out_bias: Vector | None


def build_mamba(
    mamba: Mamba,
    names: TensorNames,
    prefix: str,
    hidden: int,
    factory: WeightFactory,
    matrix: Callable[[int, int, Sequence[Part]], PackedMatrix],
    input_norm: Vector | None,
) -> MambaWeights:
    """Make the weights of a mixer; `matrix` makes a packed matrix of parts without prefix.

    The linear layers of `into` and `times` are multiplied by the scales of the gates and of the time steps, after
    their biases have been added. The convolution is linear in its inputs, so its weights have the other scales.
    """
    inner, conv, heads = mamba.inner_size, mamba.conv_size, mamba.num_heads
    rows = inner + conv
    into = Part(names.mamba_in, (rows + heads,), num_rows=rows)
    times = Part(names.mamba_in, (rows + heads,), first_row=rows, num_rows=heads)
    out = stacked((names.mamba_out,), (hidden,))
    taps = named(stacked((names.mamba_conv,), (conv,)), prefix, "weight", *names.conv_shape, mamba.taps)
    weights = factory.vector(conv * mamba.taps, taps).reshape(conv, mamba.taps).T

    def bias(present: bool, size: int, parts: Sequence[Part]) -> Vector | None:
        return factory.vector(size, named(parts, prefix, "bias")) if present else None

    def of_heads(name: str, *dimensions: int) -> Vector:
        return factory.vector(heads, [Part(f"{prefix}{name}", (heads, *dimensions))])

    second = (1,) if names.of_llama_cpp else ()  # the second dimension of A and D

    return MambaWeights(
        into=matrix(rows, hidden, [into]),
        into_bias=scaled(bias(mamba.in_bias, rows, [into]), 1 / mamba.input_scale),
        times=factory.matrix(
            MatrixPlan(heads, hidden, "f32", named([times], prefix, "weight", hidden), factors=input_norm)
        ),
        times_bias=scaled(bias(mamba.in_bias, heads, [times]), 1 / mamba.input_scale),
        taps=weights * _conv_scales(mamba),
        taps_bias=bias(mamba.conv_bias, conv, stacked((names.mamba_conv,), (conv,))),
        a=_decay_rates(names, f"{prefix}{names.mamba_a}", of_heads(names.mamba_a, *second)),
        bias=of_heads(names.mamba_time_bias),
        skip=of_heads(names.mamba_skip, *second),
        norm=_norm(mamba, names, prefix, factory),
        out=matrix(hidden, inner, out),
        out_bias=bias(mamba.out_bias, hidden, out),
    )


def _norm(mamba: Mamba, names: TensorNames, prefix: str, factory: WeightFactory) -> Vector | None:
    if not mamba.norm:
        return None
    inner = mamba.inner_size
    shape = (mamba.num_groups, inner // mamba.num_groups) if names.of_llama_cpp else (inner,)
    return factory.vector(inner, [Part(f"{prefix}{names.mamba_norm}.weight", shape)])


def _conv_scales(mamba: Mamba) -> Vector:
    """Return the scale of each column of x, B and C, relative to that of the gates."""
    return np.repeat(np.array(mamba.scales[1:4]) / mamba.scales[0], mamba.conv_sizes).astype(np.float32)


def _decay_rates(names: TensorNames, tensor: str, stored: Vector) -> Vector:
    """Return A, which is not positive: the stored numbers, or -exp of each, with the same bits on every machine."""
    if not names.of_llama_cpp:
        return decay_rates(stored)
    if (stored > 0).any():
        raise CorruptCheckpoint(f"tensor {tensor} has {stored.max():.3g}; its numbers must not be positive")
    return stored
