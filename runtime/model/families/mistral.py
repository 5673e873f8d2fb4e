"""Mistral 7B and later: no biases; every layer slides unless `sliding_window` is null, as it is from v0.2 on."""

from __future__ import annotations

from dataclasses import replace

from ..config_json import ConfigTable, build_spec, sliding_window
from ..config_rope import read_rope
from ..spec import DecoderSpec
from .family import Family


def read_mistral(config: ConfigTable) -> DecoderSpec:
    """Read a `MistralForCausalLM`."""
    config = config.with_defaults({"eos_token_id": 2, "sliding_window": 4096})
    spec = build_spec(config, "mistral", read_rope(config))
    return replace(spec, windows=(sliding_window(config),) * spec.num_layers)


MISTRAL = Family(("MistralForCausalLM",), ("mistral",), read_mistral)
