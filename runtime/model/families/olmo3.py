"""OLMo 3: OLMo 2 with a sliding window in three of four layers; RoPE is scaled in the other layers only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..config_json import ConfigTable, num_layers, sliding_layers, sliding_window, windows_by_type
from ..config_rope import layer_rope_table, rope_of
from ..gguf_config import KEYS, GGUFFormat
from ..spec import DecoderSpec
from .family import Family
from .olmo2 import build_olmo

DEFAULTS: dict[str, Any] = {
    "eos_token_id": 50279,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "sliding_window": 4096,
}
FULL_EVERY = 4  # one layer in four sees all tokens, the others slide
GGUF_KEYS = {
    "sliding_window": "attention.sliding_window",
    "sliding_window_pattern": "attention.sliding_window_pattern",
    "sliding_rope_theta": "rope.freq_base_swa",
}


def read_olmo3(config: ConfigTable) -> DecoderSpec:
    """Read an `Olmo3ForCausalLM`."""
    config = config.with_defaults(DEFAULTS)
    if config.values["rope_theta"] != DEFAULTS["rope_theta"] and "rope_parameters" not in config:
        raise config.refused("rope_theta", "500000: transformers 4 uses it in all layers, 5 in full ones")
    full, sliding = (
        rope_of(config, layer_rope_table(config, kind)) for kind in ("full_attention", "sliding_attention")
    )
    spec = build_olmo(config, "olmo3", full)
    windows = _windows(config)
    return replace(spec, windows=windows, ropes=tuple(sliding if window else full for window in windows))


def _windows(config: ConfigTable) -> tuple[int, ...]:
    """Return the windows of `layer_types`; without it, every fourth layer sees all tokens."""
    layers = num_layers(config)
    window = sliding_window(config)
    if "layer_types" in config:
        return windows_by_type(config, layers, window)
    return tuple(window if (layer + 1) % FULL_EVERY else 0 for layer in range(layers))


def _derive(config: ConfigTable) -> Mapping[str, Any]:
    """Return the types of layers, and the rotary embedding of sliding layers, which a file has as a base only."""
    slides = sliding_layers(config, num_layers(config), FULL_EVERY)
    theta = config.values["sliding_rope_theta"] or config.values["rope_theta"]
    return {
        "layer_types": ["sliding_attention" if each else "full_attention" for each in slides],
        "rope_parameters": {"sliding_attention": {"rope_type": "default", "rope_theta": theta}},
    }


OLMO3 = Family(
    ("Olmo3ForCausalLM",),
    ("olmo3",),
    read_olmo3,
    GGUFFormat("olmo2", KEYS | GGUF_KEYS, marker="attention.sliding_window", derive=_derive),
)
