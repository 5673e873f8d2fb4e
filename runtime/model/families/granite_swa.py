"""Granite SWA: Granite 3 with attention sinks, a sliding window in three of four layers, and a base of the rotary
embedding for each layer, 0 where heads are not rotated (NoPE).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from ..config_json import MAX_POSITIONS, ConfigTable, num_layers, windows_by_type
from ..config_rope import rope_of, shared_rope_table
from ..spec import DecoderSpec, Rope
from .family import Family
from .granite import read_granite

DEFAULTS: dict[str, Any] = {
    "eos_token_id": 100_257,
    "max_position_embeddings": 8192,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-5,
    "sliding_window": 128,
    "tie_word_embeddings": True,
}
FULL_EVERY = 4  # the first of four layers sees all tokens, the others slide


def read_granite_swa(config: ConfigTable) -> DecoderSpec:
    """Read a `GraniteSWAForCausalLM`."""
    config = config.with_defaults(DEFAULTS)
    layers = num_layers(config)
    window = config.integer("sliding_window", 1, MAX_POSITIONS)
    by_number = tuple(window if layer % FULL_EVERY else 0 for layer in range(layers))
    return replace(
        read_granite(config),
        family="granite_swa",
        sinks=True,
        windows=windows_by_type(config, layers, window) if "layer_types" in config else by_number,
        ropes=tuple(_ropes(config, layers)),
    )


def _ropes(config: ConfigTable, layers: int) -> Iterator[Rope | None]:
    """Yield the rotary embedding of each layer: by its base in `layer_rope_theta`, if there is such a list."""
    table = shared_rope_table(config)
    rope = rope_of(config, table)
    bases = config.values.get("layer_rope_theta")
    if bases is None:
        bases = [rope.theta] * layers
    if not isinstance(bases, list) or len(bases) != layers or any(type(each) not in (int, float) for each in bases):
        raise config.refused("layer_rope_theta", f"a list of {layers} numbers")
    for layer, base in enumerate(bases):
        key = f"layer_rope_theta[{layer}]"
        own = ConfigTable({**config.values, key: base}, config.where, config.source, config.names)
        if base == 0:
            yield None
        elif own.positive(key) <= 1:
            raise own.refused(key, "0, or above 1")
        else:
            yield replace(rope, theta=own.positive(key))


GRANITE_SWA = Family(("GraniteSWAForCausalLM",), ("granite_swa",), read_granite_swa)
