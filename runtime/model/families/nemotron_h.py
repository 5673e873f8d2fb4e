"""Nemotron-H and Nemotron 3 Nano: each layer is a Mamba-2 mixer, attention, an MLP with squared ReLU, or experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from ..config_json import (
    MAX_HEADS,
    MAX_LAYERS,
    MAX_WIDTH,
    ConfigTable,
    build_spec,
    num_layers,
    read_experts_in_groups,
)
from ..gguf_config import GGUF_NAMES, KEYS, NEXT_TOKENS, SIGMOID, GGUFFormat, read_kv_heads
from ..spec import DecoderSpec, Experts, Mamba, Rope, TensorNames
from .family import Family
from .mamba import MAX_INNER, MAX_STATE, MAX_TAPS, read_time_limits

MAX_MAMBA_HEAD = MAX_INNER // MAX_HEADS
NAMES = TensorNames(
    embedding="backbone.embeddings",
    layer="backbone.layers.{}.",
    input_norm="norm",
    qkv=("mixer.q_proj", "mixer.k_proj", "mixer.v_proj"),
    o="mixer.o_proj",
    mamba_in="mixer.in_proj",
    mamba_conv="mixer.conv1d",
    mamba_a="mixer.A_log",
    mamba_time_bias="mixer.dt_bias",
    mamba_skip="mixer.D",
    mamba_norm="mixer.norm",
    mamba_out="mixer.out_proj",
    mlp_norm="norm",
    gate_up=("mixer.up_proj",),
    down="mixer.down_proj",
    router="mixer.gate",
    choice_bias="mixer.gate.e_score_correction_bias",
    expert_gate_up=("mixer.experts.{}.up_proj",),
    expert_down="mixer.experts.{}.down_proj",
    shared_gate_up=("mixer.shared_experts.up_proj",),
    shared_down="mixer.shared_experts.down_proj",
    final_norm="backbone.norm_f",
)
NEMOTRON_GGUF_NAMES = replace(
    GGUF_NAMES,
    mlp_norm="attn_norm",
    gate_up=("ffn_up",),
    expert_gate_up=("ffn_up_exps",),
    shared_gate_up=("ffn_up_shexp",),
)
BLOCK_KINDS = {  # the characters of hybrid_override_pattern, and the names of transformers 4 and 5
    "M": "mamba",
    "mamba": "mamba",
    "linear_attention": "mamba",
    "*": "attention",
    "attention": "attention",
    "full_attention": "attention",
    "-": "mlp",
    "mlp": "mlp",
    "E": "experts",
    "moe": "experts",
}
DEFAULTS: dict[str, Any] = {  # defaults of transformers' config class
    "vocab_size": 131_072,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "intermediate_size": 21_504,
    "mlp_hidden_act": "relu2",
    "mamba_hidden_act": "silu",
    "ssm_state_size": 128,
    "mamba_num_heads": 128,
    "mamba_head_dim": 64,
    "n_groups": 8,
    "conv_kernel": 4,
    "use_conv_bias": True,
    "n_routed_experts": 8,
    "moe_intermediate_size": 7688,
    "moe_shared_expert_intermediate_size": 7688,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "layer_norm_epsilon": 1e-5,
    "eos_token_id": 2,
}


def read_nemotron_h(config: ConfigTable) -> DecoderSpec:
    """Read a `NemotronHForCausalLM`."""
    config = config.with_defaults(DEFAULTS)
    kinds = _read_kinds(config)
    counted = {**config.values, "num_hidden_layers": len(kinds), "rms_norm_eps": config.values["layer_norm_epsilon"]}
    config = ConfigTable(counted, config.where, config.source, {"rms_norm_eps": "layer_norm_epsilon", **config.names})
    if config.text("mlp_hidden_act") != "relu2":
        raise config.refused("mlp_hidden_act", '"relu2"')
    if config.flag("attention_bias", False):
        raise config.refused("attention_bias", "absent or false: transformers has no such bias")
    experts = _read_experts(config, tuple(kind == "experts" for kind in kinds)) if "experts" in kinds else None
    spec = build_spec(config, "nemotron_h" if experts is None else "nemotron_h_moe", Rope(10_000.0))
    return replace(
        spec,
        intermediate_size=spec.intermediate_size if experts is None or "mlp" in kinds else experts.intermediate_size,
        ropes=(None,) * len(kinds),
        activation="relu_squared",
        mlp_bias=config.flag("mlp_bias", False),
        mlp_layers=tuple(kind in ("mlp", "experts") for kind in kinds),
        mamba=_read_mixer(config, tuple(kind == "mamba" for kind in kinds)) if "mamba" in kinds else None,
        experts=experts,
        names=NAMES,
    )


def _read_kinds(config: ConfigTable) -> tuple[str, ...]:
    """Return for each layer mamba, attention, mlp or experts; at least one has attention."""
    keys = ("layers_block_type", "layer_types", "hybrid_override_pattern")
    key = next((key for key in keys if key in config), keys[0])
    kinds: Any = config.values.get(key)
    known = isinstance(kinds, (list, str)) and all(isinstance(kind, str) and kind in BLOCK_KINDS for kind in kinds)
    if not known or not 1 <= len(kinds) <= MAX_LAYERS:
        raise config.refused(key, f"1 to {MAX_LAYERS} times {', '.join(BLOCK_KINDS)}")
    found = tuple(BLOCK_KINDS[kind] for kind in kinds)
    if "attention" not in found:
        raise config.refused(key, "attention for one layer or more")
    return found


def _read_mixer(config: ConfigTable, layers: tuple[bool, ...]) -> Mamba:
    """Read the mixers. transformers limits time steps to `time_step_min` in prompts only; other readers do not."""
    if config.text("mamba_hidden_act") != "silu":
        raise config.refused("mamba_hidden_act", '"silu"')
    num_heads = config.integer("mamba_num_heads", 1, MAX_HEADS)
    num_groups = config.integer("n_groups", 1, num_heads)
    if num_heads % num_groups:
        raise config.refused("n_groups", f"a divisor of mamba_num_heads ({num_heads})")
    bias = config.flag("use_bias", False)
    return Mamba(
        num_heads=num_heads,
        head_dim=config.integer("mamba_head_dim", 1, MAX_MAMBA_HEAD),
        num_groups=num_groups,
        state_size=config.integer("ssm_state_size", 1, MAX_STATE),
        taps=config.integer("conv_kernel", 1, MAX_TAPS),
        layers=layers,
        conv_bias=config.flag("use_conv_bias", True),
        in_bias=bias,
        out_bias=bias,
        time_limits=read_time_limits(config, "time_step_limit"),
    )


def _read_experts(config: ConfigTable, layers: tuple[bool, ...]) -> Experts:
    """Read the experts, and the one that computes every token."""
    if "moe_latent_size" in config:
        raise config.refused("moe_latent_size", "absent or null: experts read rows of hidden_size")
    experts = read_experts_in_groups(config, layers)
    return replace(experts, shared_size=config.integer("moe_shared_expert_intermediate_size", 1, MAX_WIDTH))


def _derive(block: str, config: ConfigTable) -> Mapping[str, Any]:
    """Return the keys that files have in another form: layers without KV heads are no attention, but a `block`.

    Layers that predict further tokens are the last ones, and are not read.
    """
    if config.values["gating_func"] not in (None, SIGMOID):
        raise config.refused("gating_func", f"absent or {SIGMOID}, the sigmoid")
    layers = num_layers(config)
    layers -= config.integer("next_tokens", 0, layers - 1, 0)
    heads, sizes = (
        value[:layers] if isinstance(value, list) else value
        for value in (config.values["num_key_value_heads"], config.values["intermediate_size"])
    )
    own = {**config.values, "num_hidden_layers": layers, "num_key_value_heads": heads}
    num_kv_heads, has_attention = read_kv_heads(ConfigTable(own, config.where, config.source, config.names))
    each = sizes if isinstance(sizes, list) else [sizes or 0] * layers
    if len(each) != layers or any(type(size) is not int or not 0 <= size <= MAX_WIDTH for size in each):
        raise config.refused("intermediate_size", f"a number, or one for each of {layers} layers")
    if len(set(each) - {0}) > 1:
        raise config.refused("intermediate_size", "the same number in all layers with an MLP, 0 in the others")
    kinds = [
        "attention" if attends else block if size else "mamba"
        for attends, size in zip(has_attention, each, strict=True)
    ]
    inner, heads = config.integer("inner_size", 1, MAX_INNER), config.integer("mamba_num_heads", 1, MAX_HEADS)
    if inner % heads:
        raise config.refused("inner_size", f"a multiple of the {heads} heads")
    return {
        "num_hidden_layers": layers,
        "num_key_value_heads": num_kv_heads,
        "layers_block_type": kinds,
        "intermediate_size": max(each) or 1,
        "layer_norm_epsilon": config.values["rms_norm_eps"],
        "mamba_head_dim": inner // heads,
        "mlp_hidden_act": "relu2",
        "mamba_hidden_act": "silu",
        "use_conv_bias": config.values["mamba_conv_bias"],
        "norm_topk_prob": True if config.values["norm_topk_prob"] is None else config.values["norm_topk_prob"],
    }


MAMBA_KEYS = {
    "conv_kernel": "ssm.conv_kernel",
    "inner_size": "ssm.inner_size",
    "ssm_state_size": "ssm.state_size",
    "mamba_num_heads": "ssm.time_step_rank",
    "n_groups": "ssm.group_count",
}
NEMOTRON_EXPERT_KEYS = {
    "n_routed_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "moe_shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "norm_topk_prob": "expert_weights_norm",
    "routed_scaling_factor": "expert_weights_scale",
    "moe_latent_size": "moe_latent_size",
    "gating_func": "expert_gating_func",
    "next_tokens": NEXT_TOKENS,
}


def _gguf(architecture: str) -> GGUFFormat:
    return GGUFFormat(
        architecture,
        KEYS | MAMBA_KEYS | NEMOTRON_EXPERT_KEYS,
        NEMOTRON_GGUF_NAMES,
        neighboring_pairs=True,
        rotates=False,
        derive=partial(_derive, "moe" if architecture == "nemotron_h_moe" else "mlp"),
    )


NEMOTRON_H = Family(("NemotronHForCausalLM",), ("nemotron_h",), read_nemotron_h, _gguf("nemotron_h"))
NEMOTRON_H_MOE = replace(NEMOTRON_H, gguf=_gguf("nemotron_h_moe"))
