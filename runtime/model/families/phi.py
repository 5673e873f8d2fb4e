"""Phi-1, 1.5 and 2: LayerNorm, attention and MLP beside each other, RoPE on a part of each head, an MLP of two matrices
with GELU, and biases everywhere.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..config_json import ConfigTable, build_spec
from ..config_rope import read_rope
from ..gguf_config import GGUF_NAMES, LAYER_NORM_KEYS, GGUFFormat
from ..spec import DecoderSpec, TensorNames
from .family import Family

NAMES = TensorNames(o="self_attn.dense", gate_up=("mlp.fc1",), down="mlp.fc2", final_norm="model.final_layernorm")
DEFAULTS: dict[str, Any] = {
    "eos_token_id": 2,
    "hidden_act": "gelu_new",
    "layer_norm_eps": 1e-5,
    "max_position_embeddings": 2048,
    "partial_rotary_factor": 0.5,
}


def read_phi(config: ConfigTable) -> DecoderSpec:
    """Read a `PhiForCausalLM`."""
    config = config.with_defaults(DEFAULTS)
    if config.text("hidden_act") not in ("gelu_new", "gelu_pytorch_tanh"):
        raise config.refused("hidden_act", '"gelu_new" or "gelu_pytorch_tanh"')
    if config.flag("qk_layernorm", False):
        raise config.refused("qk_layernorm", "absent or false")
    if config.flag("tie_word_embeddings", False):
        raise config.refused("tie_word_embeddings", "absent or false")
    known = ConfigTable({**config.values, "hidden_act": "gelu_pytorch_tanh"}, config.where, config.source, config.names)
    return replace(
        build_spec(known, "phi", read_rope(config, partial=True)),
        norm_kind="layer",
        norm_bias=True,
        norm_eps=config.positive("layer_norm_eps"),
        parallel=True,
        activation="ungated_gelu_tanh",
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        lm_head_bias=True,
        names=NAMES,
    )


PHI = Family(
    ("PhiForCausalLM",),
    ("phi",),
    read_phi,
    GGUFFormat(
        "phi2",
        LAYER_NORM_KEYS | {"partial_rotary_factor": "rope.dimension_count"},
        replace(GGUF_NAMES, gate_up=("ffn_up",)),
        derive=lambda config: {"hidden_act": DEFAULTS["hidden_act"]},
    ),
)
