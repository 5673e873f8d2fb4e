"""Gemma 2: every second layer slides; scores and logits are soft-capped."""

from __future__ import annotations

from typing import Any

from ..config_json import ConfigTable
from ..config_rope import read_rope
from ..gguf_config import GGUFFormat
from ..spec import DecoderSpec
from .family import Family
from .gemma import GGUF_KEYS, build_gemma, derive_gemma

DEFAULTS: dict[str, Any] = {  # defaults of transformers' config class; checkpoints leave out keys with default values
    "vocab_size": 256000,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192,
    "eos_token_id": 1,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "final_logit_softcapping": 30.0,
    "attn_logit_softcapping": 50.0,
}


def read_gemma2(config: ConfigTable) -> DecoderSpec:
    """Read a `Gemma2ForCausalLM`."""
    config = config.with_defaults(DEFAULTS)
    return build_gemma(config, "gemma2", read_rope(config), full_every=2)


def _derive(config: ConfigTable) -> dict[str, Any]:
    if "rope_local_base_freq" in config:
        raise config.refused("rope_local_base_freq", "absent: all layers have one rotary embedding")
    defaults = ("sliding_window", "attn_logit_softcapping", "final_logit_softcapping")  # old files have none of them
    present = {key: config.values[key] if key in config else DEFAULTS[key] for key in defaults}
    return present | derive_gemma(config, full_every=2, largest=46)


GEMMA2 = Family(("Gemma2ForCausalLM",), ("gemma2",), read_gemma2, GGUFFormat("gemma2", GGUF_KEYS, derive=_derive))
