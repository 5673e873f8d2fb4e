"""Seed-OSS: Llama with heads of 128 elements, biases on queries, keys and values, and a bias of its own for their
output.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..config_json import ConfigTable, build_spec
from ..config_rope import read_rope
from ..gguf_config import GGUF_NAMES, GGUFFormat
from ..spec import DecoderSpec
from .family import Family

DEFAULTS: dict[str, Any] = {
    "attention_bias": True,
    "eos_token_id": 2,
    "head_dim": 128,
    "max_position_embeddings": 524_288,
    "num_key_value_heads": 8,
}


def read_seed_oss(config: ConfigTable) -> DecoderSpec:
    """Read a `SeedOssForCausalLM`."""
    config = config.with_defaults(DEFAULTS)
    return replace(
        build_spec(config, "seed_oss", read_rope(config)),
        qkv_bias=config.flag("attention_bias", False),
        o_bias=config.flag("attention_out_bias", False),
        mlp_bias=config.flag("mlp_bias", False),
    )


SEED_OSS = Family(
    ("SeedOssForCausalLM",),
    ("seed_oss",),
    read_seed_oss,
    GGUFFormat("seed_oss", names=replace(GGUF_NAMES, mlp_norm="post_attention_norm")),
)
