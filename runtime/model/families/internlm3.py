"""InternLM 3: Llama with biases by `qkv_bias` and `bias`, or by transformers' names of these keys."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..config_json import ConfigTable, build_spec
from ..config_rope import rope_of, shared_rope_table
from ..spec import DecoderSpec, Rope
from .family import Family

DEFAULTS: dict[str, Any] = {
    "eos_token_id": 2,
    "head_dim": 128,
    "max_position_embeddings": 32_768,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
}


def read_internlm3(config: ConfigTable) -> DecoderSpec:
    """Read an `InternLM3ForCausalLM`."""
    config = config.with_defaults(DEFAULTS)
    bias = config.flag("bias", config.flag("mlp_bias", False))
    return replace(
        build_spec(config, "internlm3", _read_rope(config)),
        qkv_bias=config.flag("qkv_bias", config.flag("attention_bias", False)),
        o_bias=bias,
        mlp_bias=bias,
    )


def _read_rope(config: ConfigTable) -> Rope:
    """Read the rotary embedding. Type `dynamic` changes nothing below `max_position_embeddings`, the limit of texts."""
    table = shared_rope_table(config)
    if table.text("rope_type", table.text("type", "default")) == "dynamic":
        table = ConfigTable({**table.values, "rope_type": "default"}, table.where, table.source, table.names)
    return rope_of(config, table)


INTERNLM3 = Family(("InternLM3ForCausalLM",), ("internlm3",), read_internlm3)
