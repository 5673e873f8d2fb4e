"""Mistral 7B and later: no biases; every layer slides unless `sliding_window` is null, as it is from v0.2 on, or
`layer_types` says otherwise.
"""

from __future__ import annotations

from dataclasses import replace

from ..config_json import ConfigTable, build_spec, sliding_window, windows_by_type
from ..config_rope import read_rope
from ..spec import DecoderSpec
from .family import Family


def read_mistral(config: ConfigTable) -> DecoderSpec:
    """Read a `MistralForCausalLM`."""
    config = config.with_defaults({"eos_token_id": 2, "sliding_window": 4096})
    spec = build_spec(config, "mistral", read_rope(config))
    window = sliding_window(config)
    if "layer_types" in config:
        return replace(spec, windows=windows_by_type(config, spec.num_layers, window))
    return replace(spec, windows=(window,) * spec.num_layers)


MISTRAL = Family(("MistralForCausalLM",), ("mistral",), read_mistral)
