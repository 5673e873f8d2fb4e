"""gpt-oss: experts with biases and a clamped activation in every layer, sinks, and windows in every other layer.

A folder has the experts of a layer in one tensor, in MXFP4 or transposed (`weights/stacked_experts.py`); a GGUF file
has one tensor for the gates of all experts, one for up and one for down.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..config_json import (
    MAX_POSITIONS,
    ConfigTable,
    build_spec,
    num_layers,
    read_experts,
    sliding_window,
    windows_by_type,
)
from ..config_rope import read_rope
from ..gguf_config import EXPERT_KEYS, GGUF_NAMES, KEYS, GGUFFormat
from ..spec import DecoderSpec, TensorNames
from ..weights.stacked_experts import StackedExperts
from .family import Family

NAMES = TensorNames(
    router="mlp.router",
    expert_gate_up=("mlp.experts.gate_up_proj",),
    expert_down="mlp.experts.down_proj",
)
YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
DEFAULTS: dict[str, Any] = {  # defaults of transformers' config class
    "head_dim": 64,
    "num_key_value_heads": 8,
    "sliding_window": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150_000.0,
    "max_position_embeddings": 131_072,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
}
MXFP4 = "mxfp4"  # quant_method of checkpoints whose experts are in MXFP4
CLAMP_LIMIT = 7.0  # limit of the gate and of up, in the kernels


def read_gpt_oss(config: ConfigTable) -> DecoderSpec:
    """Read a `GptOssForCausalLM`."""
    config = config.with_defaults(DEFAULTS)
    if "rope_parameters" not in config and not config.values.get("rope_scaling"):
        config = ConfigTable({**config.values, "rope_parameters": YARN}, config.where, config.source, config.names)
    if config.positive("swiglu_limit", CLAMP_LIMIT) != CLAMP_LIMIT:
        raise config.refused("swiglu_limit", f"absent or {CLAMP_LIMIT:g}")
    in_blocks = _experts_are_in_blocks(config)
    if config.text("hidden_act", "silu") != "silu":
        raise config.refused("hidden_act", '"silu"')
    spec = build_spec(config, "gpt_oss", read_rope(config))
    bias = config.flag("attention_bias", True)
    experts = read_experts(config, "num_local_experts", "intermediate_size", normalized=True)
    return replace(
        spec,
        windows=_windows(config),
        qkv_bias=bias,
        o_bias=bias,
        sinks=True,
        activation="clamped_silu",
        experts=replace(experts, bias=True),
        names=NAMES,
        quantized=_tensors_in_blocks(spec.num_layers) if in_blocks else {},
    )


def _windows(config: ConfigTable) -> tuple[int, ...]:
    """Return the windows of `layer_types`; without it, the first layer and every second one after it slide."""
    layers = num_layers(config)
    window = sliding_window(config)
    if "layer_types" in config:
        return windows_by_type(config, layers, window)
    return tuple(0 if layer % 2 else window for layer in range(layers))


def _experts_are_in_blocks(config: ConfigTable) -> bool:
    """Return whether the experts are in MXFP4; other quantized checkpoints are refused."""
    quantized = config.table("quantization_config")
    if not quantized.values:
        return False
    if quantized.text("quant_method") != MXFP4:
        raise quantized.refused("quant_method", f'"{MXFP4}", as in the checkpoints of gpt-oss')
    return True


def _tensors_in_blocks(num_layers: int) -> dict[str, str]:
    names = (*NAMES.expert_gate_up, NAMES.expert_down)
    return {f"{NAMES.layer.format(layer)}{name}.weight": "MXFP4" for layer in range(num_layers) for name in names}


def _derive(config: ConfigTable) -> dict[str, Any]:
    """Return keys that GGUF files lack: every second layer slides, and YaRN does not round its dimensions."""
    if config.values.get("sliding_window_pattern") not in (None, 2):
        raise config.refused("sliding_window_pattern", "absent or 2")
    if "rope_local_base_freq" in config:
        raise config.refused("rope_local_base_freq", "absent: all layers have one rotary embedding")
    config.integer("sliding_window", 1, MAX_POSITIONS)
    scaling = config.table("rope_scaling").values
    if not scaling:
        return {"rope_parameters": {"rope_type": "default"}}
    return {"rope_scaling": {**scaling, "truncate": False}}


GGUF = GGUFFormat(
    "gpt-oss",
    KEYS
    | EXPERT_KEYS
    | {
        "intermediate_size": "expert_feed_forward_length",
        "sliding_window": "attention.sliding_window",
        "sliding_window_pattern": "attention.sliding_window_pattern",
        "rope_local_base_freq": "rope.freq_base_swa",
    },
    replace(GGUF_NAMES, mlp_norm="post_attention_norm", sinks="attn_sinks.weight"),
    experts=True,
    derive=_derive,
)
GPT_OSS = Family(("GptOssForCausalLM",), ("gpt_oss",), read_gpt_oss, GGUF, StackedExperts)
