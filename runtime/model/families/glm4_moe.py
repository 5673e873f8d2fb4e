"""GLM-4.5, 4.6 and 4.7: RoPE on a part of each head, and experts in all but the first layers, chosen by sigmoids and a
bias, beside experts that compute every token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..config_json import (
    ConfigTable,
    build_spec,
    layers_after,
    num_layers,
    read_experts_in_groups,
    shared_experts_size,
)
from ..config_rope import read_rope
from ..gguf_config import GGUF_NAMES, KEYS, NEXT_TOKENS, SIGMOID, GGUFFormat
from ..spec import SHARED_EXPERTS, DecoderSpec
from .family import Family

DEFAULTS: dict[str, Any] = {
    "first_k_dense_replace": 1,
    "max_position_embeddings": 131_072,
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_experts_per_tok": 8,
    "num_key_value_heads": 8,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-5,
    "topk_group": 1,
}
GGUF_KEYS = {
    "partial_rotary_factor": "rope.dimension_count",
    "first_k_dense_replace": "leading_dense_block_count",
    "n_routed_experts": "expert_count",
    "n_shared_experts": "expert_shared_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "norm_topk_prob": "expert_weights_norm",
    "routed_scaling_factor": "expert_weights_scale",
    "gating_func": "expert_gating_func",
    "next_tokens": NEXT_TOKENS,
}


def read_glm4_moe(config: ConfigTable) -> DecoderSpec:
    """Read a `Glm4MoeForCausalLM`."""
    config = config.with_defaults(DEFAULTS)
    layers = layers_after(config, "first_k_dense_replace")
    experts = read_experts_in_groups(config, layers)
    size = shared_experts_size(config, "n_shared_experts", 1, experts)
    return replace(
        build_spec(config, "glm4_moe", read_rope(config, partial=True)),
        qkv_bias=config.flag("attention_bias", False),
        qk_norm=config.flag("use_qk_norm", False),
        experts=replace(experts, shared_size=size) if any(layers) else None,
        names=SHARED_EXPERTS,
    )


def _derive(config: ConfigTable) -> Mapping[str, Any]:
    """Return the keys that files have in another form. Layers that predict further tokens are the last ones."""
    if config.values["gating_func"] not in (None, 0, SIGMOID):
        raise config.refused("gating_func", f"absent, 0 or {SIGMOID}, the sigmoid")
    layers = num_layers(config)
    normalized = config.values["norm_topk_prob"]
    return {
        "num_hidden_layers": layers - config.integer("next_tokens", 0, layers - 1, 0),
        "first_k_dense_replace": config.values["first_k_dense_replace"] or 0,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": False if normalized is None else normalized,
        "use_qk_norm": config.flag("qk_norm", False),
    }


GLM4_MOE = Family(
    ("Glm4MoeForCausalLM",),
    ("glm4_moe",),
    read_glm4_moe,
    GGUFFormat(
        "glm4moe",
        KEYS | GGUF_KEYS,
        replace(GGUF_NAMES, mlp_norm="post_attention_norm"),
        derive=_derive,
    ),
)
