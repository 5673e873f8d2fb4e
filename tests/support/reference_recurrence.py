"""Recurrences with a matrix per head in numpy, token by token, and the convolution and the norm around them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import numpy as np
import numpy.typing as npt
from quire.kernels.ops import CausalConv, GatedNorm, LinearRecurrence, Region

Array = npt.NDArray[np.float64]


def silu(x: Array) -> Array:
    y: Array = x / (1 + np.exp(-x))
    return y


def normed_heads(op: CausalConv, x: Array) -> Array:
    """Divide the first heads of each row by their length."""
    for first in range(0, op.num_normed * op.head_dim, op.head_dim or 1):
        head = x[:, first : first + op.head_dim]
        head /= np.sqrt((head**2).sum(axis=1, keepdims=True) + op.eps)
    return x


def gated_norm(op: GatedNorm, x: Array, gate: Array) -> Array:
    """Return the norm of each group of columns, times the gate before or after."""
    groups = (x * gate if op.gate_first or op.weight is None else x).reshape(len(x), -1, op.group)
    if op.weight is None:
        return groups.reshape(x.shape)
    normed = groups / np.sqrt((groups**2).mean(axis=2, keepdims=True) + op.eps)
    y: Array = normed.reshape(x.shape) * op.weight
    return y if op.gate_first else y * gate


class Recurrences:
    """The matrices of all sequences after each of their tokens. `round_bf16` rounds matrices of that dtype."""

    def __init__(self, round_bf16: Callable[[Array], Array]) -> None:
        self.round_bf16 = round_bf16
        self.matrices: dict[tuple[int, int, int], Array] = {}  # (offset, slot, tokens) -> [heads, key_dim, value_dim]

    def run(self, op: LinearRecurrence, regions: Mapping[Region, Array], rows: Iterable[tuple[int, int]]) -> Array:
        """Return the op's rows. Each is of a slot and at a position."""
        state = op.state
        heads, keys = state.num_heads, op.num_key_heads
        x, gates = regions[op.input], regions[op.gates]
        shape = len(x), keys, state.key_dim
        query, key = (x[:, first : first + keys * state.key_dim].reshape(shape) for first in (op.query, op.key))
        key_heads = np.tile(np.arange(keys), heads // keys) if op.tiled else np.arange(keys).repeat(heads // keys)
        query, key = query[:, key_heads], key[:, key_heads]
        value = x[:, op.value : op.value + heads * state.value_dim].reshape(len(x), heads, state.value_dim)
        time = np.log1p(np.exp(gates[:, op.decay : op.decay + heads] + op.bias)).clip(*op.time_limits)
        decay = np.exp(op.a * time)
        rate = time
        if op.rate is not None:
            rate = op.rate_scale / (1 + np.exp(-gates[:, op.rate : op.rate + heads]))
        out = np.zeros_like(value)
        for row, (slot, position) in enumerate(rows):
            s = np.zeros((heads, state.key_dim, state.value_dim))
            if position:
                s = self.matrices[state.offset, slot, position] * decay[row][:, None, None]
            update = value[row]
            if op.rate is not None:
                update = update - np.einsum("hkv,hk->hv", s, key[row])
            s = s + key[row][:, :, None] * (update * rate[row][:, None])[:, None, :]
            if state.dtype == "bf16":
                s = self.round_bf16(s)
            self.matrices[state.offset, slot, position + 1] = s
            out[row] = op.scale * np.einsum("hkv,hk->hv", s, query[row])
            if op.skip is not None:
                out[row] += op.skip[:, None] * value[row]
        return out.reshape(len(x), -1)
