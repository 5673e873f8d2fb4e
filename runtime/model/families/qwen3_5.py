"""Qwen3.5, 3.6 and 3.8: layers as in Qwen3-Next, with an MLP or experts, after a vision tower in most folders.

The tower is Qwen3-VL's; `model/vision/` reads it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..config_json import MAX_WIDTH, ConfigTable
from ..config_rope import read_mrope, read_rope
from ..gguf_config import GGUFFormat
from ..spec import DecoderSpec
from .family import Family
from .qwen3_next import (
    EXPERT_DEFAULTS,
    HYBRID_DEFAULTS,
    HYBRID_EXPERT_KEYS,
    HYBRID_GGUF_NAMES,
    HYBRID_KEYS,
    derive_hybrid,
    read_experts,
    read_hybrid,
    read_hybrid_head,
)

DEFAULTS: dict[str, Any] = {  # defaults of transformers' config class
    **HYBRID_DEFAULTS,
    "vocab_size": 248_320,
    "hidden_size": 4096,
    "intermediate_size": 12_288,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
}
MOE_DEFAULTS: dict[str, Any] = {
    **HYBRID_DEFAULTS,
    **EXPERT_DEFAULTS,
    "vocab_size": 248_320,
    "hidden_size": 2048,
    "num_hidden_layers": 40,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "num_experts": 256,
    "num_experts_per_tok": 8,
}
SECTIONS = [11, 11, 10]


def read_qwen3_5(config: ConfigTable) -> DecoderSpec:
    """Read a `Qwen3_5ForCausalLM`, or the text part of a `Qwen3_5ForConditionalGeneration`."""
    return _read(config, "qwen3_5", DEFAULTS)


def read_qwen3_5_moe(config: ConfigTable) -> DecoderSpec:
    """Read a `Qwen3_5MoeForCausalLM`, or the text part of a `Qwen3_5MoeForConditionalGeneration`."""
    spec = _read(config, "qwen3_5_moe", MOE_DEFAULTS)
    return replace(spec, experts=read_experts(_text(config, MOE_DEFAULTS), normalized=True))


def _read(config: ConfigTable, family: str, defaults: dict[str, Any]) -> DecoderSpec:
    text = _text(config, defaults)
    if "vision_config" in config:
        rope = read_mrope(text, interleaved=True, default=SECTIONS, partial=True)
    else:  # the positions of text in time, height and width are equal
        rope = read_rope(text, partial=True)
    tied = config.flag("tie_word_embeddings", text.flag("tie_word_embeddings", False))
    return replace(read_hybrid(text, family, rope), tie_embeddings=tied)


def read_qwen3_5_head(config: ConfigTable, spec: DecoderSpec) -> DecoderSpec:
    """Read the head of a model, whose text part describes it."""
    return read_hybrid_head(_text(config, {}), spec)


def _text(config: ConfigTable, defaults: dict[str, Any]) -> ConfigTable:
    """Return the object that describes the text model, with defaults."""
    if "text_config" not in config:
        text = config.with_defaults(defaults)
    else:
        shared = {key: config.values[key] for key in ("eos_token_id",) if key in config}
        text = config.table("text_config").with_defaults(defaults | shared)
    if "moe_intermediate_size" in defaults:  # all layers have experts: no key says how wide another MLP would be
        text = text.with_defaults({"intermediate_size": text.integer("moe_intermediate_size", 1, MAX_WIDTH)})
    return text


QWEN3_5 = Family(
    ("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"),
    ("qwen3_5_text", "qwen3_5"),
    read_qwen3_5,
    GGUFFormat("qwen35", HYBRID_KEYS, HYBRID_GGUF_NAMES, derive=derive_hybrid, tiles_value_heads=True),
    head=read_qwen3_5_head,
)
QWEN3_5_MOE = Family(
    ("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration"),
    ("qwen3_5_moe_text", "qwen3_5_moe"),
    read_qwen3_5_moe,
    GGUFFormat(
        "qwen35moe",
        HYBRID_KEYS | HYBRID_EXPERT_KEYS,
        HYBRID_GGUF_NAMES,
        experts=True,
        derive=derive_hybrid,
        tiles_value_heads=True,
    ),
    head=read_qwen3_5_head,
)
