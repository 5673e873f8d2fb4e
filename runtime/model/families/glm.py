"""GLM-4: interleaved RoPE on a part of each head, gate and up in one tensor. GLM-4-0414 also norms the output of
attention and MLP.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..config_json import ConfigTable, build_spec
from ..config_rope import read_rope
from ..gguf_config import GGUF_NAMES, KEYS, GGUFFormat
from ..spec import DecoderSpec, TensorNames
from .family import Family

NAMES = TensorNames(gate_up=("mlp.gate_up_proj",))
DEFAULTS: dict[str, Any] = {
    "attention_bias": True,
    "eos_token_id": [151_329, 151_336, 151_338],
    "head_dim": 128,
    "max_position_embeddings": 131_072,
    "num_key_value_heads": 2,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1.5625e-07,
}


def read_glm(config: ConfigTable) -> DecoderSpec:
    """Read a `GlmForCausalLM`."""
    return _build(config, "glm")


def read_glm4(config: ConfigTable) -> DecoderSpec:
    """Read a `Glm4ForCausalLM`."""
    names = replace(NAMES, attention_post_norm="post_self_attn_layernorm", mlp_post_norm="post_mlp_layernorm")
    return replace(_build(config, "glm4"), post_norms=True, names=names)


def _build(config: ConfigTable, family: str) -> DecoderSpec:
    """Read the keys of both families."""
    config = config.with_defaults(DEFAULTS)
    return replace(
        build_spec(config, family, read_rope(config, partial=True)),
        qkv_bias=config.flag("attention_bias", False),
        names=NAMES,
    )


def _gguf(architecture: str) -> GGUFFormat:
    return GGUFFormat(
        architecture,
        KEYS | {"partial_rotary_factor": "rope.dimension_count"},
        replace(GGUF_NAMES, gate_up=("ffn_up",)),
        neighboring_pairs=True,
    )


GLM = Family(("GlmForCausalLM",), ("glm",), read_glm, _gguf("chatglm"), neighboring_pairs=True)
GLM4 = Family(("Glm4ForCausalLM",), ("glm4",), read_glm4, _gguf("glm4"), neighboring_pairs=True)
