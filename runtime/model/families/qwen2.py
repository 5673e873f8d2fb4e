"""Qwen2 and Qwen2.5: biases on q, k and v but not on o; upper layers may slide."""

from __future__ import annotations

from ..config_json import ConfigTable, build_spec, qwen_windows
from ..spec import DecoderSpec


def read_qwen2(config: ConfigTable) -> DecoderSpec:
    """Read a `Qwen2ForCausalLM`."""
    return build_spec(config, family="qwen2", windows=qwen_windows(config), qkv_bias=True)
