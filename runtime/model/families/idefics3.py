"""Idefics 3, SmolVLM and SmolVLM 2: Llama, after a vision tower that `model/vision/` reads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..config_json import ConfigTable
from ..spec import DecoderSpec, TensorNames
from .family import Family
from .llama import read_llama

DEFAULTS: dict[str, Any] = {  # defaults of transformers' config class of Llama
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
    "eos_token_id": None,  # Llama's default is no end in other vocabularies; generation_config.json has the right one
}
NAMES = TensorNames(
    embedding="model.text_model.embed_tokens",
    layer="model.text_model.layers.{}.",
    final_norm="model.text_model.norm",
)


def read_idefics3(config: ConfigTable) -> DecoderSpec:
    """Read the text part of an `Idefics3ForConditionalGeneration` or a `SmolVLMForConditionalGeneration`."""
    text = config.table("text_config")
    if text.text("model_type", "llama") != "llama":
        raise text.refused("model_type", '"llama" or absent')
    shared = {key: config.values[key] for key in ("eos_token_id",) if key in config}
    return replace(
        read_llama(text.with_defaults(DEFAULTS | shared)),
        family="idefics3",
        tie_embeddings=config.flag("tie_word_embeddings", False),
        names=NAMES,
    )


IDEFICS3 = Family(
    ("Idefics3ForConditionalGeneration", "SmolVLMForConditionalGeneration"), ("idefics3", "smolvlm"), read_idefics3
)
