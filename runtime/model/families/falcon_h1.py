"""Falcon-H1: a Mamba-2 mixer beside attention in each layer, and multipliers of most parts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..config_json import ConfigTable, build_spec, num_layers
from ..config_rope import read_rope
from ..gguf_config import KEYS, GGUFFormat
from ..spec import DecoderSpec, Mamba, TensorNames
from .family import Family
from .mamba import MAMBA_DEFAULTS, MAMBA_KEYS, read_mamba

NAMES = TensorNames(
    mlp_norm="pre_ff_layernorm",
    gate_up=("feed_forward.gate_proj", "feed_forward.up_proj"),
    down="feed_forward.down_proj",
    final_norm="model.final_layernorm",
)
DEFAULTS: dict[str, Any] = {
    **MAMBA_DEFAULTS,
    "vocab_size": 128_000,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 8192,
    "mamba_d_ssm": 1024,
    "mamba_norm_before_gate": True,
    "mamba_rms_norm": False,
    "eos_token_id": 2,
}


def read_falcon_h1(config: ConfigTable) -> DecoderSpec:
    """Read a `FalconH1ForCausalLM`."""
    config = config.with_defaults(DEFAULTS)
    spec = build_spec(config, "falcon_h1", read_rope(config))
    attention_bias = config.flag("attention_bias", False)
    gate_scale, mlp_out_scale = _multipliers(config, "mlp_multipliers", 2)
    return replace(
        spec,
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        mlp_bias=config.flag("mlp_bias", False),
        attention_scale=spec.attention_scale * config.positive("key_multiplier", 1.0),
        attention_in_scale=config.positive("attention_in_multiplier", 1.0),
        attention_out_scale=config.positive("attention_out_multiplier", 1.0),
        gate_scale=gate_scale,
        mlp_out_scale=mlp_out_scale,
        embedding_scale=config.positive("embedding_multiplier", 1.0),
        logits_scale=config.positive("lm_head_multiplier", 1.0),
        mamba=_read_mixer(config),
        names=NAMES,
    )


def _read_mixer(config: ConfigTable) -> Mamba:
    return replace(
        read_mamba(config, (True,) * num_layers(config)),
        beside_attention=True,
        out_bias=config.flag("projectors_bias", False),
        norm=config.flag("mamba_rms_norm", False),
        gate_first=not config.flag("mamba_norm_before_gate", True),
        input_scale=config.positive("ssm_in_multiplier", 1.0),
        scales=_multipliers(config, "ssm_multipliers", 5),
        output_scale=config.positive("ssm_out_multiplier", 1.0),
    )


def _multipliers(config: ConfigTable, key: str, count: int) -> tuple[float, ...]:
    return config.numbers(key, count) if key in config else (1.0,) * count


def _derive(config: ConfigTable) -> Mapping[str, Any]:
    """Return the keys that files do not have: the converter multiplies the weights by the multipliers."""
    return {"mamba_norm_before_gate": False}


FALCON_H1 = Family(
    ("FalconH1ForCausalLM",),
    ("falcon_h1",),
    read_falcon_h1,
    GGUFFormat("falcon-h1", KEYS | MAMBA_KEYS, derive=_derive, bare=("ffn_norm",)),
)
