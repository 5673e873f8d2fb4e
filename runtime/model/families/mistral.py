"""Mistral 7B and later: no biases; every layer slides unless `sliding_window` is null, as it is from v0.2 on."""

from __future__ import annotations

from ..config_json import ConfigTable, build_spec, num_layers, sliding_window
from ..spec import DecoderSpec


def read_mistral(config: ConfigTable) -> DecoderSpec:
    """Read a `MistralForCausalLM`."""
    return build_spec(
        config,
        family="mistral",
        windows=(sliding_window(config),) * num_layers(config),
        default_eos=2,
    )
