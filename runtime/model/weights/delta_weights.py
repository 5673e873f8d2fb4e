"""The weights of a gated delta net: which tensors form which matrix. See `decoder_weights.py`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ....kernels.pack import PackedMatrix
from ..spec import GatedDelta, TensorNames
from .packing import MatrixPlan, Part, Vector, WeightFactory, decay_rates, named, stacked


@dataclass(frozen=True, slots=True)
class DeltaWeights:
    """The weights of a gated delta net."""

    into: PackedMatrix  # [conv_size + value_size, hidden]: queries, keys, values, gates of the norm
    rates: PackedMatrix  # f32 [2 heads, hidden]: rates, decays; columns multiplied by the norm's weights, as a router's
    taps: Vector  # [taps, conv_size], the weights of the oldest token first
    a: Vector  # [heads], negative: factors of the decays
    bias: Vector  # [heads], added to the inputs of the decays
    norm: Vector  # [value_size]: the norm's weights, once for each head
    out: PackedMatrix  # [hidden, value_size]


def build_delta(
    delta: GatedDelta,
    names: TensorNames,
    prefix: str,
    hidden: int,
    factory: WeightFactory,
    matrix: Callable[[int, int, Sequence[Part]], PackedMatrix],
    input_norm: Vector | None,
) -> DeltaWeights:
    """Make the weights of one layer; `matrix` makes a packed matrix of the model's dtype."""
    heads = delta.num_value_heads
    into, rates = _by_key_head(delta, names) if names.delta_by_key_head else _one_after_another(delta, names)
    a = factory.vector(heads, [Part(f"{prefix}{names.delta_a}", (heads,))])
    norm = factory.vector(delta.value_dim, [Part(f"{prefix}{names.delta_norm}.weight", (delta.value_dim,))])
    return DeltaWeights(
        into=matrix(delta.conv_size + delta.value_size, hidden, into),
        rates=factory.matrix(
            MatrixPlan(2 * heads, hidden, "f32", named(rates, prefix, "weight", hidden), factors=input_norm)
        ),
        taps=_taps(delta, names, prefix, factory),
        a=decay_rates(a) if names.delta_a_is_log else a,
        bias=factory.vector(heads, [Part(f"{prefix}{names.delta_bias}", (heads,))]),
        norm=np.tile(norm, heads),
        out=matrix(hidden, delta.value_size, stacked((names.delta_out,), (hidden,))),
    )


def _one_after_another(delta: GatedDelta, names: TensorNames) -> tuple[list[Part], list[Part]]:
    """Return the parts of both matrices of the layer's input, whose tensors have all heads of one kind together."""
    qkv = stacked(names.delta_qkv, (delta.key_size, delta.key_size, delta.value_size))
    gate = Part(names.delta_gate, (delta.value_size,), start=delta.conv_size)
    if len(names.delta_rates) == 1:
        return [*qkv, gate], _rates_by_key_head(delta, names)
    return [*qkv, gate], stacked(names.delta_rates, (delta.num_value_heads, delta.num_value_heads))


def _by_key_head(delta: GatedDelta, names: TensorNames) -> tuple[list[Part], list[Part]]:
    """Return the same parts where a tensor has all rows of the first key head, then those of the second one, …"""
    values = delta.value_size // delta.num_key_heads
    (qkvz,) = names.delta_qkv
    into = _split_heads(delta.num_key_heads, qkvz, (delta.key_dim, delta.key_dim, values, values))
    return into, _rates_by_key_head(delta, names)


def _rates_by_key_head(delta: GatedDelta, names: TensorNames) -> list[Part]:
    rates = delta.num_value_heads // delta.num_key_heads
    return _split_heads(delta.num_key_heads, names.delta_rates[0], (rates, rates))


def _split_heads(num_heads: int, tensor: str, sizes: Sequence[int]) -> list[Part]:
    """Return parts that put rows of each of `sizes` together, of a tensor that has them head by head."""
    rows = sum(sizes)
    return [
        Part(
            tensor,
            (num_heads * rows,),
            first_row=head * rows + sum(sizes[:kind]),
            num_rows=size,
            start=num_heads * sum(sizes[:kind]) + head * size,
        )
        for kind, size in enumerate(sizes)
        for head in range(num_heads)
    ]


def _taps(delta: GatedDelta, names: TensorNames, prefix: str, factory: WeightFactory) -> Vector:
    """Return the convolution's weights, from one tensor, or from one for queries, keys and values each."""
    parts = stacked(names.delta_conv, (delta.key_size, delta.key_size, delta.value_size))
    weights = [
        factory.vector(part.shape[0] * delta.taps, named([part], prefix, "weight", *names.delta_conv_shape, delta.taps))
        for part in (Part(part.tensor, part.shape) for part in parts)
    ]
    return np.concatenate([each.reshape(-1, delta.taps) for each in weights]).T
