"""Mistral 7B and its line: no biases; every layer slides, unless `sliding_window` is null (from v0.2 on it is)."""

from __future__ import annotations

from ..config_json import ConfigTable, build_spec, num_layers, sliding_window
from ..spec import DecoderSpec


def read_mistral(config: ConfigTable) -> DecoderSpec:
    return build_spec(
        config,
        family="mistral",
        windows=(sliding_window(config),) * num_layers(config),
        default_bos=1,
        default_eos=2,
    )
