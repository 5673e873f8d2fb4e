"""StarCoder 2: LayerNorm, an MLP of two matrices with GELU, biases by `use_bias`, and sliding windows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..config_json import ConfigTable, build_spec, sliding_window
from ..config_rope import read_rope
from ..gguf_config import GGUF_NAMES, LAYER_NORM_KEYS, GGUFFormat
from ..spec import DecoderSpec, TensorNames
from .family import Family

DEFAULTS: dict[str, Any] = {
    "eos_token_id": 50_256,
    "hidden_act": "gelu_pytorch_tanh",
    "max_position_embeddings": 4096,
    "norm_epsilon": 1e-5,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
    "use_bias": True,
}


def read_starcoder2(config: ConfigTable) -> DecoderSpec:
    """Read a `Starcoder2ForCausalLM`."""
    config = config.with_defaults(DEFAULTS)
    spec = build_spec(config, "starcoder2", read_rope(config))
    if spec.activation != "gelu_tanh":
        raise config.refused("hidden_act", '"gelu_pytorch_tanh"')
    bias = config.flag("use_bias", True)
    return replace(
        spec,
        norm_kind="layer",
        norm_bias=True,
        norm_eps=config.positive("norm_epsilon"),
        activation="ungated_gelu_tanh",
        windows=(sliding_window(config),) * spec.num_layers,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
        names=TensorNames(gate_up=("mlp.c_fc",), down="mlp.c_proj"),
    )


def _derive(config: ConfigTable) -> Mapping[str, Any]:
    """Return the keys that follow from other ones or from the architecture."""
    return {
        "hidden_act": DEFAULTS["hidden_act"],
        "norm_epsilon": config.values["layer_norm_eps"],
        "use_bias": config.flag("attention_bias", False),
    }


STARCODER2 = Family(
    ("Starcoder2ForCausalLM",),
    ("starcoder2",),
    read_starcoder2,
    GGUFFormat(
        "starcoder2",
        LAYER_NORM_KEYS,
        replace(GGUF_NAMES, gate_up=("ffn_up",)),
        derive=_derive,
    ),
)
