"""Qwen3-Next: gated delta nets in three of four layers, attention with gates of heads in the others.

A layer has many small experts, and one that computes every token, whose result is multiplied by the sigmoid of a logit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..config_json import MAX_HEAD_DIM, MAX_HEADS, MAX_LAYERS, MAX_WIDTH, ConfigTable, build_spec, num_layers
from ..config_json import read_experts as read_routed_experts
from ..config_rope import read_rope
from ..gguf_config import EXPERT_KEYS, GGUF_NAMES, KEYS, NEXT_TOKENS, GGUFFormat
from ..spec import DecoderSpec, Experts, GatedDelta, Rope, TensorNames
from .family import Family
from .qwen3_moe import layers_with_experts

MAX_TAPS = 16  # QUIRE_MAX_TAPS of the kernels
MAX_KEY_DIM = 256  # QUIRE_MAX_KEY of the kernels
HYBRID_DEFAULTS: dict[str, Any] = {  # defaults of the config classes of Qwen3-Next and Qwen3.5
    "head_dim": 256,
    "hidden_act": "silu",
    "max_position_embeddings": 32_768,
    "partial_rotary_factor": 0.25,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
EXPERT_DEFAULTS: dict[str, Any] = {
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}
DEFAULTS: dict[str, Any] = {
    **HYBRID_DEFAULTS,
    **EXPERT_DEFAULTS,
    "vocab_size": 151_936,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "num_experts": 512,
    "num_experts_per_tok": 10,
}
NAMES = TensorNames(
    delta_qkv=("linear_attn.in_proj_qkvz",),
    delta_rates=("linear_attn.in_proj_ba",),
    delta_by_key_head=True,
)


def read_qwen3_next(config: ConfigTable) -> DecoderSpec:
    """Read a `Qwen3NextForCausalLM`."""
    config = config.with_defaults(DEFAULTS)
    experts = read_experts(config, normalized=config.flag("norm_topk_prob", True), layers=layers_with_experts(config))
    spec = read_hybrid(config, "qwen3_next", read_rope(config, partial=True))
    return replace(spec, experts=experts if any(experts.layers) else None, names=NAMES)


def read_hybrid(config: ConfigTable, family: str, rope: Rope) -> DecoderSpec:
    """Read the keys that Qwen3-Next and Qwen3.5 share, with a table that has their defaults."""
    spec = build_spec(config, family, rope)
    attention_bias = config.flag("attention_bias", False)
    is_linear = read_linear_layers(config)
    return replace(
        spec,
        ropes=tuple(None if linear else rope for linear in is_linear),
        qk_norm=True,
        gated_heads=True,
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        norm_offset=1.0,
        delta=read_delta(config, is_linear, spec.norm_eps),
    )


def read_linear_layers(config: ConfigTable) -> tuple[bool, ...]:
    """Return for each layer whether it has linear attention; at least one has full attention."""
    layers = num_layers(config)
    if "layer_types" not in config:
        interval = config.integer("full_attention_interval", 1, MAX_LAYERS, 4)
        types = ["linear_attention" if (layer + 1) % interval else "full_attention" for layer in range(layers)]
    else:
        types = config.values["layer_types"]
    known = ("linear_attention", "full_attention")
    if not isinstance(types, list) or len(types) != layers or any(kind not in known for kind in types):
        raise config.refused("layer_types", f"{layers} times linear_attention or full_attention")
    if "full_attention" not in types:
        key = "layer_types" if "layer_types" in config else "num_hidden_layers"
        raise config.refused(key, "such that one layer or more has full_attention")
    return tuple(kind == "linear_attention" for kind in types)


def read_delta(config: ConfigTable, layers: tuple[bool, ...], norm_eps: float) -> GatedDelta | None:
    """Read the gated delta nets of `layers`; None if no layer has one."""
    if not any(layers):
        return None
    if config.text("hidden_act", "silu") != "silu":
        raise config.refused("hidden_act", '"silu", which follows the convolution')
    num_key_heads = config.integer("linear_num_key_heads", 1, MAX_HEADS)
    num_value_heads = config.integer("linear_num_value_heads", 1, MAX_HEADS)
    if num_value_heads % num_key_heads:
        raise config.refused("linear_num_value_heads", f"a multiple of linear_num_key_heads ({num_key_heads})")
    return GatedDelta(
        num_key_heads=num_key_heads,
        num_value_heads=num_value_heads,
        key_dim=config.integer("linear_key_head_dim", 1, MAX_KEY_DIM),
        value_dim=config.integer("linear_value_head_dim", 1, MAX_HEAD_DIM),
        taps=config.integer("linear_conv_kernel_dim", 1, MAX_TAPS),
        norm_eps=norm_eps,
        layers=layers,
    )


def read_experts(config: ConfigTable, *, normalized: bool, layers: tuple[bool, ...] | None = None) -> Experts:
    """Read a mixture of experts with one more expert that computes every token."""
    number = "num_local_experts" if "num_local_experts" in config else "num_experts"  # transformers 5, and 4
    experts = read_routed_experts(config, number, "moe_intermediate_size", normalized=normalized, layers=layers)
    shared_size = config.integer("shared_expert_intermediate_size", 1, MAX_WIDTH)
    return replace(experts, shared_size=shared_size, shared_gate=True)


def read_hybrid_head(config: ConfigTable, spec: DecoderSpec) -> DecoderSpec:
    """Read the head that Qwen3-Next and Qwen3.5 share: a layer like the model's layers with full attention."""
    if config.integer("mtp_num_hidden_layers", 0, MAX_LAYERS, 1) != 1:
        raise config.refused("mtp_num_hidden_layers", "1 for draft_model mtp: a head of one layer")
    if config.flag("mtp_use_dedicated_embeddings", False):
        raise config.refused("mtp_use_dedicated_embeddings", "false: a head has the embedding of its model")
    return replace(
        spec,
        num_layers=1,
        ropes=(spec.ropes[spec.kv_layers[-1]],),
        windows=(0,),
        delta=None,
        experts=None if spec.experts is None else replace(spec.experts, layers=(True,)),
        names=replace(spec.names, layer="mtp.layers.{}.", final_norm="mtp.norm"),
        quantized={},
        input_orders={},
        head_of=spec,
    )


def derive_hybrid(config: ConfigTable) -> Mapping[str, Any]:
    """Return the keys that files have in another form: the kinds of layers, and the sizes of values and MLPs."""
    layers = num_layers(config)
    layers -= config.integer("next_tokens", 0, layers - 1, 0)
    heads = config.integer("linear_num_value_heads", 1, MAX_HEADS)
    inner = config.integer("linear_inner_size", 1, MAX_WIDTH)
    if inner % heads:
        raise config.refused("linear_inner_size", f"a multiple of the {heads} value heads")
    derived = {
        "num_hidden_layers": layers,
        "linear_value_head_dim": inner // heads,
        "norm_topk_prob": True,
        "intermediate_size": config.values["intermediate_size"] or config.values.get("moe_intermediate_size"),
    }
    recurrent = config.values["recurrent_layers"]
    if recurrent is None:
        return derived
    if not isinstance(recurrent, list) or len(recurrent) < layers or any(type(each) is not bool for each in recurrent):
        raise config.refused("recurrent_layers", f"true or false for each of {layers} layers")
    kinds = ["linear_attention" if each else "full_attention" for each in recurrent[:layers]]
    return derived | {"layer_types": kinds}


HYBRID_KEYS: dict[str, str] = KEYS | {
    "partial_rotary_factor": "rope.dimension_count",
    "mrope_section": "rope.dimension_sections",
    "linear_conv_kernel_dim": "ssm.conv_kernel",
    "linear_key_head_dim": "ssm.state_size",
    "linear_num_key_heads": "ssm.group_count",
    "linear_num_value_heads": "ssm.time_step_rank",
    "linear_inner_size": "ssm.inner_size",
    "full_attention_interval": "full_attention_interval",
    "recurrent_layers": "attention.recurrent_layers",
    "next_tokens": NEXT_TOKENS,
}
HYBRID_EXPERT_KEYS = EXPERT_KEYS | {
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
}
HYBRID_GGUF_NAMES = replace(
    GGUF_NAMES,
    delta_qkv=("attn_qkv",),
    delta_gate="attn_gate",
    delta_rates=("ssm_beta", "ssm_alpha"),
    delta_conv=("ssm_conv1d",),
    delta_conv_shape=(),
    delta_a="ssm_a",
    delta_a_is_log=False,
    delta_bias="ssm_dt.bias",
    delta_norm="ssm_norm",
    delta_out="ssm_out",
    mlp_norm="post_attention_norm",
)
NEXT_GGUF_NAMES = replace(HYBRID_GGUF_NAMES, delta_rates=("ssm_ba",))
QWEN3_NEXT = Family(
    ("Qwen3NextForCausalLM",),
    ("qwen3_next",),
    read_qwen3_next,
    GGUFFormat("qwen3next", HYBRID_KEYS | HYBRID_EXPERT_KEYS, NEXT_GGUF_NAMES, experts=True, derive=derive_hybrid),
    head=lambda config, spec: read_hybrid_head(config.with_defaults(DEFAULTS), spec),
)
