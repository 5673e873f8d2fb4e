"""OLMoE: a mixture of experts in every layer, and norms of queries and keys over all heads together."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..config_json import ConfigTable, build_spec, read_experts
from ..config_rope import read_rope
from ..gguf_config import KEYS, GGUFFormat
from ..spec import DecoderSpec
from .family import Family

DEFAULTS: dict[str, Any] = {
    "eos_token_id": 50_279,
    "max_position_embeddings": 4096,
    "norm_topk_prob": False,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "rms_norm_eps": 1e-5,
}


def read_olmoe(config: ConfigTable) -> DecoderSpec:
    """Read an `OlmoeForCausalLM`."""
    config = config.with_defaults(DEFAULTS)
    if "clip_qkv" in config:
        raise config.refused("clip_qkv", "null or absent: queries, keys and values are not clipped")
    attention_bias = config.flag("attention_bias", False)
    normalized = config.flag("norm_topk_prob", False)
    return replace(
        build_spec(config, "olmoe", read_rope(config)),
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        qk_norm=True,
        qk_norm_rows=True,
        experts=read_experts(config, "num_experts", "intermediate_size", normalized=normalized),
    )


OLMOE = Family(
    ("OlmoeForCausalLM",),
    ("olmoe",),
    read_olmoe,
    GGUFFormat(
        "olmoe",
        KEYS | {"num_experts": "expert_count", "num_experts_per_tok": "expert_used_count"},
        experts=True,
    ),
)
