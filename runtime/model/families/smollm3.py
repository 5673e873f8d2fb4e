"""SmolLM3: some layers do not rotate heads (NoPE), every fourth unless config.json lists others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..config_json import ConfigTable, build_spec, num_layers, sliding_window, windows_by_type
from ..config_rope import read_rope
from ..gguf_config import GGUFFormat
from ..spec import DecoderSpec
from .family import Family

DEFAULTS: dict[str, Any] = {
    "eos_token_id": 128001,
    "num_key_value_heads": 4,
    "rope_theta": 2_000_000.0,
    "tie_word_embeddings": True,
}


def read_smollm3(config: ConfigTable) -> DecoderSpec:
    """Read a `SmolLM3ForCausalLM`."""
    config = config.with_defaults(DEFAULTS)
    attention_bias = config.flag("attention_bias", False)
    rope = read_rope(config)
    rotates = _rotates(config)
    return replace(
        build_spec(config, "smollm3", rope),
        ropes=tuple(rope if rotated else None for rotated in rotates),
        windows=_windows(config, rotates),
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        mlp_bias=config.flag("mlp_bias", False),
    )


def _rotates(config: ConfigTable) -> list[bool]:
    """Return for each layer whether heads are rotated."""
    layers = num_layers(config)
    if "no_rope_layers" not in config:
        interval = config.integer("no_rope_layer_interval", 1, 1 << 30, 4)
        return [(layer + 1) % interval != 0 for layer in range(layers)]
    flags = config.values["no_rope_layers"]
    if not isinstance(flags, list) or len(flags) < layers or any(flag not in (0, 1) for flag in flags):
        raise config.refused("no_rope_layers", f"a list of {layers} numbers, 1 or 0 (no rotation)")
    return [flag == 1 for flag in flags[:layers]]


def _windows(config: ConfigTable, rotates: list[bool]) -> tuple[int, ...]:
    """Return the windows of `layer_types`; without it, layers that do not rotate heads slide."""
    window = sliding_window(config) if config.flag("use_sliding_window", False) else 0
    if "layer_types" in config:
        return windows_by_type(config, len(rotates), window)
    return tuple(0 if rotated else window for rotated in rotates)


SMOLLM3 = Family(("SmolLM3ForCausalLM",), ("smollm3",), read_smollm3, GGUFFormat("smollm3", neighboring_pairs=True))
