"""Granite 3: Llama with a multiplier on embeddings, scores, the output of attention and MLP, and logits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ..config_json import ConfigTable, build_spec, read_head_dim
from ..config_rope import read_rope
from ..gguf_config import KEYS, GGUFFormat
from ..spec import DecoderSpec
from .family import Family

GGUF_KEYS = {
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
    "rotates": "rope.scaling.finetuned",
}


def read_granite(config: ConfigTable) -> DecoderSpec:
    """Read a `GraniteForCausalLM`."""
    config = config.with_defaults({"eos_token_id": 2})
    attention_bias = config.flag("attention_bias", False)
    return replace(
        with_multipliers(config, build_spec(config, "granite", read_rope(config))),
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        mlp_bias=config.flag("mlp_bias", False),
    )


def with_multipliers(config: ConfigTable, spec: DecoderSpec) -> DecoderSpec:
    """Return `spec` with Granite's multipliers."""
    return replace(
        spec,
        embedding_scale=config.positive("embedding_multiplier", 1.0),
        attention_scale=config.positive("attention_multiplier", 1.0),
        residual_scale=config.positive("residual_multiplier", 1.0),
        logits_scale=1 / config.positive("logits_scaling", 1.0),
    )


def derive_scale(config: ConfigTable) -> Mapping[str, float]:
    """Return the value of a file's missing scale of scores. Granite's files without rotary embedding are refused."""
    if not config.flag("rotates", True):
        raise config.refused("rotates", "absent or true: heads are rotated")
    return {"attention_multiplier": config.positive("attention_multiplier", read_head_dim(config) ** -0.5)}


GRANITE = Family(
    ("GraniteForCausalLM",),
    ("granite",),
    read_granite,
    GGUFFormat("granite", KEYS | GGUF_KEYS, neighboring_pairs=True, derive=derive_scale),
)
