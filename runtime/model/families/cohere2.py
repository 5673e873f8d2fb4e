"""Cohere 2, as Command R7B and Command A: LayerNorm without bias, attention and MLP beside each other, interleaved RoPE
and a sliding window in three of four layers; the others do not rotate heads (NoPE).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..config_json import MAX_POSITIONS, ConfigTable, build_spec, num_layers, sliding_layers, windows_by_type
from ..config_rope import read_rope
from ..gguf_config import LAYER_NORM_KEYS, GGUFFormat
from ..spec import DecoderSpec
from .cohere import with_layer_norm
from .family import Family

DEFAULTS: dict[str, Any] = {
    "eos_token_id": 255_001,
    "layer_norm_eps": 1e-5,
    "logit_scale": 0.0625,
    "max_position_embeddings": 8192,
    "sliding_window": 4096,
    "sliding_window_pattern": 4,
    "tie_word_embeddings": True,
}
FULL_EVERY = 4  # one layer in four sees all tokens, the others slide
GGUF_KEYS = {
    "logit_scale": "logit_scale",
    "sliding_window": "attention.sliding_window",
    "sliding_window_pattern": "attention.sliding_window_pattern",
}


def read_cohere2(config: ConfigTable) -> DecoderSpec:
    """Read a `Cohere2ForCausalLM`."""
    config = config.with_defaults(DEFAULTS)
    rope = read_rope(config)
    windows = _windows(config)
    return replace(
        with_layer_norm(config, build_spec(config, "cohere2", rope)),
        windows=windows,
        ropes=tuple(rope if window else None for window in windows),
    )


def _windows(config: ConfigTable) -> tuple[int, ...]:
    """Return the windows of `layer_types`; without it, every N-th layer sees all tokens."""
    layers = num_layers(config)
    window = config.integer("sliding_window", 1, MAX_POSITIONS)
    if "layer_types" in config:
        return windows_by_type(config, layers, window)
    every = config.integer("sliding_window_pattern", 1, 1 << 30)
    return tuple(window if (layer + 1) % every else 0 for layer in range(layers))


def _derive(config: ConfigTable) -> Mapping[str, Any]:
    """Return the types of layers, which a file has as a list of flags, a number or not at all."""
    slides = sliding_layers(config, num_layers(config), FULL_EVERY)
    return {"layer_types": ["sliding_attention" if each else "full_attention" for each in slides]}


COHERE2 = Family(
    ("Cohere2ForCausalLM",),
    ("cohere2",),
    read_cohere2,
    GGUFFormat("cohere2", LAYER_NORM_KEYS | GGUF_KEYS, neighboring_pairs=True, derive=_derive),
    neighboring_pairs=True,
)
