"""ERNIE 4.5: Llama with interleaved RoPE and biases by `use_bias`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..config_json import ConfigTable, build_spec
from ..config_rope import read_rope
from ..gguf_config import GGUFFormat
from ..spec import DecoderSpec
from .family import Family

DEFAULTS: dict[str, Any] = {
    "eos_token_id": 2,
    "head_dim": 128,
    "max_position_embeddings": 131_072,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "tie_word_embeddings": True,
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


ERNIE4_5 = Family(
    ("Ernie4_5ForCausalLM",),
    ("ernie4_5",),
    read_ernie4_5,
    GGUFFormat("ernie4_5", neighboring_pairs=True),
    neighboring_pairs=True,
)
