"""The ops of multi-head latent attention, from the normed rows to the outputs of all heads.

Queries and outputs absorb the matrices that expand latents to keys and values. So does a prefill: expanded keys would
give a prompt other bits than its continuation.
"""

from __future__ import annotations

from .program import F32, LatentHeads, NormedValue, ProgramBuilder, Value, input_form
from .rope import Table
from .spec import DecoderSpec
from .weights.latent_weights import LatentWeights


def emit_latent_attention(
    builder: ProgramBuilder,
    spec: DecoderSpec,
    weights: LatentWeights,
    normed: Value | NormedValue,
    rotary: Table,
    place: tuple[int, int],
) -> Value:
    """Return the outputs of all heads, in the form that the last projection reads.

    `place` is the layer group, and the slot in its pages.
    """
    latent = spec.latent
    assert latent is not None, "only a spec with latent attention has such layers"
    rows = spec.num_heads * latent.query_dim
    queries, keys, first_key = _projections(builder, weights, normed, latent.norm_eps, rows)
    columns = builder.split_heads(
        queries, spec.num_heads, latent.query_dim, latent.nope_dim, input_form(weights.keys[0])
    )
    heads = LatentHeads(
        num_heads=spec.num_heads,
        stride=latent.query_dim,
        first_key=first_key,
        rank=latent.rank,
        scale=spec.attention_scale,
        group=place[0],
        layer=place[1],
        norm=weights.norm,
        eps=latent.norm_eps,
        rotary=rotary,
    )
    absorbed = builder.head_linear(columns, weights.keys, F32)
    attended = builder.latent_attention(queries, absorbed, keys, heads, input_form(weights.values[0]))
    return builder.head_linear(attended, weights.values, input_form(weights.o))


def _projections(
    builder: ProgramBuilder, weights: LatentWeights, normed: Value | NormedValue, eps: float, query_rows: int
) -> tuple[Value, Value, int]:
    """Return the queries, the keys, and the first column of a key."""
    if weights.query_latent is None or weights.query_norm is None or weights.key is None:
        both = builder.linear(normed, weights.queries, None, "queries, key")
        return both, both, query_rows
    latents = builder.linear(normed, weights.query_latent, None, "query latents")
    rows = builder.norm_rows(latents, "rms", weights.query_norm, None, eps, input_form(weights.queries))
    queries = builder.linear(rows, weights.queries, None, "queries")
    return queries, builder.linear(normed, weights.key, None, "key"), 0
