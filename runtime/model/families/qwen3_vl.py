"""Qwen3-VL: Qwen3 with positions in time, height and width, after a vision tower that `model/vision/` reads.

Its first layers add rows that layers of the tower make (DeepStack).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..config_json import ConfigTable, build_spec, num_layers
from ..config_rope import read_mrope
from ..spec import DecoderSpec
from .family import Family

DEFAULTS: dict[str, Any] = {  # defaults of transformers' config class; checkpoints leave out keys with default values
    "vocab_size": 151_936,
    "hidden_size": 4096,
    "intermediate_size": 22_016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 128,
    "max_position_embeddings": 128_000,
    "rope_theta": 500_000.0,
}
SECTIONS = [24, 20, 20]
DEEPSTACK = [8, 16, 24]


def read_qwen3_vl(config: ConfigTable) -> DecoderSpec:
    """Read the text part of a `Qwen3VLForConditionalGeneration`."""
    shared = {key: config.values[key] for key in ("eos_token_id",) if key in config}
    text = config.table("text_config").with_defaults(DEFAULTS | shared)
    vision = config.table("vision_config")
    levels = vision.values.get("deepstack_visual_indexes", DEEPSTACK)
    if not isinstance(levels, list) or len(levels) > num_layers(text):
        raise vision.refused("deepstack_visual_indexes", f"a list of at most {num_layers(text)} layers of the tower")
    attention_bias = text.flag("attention_bias", False)
    return replace(
        build_spec(text, "qwen3_vl", read_mrope(text, interleaved=True, default=SECTIONS)),
        qk_norm=True,
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        tie_embeddings=config.flag("tie_word_embeddings", text.flag("tie_word_embeddings", False)),
        deepstack=len(levels),
    )


QWEN3_VL = Family(("Qwen3VLForConditionalGeneration",), ("qwen3_vl",), read_qwen3_vl)
