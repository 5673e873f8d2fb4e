"""Qwen2.5-VL: Qwen2 with positions in time, height and width, after a vision tower that `model/vision/` reads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..config_json import ConfigTable, build_spec, qwen_windows
from ..config_rope import read_mrope
from ..spec import DecoderSpec
from .family import Family

DEFAULTS: dict[str, Any] = {  # defaults of transformers' config class; checkpoints leave out keys with default values
    "vocab_size": 152_064,
    "hidden_size": 8192,
    "intermediate_size": 29_568,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 32_768,
    "max_window_layers": 80,
    "sliding_window": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1_000_000.0,
    "eos_token_id": 151_645,
}


def read_qwen2_5_vl(config: ConfigTable) -> DecoderSpec:
    """Read the text part of a `Qwen2_5_VLForConditionalGeneration`: in `text_config`, or at the top as on the Hub."""
    shared = {key: config.values[key] for key in ("eos_token_id",) if key in config}
    text = (config.table("text_config") if "text_config" in config else config).with_defaults(DEFAULTS | shared)
    return replace(
        build_spec(text, "qwen2_5_vl", read_mrope(text, interleaved=False)),
        windows=qwen_windows(text),
        qkv_bias=True,
        tie_embeddings=config.flag("tie_word_embeddings", text.flag("tie_word_embeddings", False)),
    )


QWEN2_5_VL = Family(("Qwen2_5_VLForConditionalGeneration",), ("qwen2_5_vl",), read_qwen2_5_vl)
