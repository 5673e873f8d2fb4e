"""Qwen2 and Qwen2.5: biases on q, k and v but not on o; upper layers may slide."""

from __future__ import annotations

from dataclasses import replace

from ..config_json import ConfigTable, build_spec, qwen_windows
from ..config_rope import read_rope
from ..gguf_config import GGUFFormat
from ..spec import DecoderSpec
from .family import Family


def read_qwen2(config: ConfigTable) -> DecoderSpec:
    """Read a `Qwen2ForCausalLM`."""
    config = config.with_defaults({"sliding_window": 4096})
    return replace(build_spec(config, "qwen2", read_rope(config)), windows=qwen_windows(config), qkv_bias=True)


QWEN2 = Family(("Qwen2ForCausalLM",), ("qwen2",), read_qwen2, GGUFFormat("qwen2"))
