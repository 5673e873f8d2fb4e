"""The weights of multi-head latent attention: which tensors form which matrix. See `decoder_weights.py`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ....kernels.pack import PackedMatrix
from ..spec import Latent, TensorNames
from .packing import Part, Vector, WeightFactory, attention_group, stacked


@dataclass(frozen=True, slots=True)
class LatentWeights:
    """The weights of latent attention, with the matrices that expand latents absorbed by queries and outputs."""

    query_latent: PackedMatrix | None  # [query_rank, hidden]
    query_norm: Vector | None  # [query_rank]
    queries: (
        PackedMatrix  # [num_heads * query_dim, query_rank], or without it [num_heads * query_dim + key_dim, hidden]
    )
    key: PackedMatrix | None  # [key_dim, hidden], unless these rows follow the rows of queries
    norm: Vector  # [rank]
    keys: tuple[PackedMatrix, ...]  # [num_heads] of [rank, nope_dim]
    values: tuple[PackedMatrix, ...]  # [num_heads] of [value_dim, rank]
    o: PackedMatrix  # [hidden, num_heads * value_dim]


def build_latent(
    latent: Latent,
    num_heads: int,
    names: TensorNames,
    prefix: str,
    hidden: int,
    factory: WeightFactory,
    matrix: Callable[..., PackedMatrix],
) -> LatentWeights:
    """Make the weights of one layer; `matrix` makes a packed matrix of the model's dtype."""

    def norm(name: str, size: int) -> Vector:
        return factory.vector(size, [Part(f"{prefix}{name}.weight", (size,))])

    def of_heads(name: str, out_features: int, in_features: int) -> tuple[PackedMatrix, ...]:
        return tuple(
            matrix(out_features, in_features, [_of_head(name, num_heads, out_features, head)])
            for head in range(num_heads)
        )

    rows = num_heads * latent.query_dim
    rank = latent.query_rank
    key = stacked((names.latent_kv_a,), (latent.key_dim,))
    fused = stacked((names.latent_q, names.latent_kv_a), (rows, latent.key_dim))
    o = stacked((names.o,), (hidden,))
    return LatentWeights(
        query_latent=matrix(rank, hidden, stacked((names.latent_q_a,), (rank,))) if rank else None,
        query_norm=norm(names.latent_q_norm, rank) if rank else None,
        queries=matrix(rows, rank, stacked((names.latent_q_b,), (rows,)))
        if rank
        else matrix(rows + latent.key_dim, hidden, fused),
        key=matrix(latent.key_dim, hidden, key) if rank else None,
        norm=norm(names.latent_norm, latent.rank),
        keys=of_heads(names.latent_k_b, latent.rank, latent.nope_dim),
        values=of_heads(names.latent_v_b, latent.value_dim, latent.rank),
        o=matrix(hidden, num_heads * latent.value_dim, o, attention_group(1, 1, latent.value_dim)),
    )


def _of_head(name: str, num_heads: int, rows: int, head: int) -> Part:
    """Return a head's rows of a tensor [heads, rows, columns]."""
    return Part(name, (num_heads, rows), first_row=head * rows, num_rows=rows)
