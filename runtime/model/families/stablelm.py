"""StableLM: LayerNorm, RoPE on a part of each head, and SwiGLU. StableLM 2 12B has attention and MLP beside each other,
and LayerNorms of query and key heads, each head with weights of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..config_json import ConfigTable, build_spec
from ..config_rope import read_rope
from ..gguf_config import LAYER_NORM_KEYS, GGUFFormat
from ..spec import DecoderSpec, TensorNames
from .family import Family

NAMES = TensorNames(q_norm="self_attn.q_layernorm.norms.{}", k_norm="self_attn.k_layernorm.norms.{}")
DEFAULTS: dict[str, Any] = {
    "eos_token_id": 0,
    "layer_norm_eps": 1e-5,
    "max_position_embeddings": 4096,
    "num_key_value_heads": 32,
    "partial_rotary_factor": 0.25,
}


def read_stablelm(config: ConfigTable) -> DecoderSpec:
    """Read a `StableLmForCausalLM`."""
    config = config.with_defaults(DEFAULTS)
    return replace(
        build_spec(config, "stablelm", read_rope(config, partial=True)),
        norm_kind="layer",
        norm_bias=True,
        norm_eps=config.positive("layer_norm_eps"),
        parallel=config.flag("use_parallel_residual", False),
        qkv_bias=config.flag("use_qkv_bias", False),
        qk_norm=config.flag("qk_layernorm", False),
        qk_norm_kind="layer",
        names=NAMES,
    )


def _derive(config: ConfigTable) -> Mapping[str, Any]:
    """Return the keys that follow from tensors."""
    return {
        "use_parallel_residual": not config.flag("mlp_norm", True),
        "use_qkv_bias": config.flag("attention_bias", False),
        "qk_layernorm": config.flag("qk_norm", False),
    }


STABLELM = Family(
    ("StableLmForCausalLM",),
    ("stablelm",),
    read_stablelm,
    GGUFFormat("stablelm", LAYER_NORM_KEYS | {"partial_rotary_factor": "rope.dimension_count"}, derive=_derive),
)
