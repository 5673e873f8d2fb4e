"""Hunyuan (dense): Llama with norms of query and key heads after their rotation, and a base of the rotary embedding
that a fixed `alpha` stretches.
"""

from __future__ import annotations

from dataclasses import replace
from decimal import Decimal
from typing import Any

from ..config_json import ConfigTable, build_spec, read_head_dim
from ..config_rope import rope_of, shared_rope_table
from ..gguf_config import GGUFFormat
from ..spec import DecoderSpec, Rope, TensorNames
from .family import Family

NAMES = TensorNames(q_norm="self_attn.query_layernorm", k_norm="self_attn.key_layernorm")
DEFAULTS: dict[str, Any] = {"eos_token_id": 2, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5}


def read_hunyuan(config: ConfigTable) -> DecoderSpec:
    """Read a `HunYuanDenseV1ForCausalLM`."""
    config = config.with_defaults(DEFAULTS)
    bias = config.flag("attention_bias", False)
    return replace(
        build_spec(config, "hunyuan_v1_dense", _read_rope(config)),
        qk_norm=True,
        qk_norm_kind="rotated",
        qkv_bias=bias,
        o_bias=bias,
        names=NAMES,
    )


def _read_rope(config: ConfigTable) -> Rope:
    """Read the rotary embedding. Type `dynamic` with an `alpha` does not depend on the length of a text."""
    table = shared_rope_table(config)
    if table.text("rope_type", table.text("type", "default")) != "dynamic" or "alpha" not in table:
        return rope_of(config, table)
    head_dim = read_head_dim(config)
    if head_dim < 4:
        raise config.refused("head_dim", f"at least 4 beside {table.where}alpha")
    plain = ConfigTable({**table.values, "rope_type": "default"}, table.where, table.source, table.names)
    rope = rope_of(config, plain)
    alpha = table.positive("alpha")
    if alpha < 1:
        raise table.refused("alpha", "at least 1: it stretches the base of the rotary embedding")
    stretch = Decimal(alpha) ** (Decimal(head_dim) / (head_dim - 2))
    return replace(rope, theta=float(Decimal(rope.theta) * stretch))


HUNYUAN = Family(("HunYuanDenseV1ForCausalLM",), ("hunyuan_v1_dense",), read_hunyuan, GGUFFormat("hunyuan-dense"))
