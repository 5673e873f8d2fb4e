"""Arcee (AFM): Llama with an MLP of two matrices and squared ReLU."""

from __future__ import annotations

from dataclasses import replace

from ..config_json import ConfigTable, build_spec
from ..config_rope import read_rope
from ..gguf_config import GGUF_NAMES, GGUFFormat
from ..spec import DecoderSpec, TensorNames
from .family import Family

DEFAULTS = {"eos_token_id": 128_001, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "hidden_act": "relu2"}


def read_arcee(config: ConfigTable) -> DecoderSpec:
    """Read an `ArceeForCausalLM`."""
    config = config.with_defaults(DEFAULTS)
    if config.text("hidden_act") != "relu2":
        raise config.refused("hidden_act", '"relu2"')
    gated = ConfigTable({**config.values, "hidden_act": "silu"}, config.where, config.source, config.names)
    bias = config.flag("attention_bias", False)
    return replace(
        build_spec(gated, "arcee", read_rope(config)),
        activation="relu_squared",
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=config.flag("mlp_bias", False),
        names=TensorNames(gate_up=("mlp.up_proj",)),
    )


ARCEE = Family(
    ("ArceeForCausalLM",),
    ("arcee",),
    read_arcee,
    GGUFFormat(
        "arcee",
        names=replace(GGUF_NAMES, gate_up=("ffn_up",)),
        neighboring_pairs=True,
        derive=lambda config: {"hidden_act": "relu2"},
    ),
)
