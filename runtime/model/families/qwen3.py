"""Qwen3: query and key heads are normed before rotation; `head_dim` is 128 where config.json does not have it."""

from __future__ import annotations

from ..config_json import ConfigTable, build_spec, qwen_windows
from ..spec import DecoderSpec


def read_qwen3(config: ConfigTable) -> DecoderSpec:
    """Read a `Qwen3ForCausalLM`."""
    attention_bias = config.flag("attention_bias", False)
    return build_spec(
        config,
        family="qwen3",
        windows=qwen_windows(config),
        qk_norm=True,
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        default_head_dim=128,
    )
