"""Reading of rotary embeddings from config.json, as transformers 4 (`rope_theta`, `rope_scaling`) and 5
(`rope_parameters`) write them.
"""

from __future__ import annotations

from dataclasses import replace
from decimal import Decimal
from math import sqrt

from .config_json import MAX_POSITIONS, ConfigTable, read_head_dim
from .spec import LinearScaling, Llama3Scaling, LongRopeScaling, Rope, YarnScaling

DEFAULT_THETA = 10_000.0  # transformers' default


def read_rope(config: ConfigTable, *, partial: bool = False) -> Rope:
    """Read the rotary embedding that all layers share; with `partial`, it may rotate a part of each head."""
    return rope_of(config, shared_rope_table(config), partial=partial)


def read_mrope(
    config: ConfigTable, *, interleaved: bool, default: list[int] | None = None, partial: bool = False
) -> Rope:
    """Read the M-RoPE that all layers share: a token has positions in time, height and width.

    `mrope_section` has the number of pairs that each position rotates; the pairs are in this order, or `interleaved`.
    """
    table = shared_rope_table(config)
    if table.text("rope_type", table.text("type", "default")) == "mrope":
        table = ConfigTable({**table.values, "rope_type": "default"}, table.where, table.source, table.names)
    rope = rope_of(config, table, partial=partial)
    pairs = (rope.dim or read_head_dim(config)) // 2
    sections = table.values.get("mrope_section", default)
    if (
        not isinstance(sections, list)
        or len(sections) != 3
        or any(isinstance(each, bool) or not isinstance(each, int) or each < 0 for each in sections)
        or sum(sections) != pairs
    ):
        raise table.refused("mrope_section", f"three integers whose sum is {pairs}, the rotated pairs of a head")
    axes = [axis for axis, count in enumerate(sections) for _ in range(count)]
    if interleaved:
        axes = [0] * pairs
        for axis in (1, 2):
            axes[axis : 3 * sections[axis] : 3] = [axis] * len(range(axis, min(3 * sections[axis], pairs), 3))
    return replace(rope, axes=tuple(axes))


def shared_rope_table(config: ConfigTable) -> ConfigTable:
    """Return the object of the rotary embedding that all layers share."""
    table = config.table("rope_scaling" if config.values.get("rope_scaling") else "rope_parameters")
    if nested := [key for key, value in table.values.items() if isinstance(value, dict)]:
        raise table.refused(
            nested[0], "absent: one rotary embedding for all layers is supported, not one per layer type"
        )
    return table


def layer_rope_table(config: ConfigTable, kind: str) -> ConfigTable:
    """Return config.json's rotary embedding of either the full or the sliding layers.

    transformers 4 has `rope_scaling`, for full layers only. transformers 5 has an object per kind of layer, and also
    writes keys of kinds that no layer has. Both forms apply where a folder has both.
    """
    by_kind = config.table("rope_parameters")
    for key, value in by_kind.values.items():
        if key not in ("full_attention", "sliding_attention") and value not in (None, "default"):
            raise by_kind.refused(key, "absent: full_attention and sliding_attention have one rotary embedding each")
    table = by_kind.table(kind)
    if kind == "sliding_attention" or not config.values.get("rope_scaling"):
        return table
    scaling = config.table("rope_scaling")
    if "rope_type" not in scaling and scaling.text("type", "default") != "default":
        raise scaling.refused("type", "named rope_type: transformers 4 scales by `type`, transformers 5 ignores it")
    return ConfigTable({**table.values, **scaling.values}, scaling.where, scaling.source, scaling.names)


def rope_of(config: ConfigTable, table: ConfigTable, *, theta_key: str = "rope_theta", partial: bool = False) -> Rope:
    """Read the rotary embedding in `table`, an object of config.json; its base may be in config.json itself."""
    theta = table.positive("rope_theta", config.positive(theta_key, DEFAULT_THETA))
    if theta <= 1:
        raise table.refused("rope_theta", "above 1") if "rope_theta" in table else config.refused(theta_key, "above 1")
    dim = _rotated(config, table)
    if dim is not None and not partial:
        source = table if "partial_rotary_factor" in table else config
        raise source.refused("partial_rotary_factor", "absent or 1: heads are rotated whole")
    return Rope(theta, _scaling(config, table, dim), dim)


def _rotated(config: ConfigTable, table: ConfigTable) -> int | None:
    """Return the number of rotated elements of a head; None for all of them."""
    source = table if "partial_rotary_factor" in table else config
    factor = source.positive("partial_rotary_factor", 1.0)
    if factor == 1:
        return None
    head_dim = read_head_dim(config)
    dim = int(head_dim * factor)
    if not 2 <= dim <= head_dim or dim % 2:
        raise source.refused(
            "partial_rotary_factor", f"at most 1, and make an even number of the {head_dim} elements of a head"
        )
    return None if dim == head_dim else dim


def _scaling(
    config: ConfigTable, table: ConfigTable, dim: int | None
) -> LinearScaling | Llama3Scaling | YarnScaling | LongRopeScaling | None:
    kind = table.text("rope_type", table.text("type", "default"))
    max_positions = config.integer("max_position_embeddings", 1, MAX_POSITIONS)
    if kind in ("longrope", "su") or (kind == "yarn" and "short_factor" in table):  # the first Phi-3 checkpoints
        pairs = (dim or read_head_dim(config)) // 2
        return _longrope(table, _original_positions(config, table, max_positions), max_positions, pairs)
    if kind == "default":
        return None
    if kind == "linear":
        return LinearScaling(table.positive("factor"))
    if kind == "llama3":
        return _llama3(table, _original_positions(config, table, max_positions))
    if kind == "yarn":
        return _yarn(table, _original_positions(config, table, max_positions), max_positions)
    raise table.refused("rope_type" if "rope_type" in table else "type", "default, linear, llama3, yarn or longrope")


def _original_positions(config: ConfigTable, table: ConfigTable, max_positions: int) -> int:
    """Return the context of pre-training; a top-level key takes precedence over the table's, as in transformers."""
    source = config if "original_max_position_embeddings" in config else table
    return source.integer("original_max_position_embeddings", 1, MAX_POSITIONS, max_positions)


def _llama3(table: ConfigTable, original: int) -> Llama3Scaling:
    low, high = table.positive("low_freq_factor"), table.positive("high_freq_factor")
    if high <= low:
        raise table.refused("high_freq_factor", f"above low_freq_factor ({low:g})")
    return Llama3Scaling(table.positive("factor"), low, high, original)


def _yarn(table: ConfigTable, original: int, max_positions: int) -> YarnScaling:
    factor = table.positive("factor", max_positions / original)
    fast = table.positive("beta_fast", 32.0)
    slow = table.positive("beta_slow", 1.0)
    if fast < slow:
        raise table.refused("beta_fast", f"at least beta_slow ({slow:g})")
    return YarnScaling(
        factor, _yarn_attention_factor(table, factor), fast, slow, table.flag("truncate", True), original
    )


def _yarn_attention_factor(table: ConfigTable, factor: float) -> float:
    """Return the given factor, or 0.1 ln(factor) + 1 as in the paper, or DeepSeek's ratio of two such values."""

    if "attention_factor" in table:
        return table.positive("attention_factor")
    if table.values.get("mscale") and table.values.get("mscale_all_dim"):
        return yarn_factor(factor, table.positive("mscale")) / yarn_factor(factor, table.positive("mscale_all_dim"))
    return yarn_factor(factor)


def yarn_factor(factor: float, mscale: float = 1.0) -> float:
    """Return YaRN's factor of queries and keys at positions scaled by `factor`."""
    return 0.1 * mscale * float(Decimal(factor).ln()) + 1.0 if factor > 1 else 1.0


def _longrope(table: ConfigTable, original: int, max_positions: int, pairs: int) -> LongRopeScaling:
    factor = table.positive("factor", max_positions / original)
    if original < 2:
        raise table.refused("original_max_position_embeddings", "at least 2 for longrope")
    suggested = sqrt(1 + float(Decimal(factor).ln()) / float(Decimal(original).ln())) if factor > 1 else 1.0
    return LongRopeScaling(
        table.numbers("short_factor", pairs),
        table.numbers("long_factor", pairs),
        table.positive("attention_factor", suggested),
        original,
    )
