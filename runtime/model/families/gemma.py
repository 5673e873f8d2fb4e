"""The common parts of Gemma 2 and 3: norms around attention and MLP whose weights are stored less 1, embeddings times
sqrt(hidden_size), an MLP with GELU, scores scaled by a number in config.json, and caps. GGUF files lack that number and
the list of sliding layers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..config_json import (
    MAX_HEADS,
    MAX_POSITIONS,
    MAX_WIDTH,
    ConfigTable,
    build_spec,
    num_layers,
    read_activation,
    read_head_dim,
    sliding_layers,
    windows_by_type,
)
from ..gguf_config import KEYS
from ..spec import DecoderSpec, Rope, TensorNames

NAMES = TensorNames(mlp_norm="pre_feedforward_layernorm")
GGUF_KEYS = KEYS | {
    "sliding_window": "attention.sliding_window",
    "sliding_window_pattern": "attention.sliding_window_pattern",
    "rope_local_base_freq": "rope.freq_base_swa",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}


def build_gemma(config: ConfigTable, family: str, rope: Rope, full_every: int) -> DecoderSpec:
    """Read the keys of both families; without `layer_types`, one layer in `full_every` is full and the others slide."""
    if config.flag("use_bidirectional_attention", False):
        raise config.refused("use_bidirectional_attention", "false: attention is causal")
    spec = build_spec(config, family, rope)
    attention_bias = config.flag("attention_bias", False)
    return replace(
        spec,
        windows=_windows(config, spec.num_layers, full_every),
        attention_scale=config.positive("query_pre_attn_scalar") ** -0.5,
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        activation=read_activation(config, "hidden_activation"),
        post_norms=True,
        norm_offset=1.0,
        embedding_scale=spec.hidden_size**0.5,
        round_embedding_scale=True,
        attention_softcap=_cap(config, "attn_logit_softcapping"),
        logits_softcap=_cap(config, "final_logit_softcapping"),
        names=NAMES,
    )


def derive_gemma(config: ConfigTable, *, full_every: int, largest: int) -> dict[str, Any]:
    """Return the keys that llama.cpp derives from a GGUF file's metadata.

    `largest` is the number of layers of the family's largest model, whose scores are not scaled by the size of a head.
    """
    layers = num_layers(config)
    scalar = read_head_dim(config)
    if layers == largest:
        scalar = config.integer("hidden_size", 1, MAX_WIDTH) // config.integer("num_attention_heads", 1, MAX_HEADS)
    slides = sliding_layers(config, layers, full_every)
    types = ["sliding_attention" if each else "full_attention" for each in slides]
    return {"query_pre_attn_scalar": scalar, "layer_types": types, "sliding_window_pattern": None}


def _windows(config: ConfigTable, layers: int, full_every: int) -> tuple[int, ...]:
    window = config.integer("sliding_window", 1, MAX_POSITIONS)
    if "layer_types" in config:
        return windows_by_type(config, layers, window)
    return tuple(0 if (layer + 1) % full_every == 0 else window for layer in range(layers))


def _cap(config: ConfigTable, key: str) -> float:
    """Return the cap under `key`; 0 for null."""
    return config.positive(key) if key in config else 0.0
