"""Llama 1 to 3.x: `attention_bias` puts biases on q, k, v and o, `mlp_bias` on the MLP."""

from __future__ import annotations

from ..config_json import ConfigTable, build_spec, num_layers
from ..spec import DecoderSpec


def read_llama(config: ConfigTable) -> DecoderSpec:
    """Read a `LlamaForCausalLM`."""
    attention_bias = config.flag("attention_bias", False)
    return build_spec(
        config,
        family="llama",
        windows=(0,) * num_layers(config),
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        mlp_bias=config.flag("mlp_bias", False),
        default_eos=2,
    )
