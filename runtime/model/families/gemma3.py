"""Gemma 3: five of six layers slide and have a rotary embedding of their own; queries and keys are normed.

In a checkpoint with images (`Gemma3ForConditionalGeneration`) this is the text part; `model/vision/` reads the tower.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..config_json import ConfigTable
from ..config_rope import layer_rope_table, rope_of
from ..gguf_config import GGUFFormat
from ..spec import DecoderSpec
from .family import Family
from .gemma import GGUF_KEYS, build_gemma, derive_gemma

DEFAULTS: dict[str, Any] = {  # defaults of transformers' config class; checkpoints leave out keys with default values
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131_072,
    "eos_token_id": 1,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
}
WHOLE_MODEL = ("eos_token_id", "tie_word_embeddings")  # keys outside text_config that also apply to the text part


def read_gemma3(config: ConfigTable) -> DecoderSpec:
    """Read a `Gemma3ForCausalLM`."""
    config = config.with_defaults(DEFAULTS)
    full = rope_of(config, layer_rope_table(config, "full_attention"))
    sliding = rope_of(config, layer_rope_table(config, "sliding_attention"), theta_key="rope_local_base_freq")
    spec = build_gemma(config, "gemma3", full, config.integer("sliding_window_pattern", 1, 1 << 30, 6))
    ropes = tuple(sliding if window else full for window in spec.windows)
    return replace(spec, qk_norm=True, ropes=ropes, attention_softcap=0.0)  # transformers does not apply it either


def read_gemma3_with_images(config: ConfigTable) -> DecoderSpec:
    """Read the text part of a `Gemma3ForConditionalGeneration`, whose logits transformers does not cap."""
    shared = {key: config.values[key] for key in WHOLE_MODEL if key in config}
    return replace(read_gemma3(config.table("text_config").with_defaults(shared)), logits_softcap=0.0)


def _derive(config: ConfigTable) -> dict[str, Any]:
    if "attn_logit_softcapping" in config:
        raise config.refused("attn_logit_softcapping", "absent: scores are not capped")
    derived = derive_gemma(config, full_every=6, largest=62)
    if "sliding_window" in config:
        return derived
    return derived | {"sliding_window": 1, "layer_types": ["full_attention"] * len(derived["layer_types"])}


GEMMA3 = Family(("Gemma3ForCausalLM",), ("gemma3_text",), read_gemma3, GGUFFormat("gemma3", GGUF_KEYS, derive=_derive))
GEMMA3_WITH_IMAGES = Family(("Gemma3ForConditionalGeneration",), ("gemma3",), read_gemma3_with_images)
