"""The attention ops of a layer, made from its heads and their weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict

from ....kernels.ops import Attention, EphemeralAttention, EphemeralPages, Region
from .values import Heads, Vector


@dataclass(frozen=True, slots=True)
class HeadWeights:
    """The weights that attention applies to heads: norms, rotation and sinks."""

    eps: float  # epsilon of the norms
    q_norm: Vector | None = None
    k_norm: Vector | None = None
    v_norm: Vector | None = None
    rotary: Vector | None = None  # rotary table; None: no rotation by a table
    sinks: Vector | None = None  # one more score per head, without a value
    query_scales: Vector | None = None  # factor of the queries of each position


class _HeadFields(TypedDict):
    """The fields that both ops have."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    q_norm: Vector | None
    k_norm: Vector | None
    eps: float
    rotary: Vector | None
    scale: float
    window: int


def paged_attention(qkv: Region, out: Region, heads: Heads, weights: HeadWeights) -> Attention:
    """Return the op that attends over pages."""
    return Attention(
        qkv=qkv,
        out=out,
        group=heads.group,
        layer=heads.layer,
        softcap=heads.softcap,
        norms_rows=heads.norms_rows,
        gated=heads.gated,
        sinks=weights.sinks,
        head_norm=heads.head_norm,
        query_scales=weights.query_scales,
        v_norm=weights.v_norm,
        stores=heads.stores,
        values_are_keys=heads.values_are_keys,
        rotary_span=heads.rotary_span,
        **_head_fields(heads, weights),
    )


def ephemeral_attention(
    qkv: Region, out: Region, pages: EphemeralPages, heads: Heads, weights: HeadWeights
) -> EphemeralAttention:
    """Return the op that attends among the rows of each text, with keys and values in the arena."""
    return EphemeralAttention(
        qkv=qkv,
        out=out,
        pages=pages,
        causal=heads.causal,
        bias=heads.bias,
        rotary_dim=heads.rotary_dim,
        **_head_fields(heads, weights),
    )


def _head_fields(heads: Heads, weights: HeadWeights) -> _HeadFields:
    return {
        "num_heads": heads.num_heads,
        "num_kv_heads": heads.num_kv_heads,
        "head_dim": heads.head_dim,
        "q_norm": weights.q_norm,
        "k_norm": weights.k_norm,
        "eps": weights.eps,
        "rotary": weights.rotary,
        "scale": heads.scale,
        "window": heads.window,
    }
