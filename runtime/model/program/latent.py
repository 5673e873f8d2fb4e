"""The heads of latent attention, and the op that they become when its values have places in the arena."""

from __future__ import annotations

from dataclasses import dataclass

from ....kernels.ops import LatentAttention, Region
from .values import Vector


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentHeads:
    """The shape and the place of one layer's latent attention, and its weights: the fields of a `LatentAttention`."""

    num_heads: int
    stride: int  # columns of a query head
    first_key: int  # column of the latent among the keys
    rank: int
    scale: float  # factor of queries
    group: int  # layer group: layers that share a page table
    layer: int  # slot in the group's pages
    norm: Vector  # [rank]
    eps: float
    rotary: Vector  # [positions, rotary_dim]


def latent_attention(
    queries: Region, absorbed: Region, keys: Region, out: Region, heads: LatentHeads
) -> LatentAttention:
    """Return the op that attends over pages of latents."""
    return LatentAttention(
        queries,
        heads.stride,
        absorbed,
        keys,
        heads.first_key,
        out,
        heads.group,
        heads.layer,
        heads.num_heads,
        heads.rank,
        heads.norm,
        heads.eps,
        heads.rotary,
        heads.scale,
    )
