"""Granite 3: Llama with a multiplier on embeddings, scores, the output of attention and MLP, and logits."""

from __future__ import annotations

from dataclasses import replace

from ..config_json import ConfigTable, build_spec
from ..config_rope import read_rope
from ..spec import DecoderSpec
from .family import Family


def read_granite(config: ConfigTable) -> DecoderSpec:
    """Read a `GraniteForCausalLM`."""
    config = config.with_defaults({"eos_token_id": 2})
    attention_bias = config.flag("attention_bias", False)
    return replace(
        build_spec(config, "granite", read_rope(config)),
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        mlp_bias=config.flag("mlp_bias", False),
        embedding_scale=config.positive("embedding_multiplier", 1.0),
        attention_scale=config.positive("attention_multiplier", 1.0),
        residual_scale=config.positive("residual_multiplier", 1.0),
        logits_scale=1 / config.positive("logits_scaling", 1.0),
    )


GRANITE = Family(("GraniteForCausalLM",), ("granite",), read_granite)
