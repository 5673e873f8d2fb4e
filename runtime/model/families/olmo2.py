"""OLMo 2: norms follow attention and MLP instead of preceding them; queries and keys are normed before they are split
into heads.
"""

from __future__ import annotations

from dataclasses import replace

from ..config_json import ConfigTable, build_spec
from ..config_rope import read_rope
from ..gguf_config import GGUFFormat
from ..spec import DecoderSpec, Rope
from .family import Family


def read_olmo2(config: ConfigTable) -> DecoderSpec:
    """Read an `Olmo2ForCausalLM`."""
    config = config.with_defaults({"eos_token_id": 50279, "rms_norm_eps": 1e-5})
    return build_olmo(config, "olmo2", read_rope(config))


def build_olmo(config: ConfigTable, family: str, rope: Rope) -> DecoderSpec:
    """Read the keys of OLMo 2 and 3."""
    attention_bias = config.flag("attention_bias", False)
    return replace(
        build_spec(config, family, rope),
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        qk_norm=True,
        qk_norm_rows=True,
        pre_norms=False,
        post_norms=True,
    )


OLMO2 = Family(("Olmo2ForCausalLM",), ("olmo2",), read_olmo2, GGUFFormat("olmo2"))
