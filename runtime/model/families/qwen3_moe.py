"""Qwen3 with a mixture of experts: in most layers, or all, many small experts take the place of Qwen3's MLP."""

from __future__ import annotations

from dataclasses import replace

from ..config_json import ConfigTable, build_spec, num_layers, read_experts, sliding_window
from ..config_rope import read_rope
from ..gguf_config import EXPERT_KEYS, KEYS, GGUFFormat
from ..spec import DecoderSpec
from .family import Family

DEFAULTS = {
    "sliding_window": 4096,
    "moe_intermediate_size": 768,
    "num_experts_per_tok": 8,
}


def read_qwen3_moe(config: ConfigTable) -> DecoderSpec:
    """Read a `Qwen3MoeForCausalLM`. With `use_sliding_window` all layers slide."""
    config = config.with_defaults(DEFAULTS)
    spec = build_spec(config, "qwen3_moe", read_rope(config))
    attention_bias = config.flag("attention_bias", False)
    window = sliding_window(config) if config.flag("use_sliding_window", False) else 0
    number = "num_local_experts" if "num_local_experts" in config else "num_experts"  # transformers 5, and 4
    experts = read_experts(
        config.with_defaults({number: 128}),
        number,
        "moe_intermediate_size",
        normalized=config.flag("norm_topk_prob", False),
        layers=layers_with_experts(config),
    )
    return replace(
        spec,
        windows=(window,) * spec.num_layers,
        qk_norm=True,
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        experts=experts,
    )


def layers_with_experts(config: ConfigTable) -> tuple[bool, ...]:
    """Return which layers have experts: each `decoder_sparse_step`-th, without those in `mlp_only_layers`."""
    layers = num_layers(config)
    step = config.integer("decoder_sparse_step", 1, 1 << 30, 1)
    dense = config.values.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(layer) is int for layer in dense):
        raise config.refused("mlp_only_layers", "a list of layer numbers")
    return tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(layers))


QWEN3_MOE = Family(
    ("Qwen3MoeForCausalLM",),
    ("qwen3_moe",),
    read_qwen3_moe,
    GGUFFormat(
        "qwen3moe",
        KEYS | EXPERT_KEYS | {"moe_intermediate_size": "expert_feed_forward_length"},
        experts=True,
        derive=lambda config: {"norm_topk_prob": True},
    ),
)
