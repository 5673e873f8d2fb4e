"""EXAONE 4: norms follow attention and MLP; queries and keys are normed. In models with sliding layers, the others do
not rotate heads (NoPE).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..config_json import ConfigTable, build_spec, num_layers, sliding_layers, sliding_window, windows_by_type
from ..config_rope import read_rope
from ..gguf_config import KEYS, GGUFFormat
from ..spec import DecoderSpec
from .family import Family

DEFAULTS: dict[str, Any] = {
    "eos_token_id": 2,
    "max_position_embeddings": 2048,
    "num_key_value_heads": 32,
    "rms_norm_eps": 1e-5,
    "sliding_window": 4096,
}
FULL_EVERY = 4  # one layer in four sees all tokens, the others slide
HYBRID_LAYERS = 64  # layers of EXAONE 4.0 32B, whose first GGUF files have no window
GGUF_KEYS = {
    "sliding_window": "attention.sliding_window",
    "sliding_window_pattern": "attention.sliding_window_pattern",
}


def read_exaone4(config: ConfigTable) -> DecoderSpec:
    """Read an `Exaone4ForCausalLM`."""
    config = config.with_defaults(DEFAULTS)
    rope = read_rope(config)
    spec = build_spec(config, "exaone4", rope)
    window = sliding_window(config)
    windows = _windows(config, window)
    return replace(
        spec,
        windows=windows,
        ropes=tuple(rope if each or not window else None for each in windows),
        qk_norm=True,
        pre_norms=False,
        post_norms=True,
    )


def _windows(config: ConfigTable, window: int) -> tuple[int, ...]:
    """Return the windows of `layer_types`, or of a pattern: all but every N-th, or letters, as in LLLG."""
    layers = num_layers(config)
    if "layer_types" in config:
        return windows_by_type(config, layers, window)
    pattern = config.values.get("sliding_window_pattern")
    if isinstance(pattern, str):
        if not pattern or set(pattern) - {"L", "G"}:
            raise config.refused("sliding_window_pattern", "an integer, or the letters L and G")
        return tuple(window if pattern[layer % len(pattern)] == "L" else 0 for layer in range(layers))
    every = config.integer("sliding_window_pattern", 1, 1 << 30, FULL_EVERY) if window else 1
    return tuple(window if (layer + 1) % every else 0 for layer in range(layers))


def _derive(config: ConfigTable) -> Mapping[str, Any]:
    """Return the window and the types of layers, which a file has as a list of flags or not at all."""
    layers = num_layers(config)
    if "sliding_window" not in config and layers != HYBRID_LAYERS:
        return {"layer_types": ["full_attention"] * layers}
    slides = sliding_layers(config, layers, FULL_EVERY)
    types = ["sliding_attention" if each else "full_attention" for each in slides]
    return {"sliding_window": config.values["sliding_window"] or DEFAULTS["sliding_window"], "layer_types": types}


EXAONE4 = Family(
    ("Exaone4ForCausalLM",),
    ("exaone4",),
    read_exaone4,
    GGUFFormat("exaone4", KEYS | GGUF_KEYS, derive=_derive),
)
