"""Granite 3 with a mixture of experts in every layer, with or without an expert that computes every token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..config_json import MAX_WIDTH, ConfigTable, build_spec, read_experts
from ..config_rope import read_rope
from ..gguf_config import EXPERT_KEYS, KEYS, GGUFFormat
from ..spec import DecoderSpec
from .family import Family
from .granite import GGUF_KEYS, derive_scale, with_multipliers
from .granite_hybrid import EXPERT_NAMES

DEFAULTS: dict[str, Any] = {"eos_token_id": 2, "num_experts_per_tok": 2, "num_local_experts": 8}


def read_granite_moe(config: ConfigTable) -> DecoderSpec:
    """Read a `GraniteMoeForCausalLM` or `GraniteMoeSharedForCausalLM`. Branches are scaled with their experts."""
    config = config.with_defaults(DEFAULTS)
    attention_bias = config.flag("attention_bias", False)
    spec = with_multipliers(config, build_spec(config, "granite_moe", read_rope(config)))
    experts = read_experts(config, "num_local_experts", "intermediate_size", normalized=True)
    return replace(
        spec,
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        experts=replace(
            experts,
            rule=replace(experts.rule, scale=spec.residual_scale),
            shared_size=config.integer("shared_intermediate_size", 0, MAX_WIDTH, 0),
        ),
        names=EXPERT_NAMES,
    )


def _derive(config: ConfigTable) -> Mapping[str, Any]:
    return {**derive_scale(config), "shared_intermediate_size": config.values["shared_intermediate_size"] or 0}


GRANITE_MOE = Family(
    ("GraniteMoeForCausalLM", "GraniteMoeSharedForCausalLM"),
    ("granitemoe", "granitemoeshared"),
    read_granite_moe,
    GGUFFormat(
        "granitemoe",
        KEYS | GGUF_KEYS | EXPERT_KEYS | {"shared_intermediate_size": "expert_shared_feed_forward_length"},
        neighboring_pairs=True,
        experts=True,
        derive=_derive,
    ),
)
