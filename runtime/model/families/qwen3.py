"""Qwen3: query and key heads are normed before rotation; `head_dim` is 128 where config.json does not have it."""

from __future__ import annotations

from dataclasses import replace

from ..config_json import ConfigTable, build_spec, qwen_windows
from ..config_rope import read_rope
from ..gguf_config import GGUFFormat
from ..spec import DecoderSpec
from .family import Family


def read_qwen3(config: ConfigTable) -> DecoderSpec:
    """Read a `Qwen3ForCausalLM`."""
    config = config.with_defaults({"head_dim": 128, "sliding_window": 4096})
    attention_bias = config.flag("attention_bias", False)
    return replace(
        build_spec(config, "qwen3", read_rope(config)),
        windows=qwen_windows(config),
        qk_norm=True,
        qkv_bias=attention_bias,
        o_bias=attention_bias,
    )


QWEN3 = Family(("Qwen3ForCausalLM",), ("qwen3",), read_qwen3, GGUFFormat("qwen3"))
