"""Llama 1 to 3.x, SmolLM2 and others of that shape: biases on q, k, v and o, and on the MLP, if config.json says so."""

from __future__ import annotations

from dataclasses import replace

from ..config_json import ConfigTable, build_spec
from ..config_rope import read_rope
from ..gguf_config import GGUFFormat
from ..spec import DecoderSpec
from .family import Family


def read_llama(config: ConfigTable) -> DecoderSpec:
    """Read a `LlamaForCausalLM`."""
    config = config.with_defaults({"eos_token_id": 2})
    attention_bias = config.flag("attention_bias", False)
    return replace(
        build_spec(config, "llama", read_rope(config)),
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        mlp_bias=config.flag("mlp_bias", False),
    )


LLAMA = Family(("LlamaForCausalLM",), ("llama",), read_llama, GGUFFormat("llama", neighboring_pairs=True))
