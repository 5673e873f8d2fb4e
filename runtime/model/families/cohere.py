"""Cohere, as Command R and Aya: LayerNorm without bias, attention and MLP beside each other, and interleaved RoPE.

Command R+ also has LayerNorms of query and key heads, each head with weights of its own.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..config_json import ConfigTable, build_spec
from ..config_rope import read_rope
from ..gguf_config import LAYER_NORM_KEYS, GGUFFormat
from ..spec import DecoderSpec
from .family import Family

DEFAULTS: dict[str, Any] = {
    "eos_token_id": 255_001,
    "layer_norm_eps": 1e-5,
    "logit_scale": 0.0625,
    "max_position_embeddings": 8192,
    "rope_theta": 500_000.0,
    "tie_word_embeddings": True,
}


def read_cohere(config: ConfigTable) -> DecoderSpec:
    """Read a `CohereForCausalLM`."""
    config = config.with_defaults(DEFAULTS)
    return replace(
        with_layer_norm(config, build_spec(config, "cohere", read_rope(config))),
        qk_norm=config.flag("use_qk_norm", False),
        qk_norm_kind="layer",
    )


def with_layer_norm(config: ConfigTable, spec: DecoderSpec) -> DecoderSpec:
    """Return `spec` with the parts that all models of Cohere have."""
    bias = config.flag("attention_bias", False)
    return replace(
        spec,
        norm_kind="layer",
        norm_eps=config.positive("layer_norm_eps"),
        parallel=True,
        qkv_bias=bias,
        o_bias=bias,
        logits_scale=config.positive("logit_scale", 1.0),
    )


COHERE = Family(
    ("CohereForCausalLM",),
    ("cohere",),
    read_cohere,
    GGUFFormat(
        "command-r",
        LAYER_NORM_KEYS | {"logit_scale": "logit_scale"},
        neighboring_pairs=True,
        derive=lambda config: {"use_qk_norm": config.flag("qk_norm", False)},
    ),
    neighboring_pairs=True,
)
