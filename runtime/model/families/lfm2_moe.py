"""LFM2-MoE: LFM2 with experts in all but the first layers; their router has sigmoids, and a bias for the choice."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ....kernels.ops import RoutingRule
from ..config_json import ConfigTable, layers_after, read_experts
from ..gguf_config import KEYS, SIGMOID, GGUFFormat
from ..spec import DecoderSpec
from .family import Family
from .lfm2 import LFM2_GGUF_NAMES, NAMES, build_hybrid, derive_layers, with_other_keys

EPS = 1e-6  # added to the sum of a token's weights
MOE_NAMES = replace(
    NAMES,
    router="feed_forward.gate",
    choice_bias="feed_forward.expert_bias",
    expert_gate_up=("feed_forward.experts.{}.w1", "feed_forward.experts.{}.w3"),
    expert_down="feed_forward.experts.{}.w2",
)
DEFAULTS: dict[str, Any] = {  # defaults of transformers' config class
    "vocab_size": 65_536,
    "hidden_size": 2048,
    "intermediate_size": 7168,
    "moe_intermediate_size": 1792,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 128_000,
    "norm_eps": 1e-5,
    "rope_theta": 1_000_000.0,
    "tie_word_embeddings": True,
    "conv_L_cache": 3,
    "num_dense_layers": 2,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "eos_token_id": 2,
}


def read_lfm2_moe(config: ConfigTable) -> DecoderSpec:
    """Read a `Lfm2MoeForCausalLM`."""
    config = with_other_keys(config.with_defaults(DEFAULTS), {"tie_word_embeddings": "tie_embedding"})
    normalized = config.flag("norm_topk_prob", True)
    experts = read_experts(
        config,
        "num_experts",
        "moe_intermediate_size",
        normalized=normalized,
        layers=layers_after(config, "num_dense_layers"),
    )
    scale = config.positive("routed_scaling_factor", 1.0)
    rule = RoutingRule(normalized=normalized, sigmoid=True, eps=EPS, scale=scale)
    return replace(
        build_hybrid(config, "lfm2_moe"),
        experts=replace(experts, rule=rule, choice_bias=config.flag("use_expert_bias", True)),
        names=MOE_NAMES,
    )


def _derive(config: ConfigTable) -> Mapping[str, Any]:
    """Return the keys that files have in another form, or do not have."""
    if config.values["gating_func"] != SIGMOID:
        raise config.refused("gating_func", f"{SIGMOID}, the sigmoid")
    num_dense = 0 if config.values["num_dense_layers"] is None else config.values["num_dense_layers"]
    return {**derive_layers(config), "num_dense_layers": num_dense}


LFM2_MOE = Family(
    ("Lfm2MoeForCausalLM",),
    ("lfm2_moe",),
    read_lfm2_moe,
    GGUFFormat(
        "lfm2moe",
        KEYS
        | {
            "conv_L_cache": "shortconv.l_cache",
            "num_experts": "expert_count",
            "num_experts_per_tok": "expert_used_count",
            "moe_intermediate_size": "expert_feed_forward_length",
            "num_dense_layers": "leading_dense_block_count",
            "gating_func": "expert_gating_func",
            "routed_scaling_factor": "expert_weights_scale",
        },
        LFM2_GGUF_NAMES,
        experts=True,
        derive=_derive,
    ),
)
