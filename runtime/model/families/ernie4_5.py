"""ERNIE 4.5: Llama with interleaved RoPE and biases by `use_bias`. In models with experts, a softmax and a bias choose
the experts of a token, and further experts compute every token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..config_json import MAX_LAYERS, MAX_WIDTH, ConfigTable, build_spec, num_layers, read_experts, shared_experts_size
from ..config_rope import read_rope
from ..gguf_config import KEYS, GGUFFormat
from ..spec import SHARED_EXPERTS, DecoderSpec, Experts
from .family import Family

MOE_NAMES = replace(SHARED_EXPERTS, choice_bias="mlp.moe_statics.e_score_correction_bias")
MOST_NORM_MIN = 1e-6  # a sum of weights that is smaller does not occur

DEFAULTS: dict[str, Any] = {
    "eos_token_id": 2,
    "head_dim": 128,
    "max_position_embeddings": 131_072,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "tie_word_embeddings": True,
}
MOE_DEFAULTS: dict[str, Any] = {
    **DEFAULTS,
    "moe_intermediate_size": 1536,
    "moe_k": 6,
    "moe_layer_end_index": -1,
    "moe_layer_interval": 1,
    "moe_layer_start_index": 1,
    "moe_norm_min": 1e-12,
    "moe_num_experts": 64,
    "moe_num_shared_experts": 2,
    "head_dim": None,
    "num_key_value_heads": 4,
}
GGUF_KEYS = {
    "moe_intermediate_size": "expert_feed_forward_length",
    "moe_k": "expert_used_count",
    "moe_layer_interval": "interleave_moe_layer_step",
    "moe_layer_start_index": "leading_dense_block_count",
    "moe_num_experts": "expert_count",
    "shared_size": "expert_shared_feed_forward_length",
}


def read_ernie4_5(config: ConfigTable) -> DecoderSpec:
    """Read an `Ernie4_5ForCausalLM`."""
    config = config.with_defaults(DEFAULTS)
    bias = config.flag("use_bias", False)
    return replace(
        build_spec(config, "ernie4_5", read_rope(config)),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
    )


def read_ernie4_5_moe(config: ConfigTable) -> DecoderSpec:
    """Read an `Ernie4_5_MoeForCausalLM`."""
    config = config.with_defaults(MOE_DEFAULTS)
    spec = read_ernie4_5(config)
    experts = _read_experts(config)
    return replace(
        spec,
        family="ernie4_5_moe",
        lm_head_bias=spec.o_bias,
        experts=experts if any(experts.layers) else None,
        names=MOE_NAMES,
    )


def _read_experts(config: ConfigTable) -> Experts:
    if config.positive("moe_norm_min") > MOST_NORM_MIN:
        raise config.refused("moe_norm_min", f"at most {MOST_NORM_MIN:g}")
    renamed = ConfigTable(
        {**config.values, "num_experts_per_tok": config.values["moe_k"]},
        config.where,
        config.source,
        {"num_experts_per_tok": "moe_k", **config.names},
    )
    experts = read_experts(
        renamed, "moe_num_experts", "moe_intermediate_size", normalized=True, layers=_layers_with_experts(config)
    )
    shared_size = shared_experts_size(config, "moe_num_shared_experts", 0, experts)
    return replace(experts, choice_bias=True, shared_size=shared_size)


def _layers_with_experts(config: ConfigTable) -> tuple[bool, ...]:
    """Return which layers have experts: each `moe_layer_interval`-th of a range."""
    layers = num_layers(config)
    first = config.integer("moe_layer_start_index", 0, MAX_LAYERS)
    last = config.integer("moe_layer_end_index", -1, MAX_LAYERS)
    step = config.integer("moe_layer_interval", 1, MAX_LAYERS)
    last = layers - 1 if last == -1 else last
    return tuple(first <= layer <= last and (layer + 1) % step == 0 for layer in range(layers))


ERNIE4_5 = Family(
    ("Ernie4_5ForCausalLM",),
    ("ernie4_5",),
    read_ernie4_5,
    GGUFFormat("ernie4_5", neighboring_pairs=True),
    neighboring_pairs=True,
)


def _derive(config: ConfigTable) -> Mapping[str, Any]:
    """Return the keys that files have in another form."""
    size = config.integer("moe_intermediate_size", 1, MAX_WIDTH)
    shared = config.integer("shared_size", 0, MAX_WIDTH, 0)
    if shared % size:
        raise config.refused("shared_size", f"a multiple of {size}, the columns of an expert")
    return {
        "moe_layer_end_index": -1,
        "moe_layer_start_index": config.values["moe_layer_start_index"] or 0,
        "moe_norm_min": MOE_DEFAULTS["moe_norm_min"],
        "moe_num_shared_experts": shared // size,
    }


ERNIE4_5_MOE = Family(
    ("Ernie4_5_MoeForCausalLM",),
    ("ernie4_5_moe",),
    read_ernie4_5_moe,
    GGUFFormat("ernie4_5-moe", KEYS | GGUF_KEYS, neighboring_pairs=True, derive=_derive),
    neighboring_pairs=True,
)
