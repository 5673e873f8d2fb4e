"""LFM2: gated short convolutions in most layers, attention with QK-norm in the others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..config_json import MAX_WIDTH, ConfigTable, build_spec, num_layers
from ..config_rope import read_rope
from ..gguf_config import GGUF_NAMES, KEYS, GGUFFormat, read_kv_heads
from ..spec import Convolutions, DecoderSpec, TensorNames
from .family import Family

MAX_TAPS = 16  # QUIRE_MAX_TAPS of the kernels
NAMES = TensorNames(
    input_norm="operator_norm",
    q_norm="self_attn.q_layernorm",
    k_norm="self_attn.k_layernorm",
    o="self_attn.out_proj",
    mlp_norm="ffn_norm",
    gate_up=("feed_forward.w1", "feed_forward.w3"),
    down="feed_forward.w2",
    final_norm="model.embedding_norm",
)
LFM2_GGUF_NAMES = replace(
    GGUF_NAMES,
    conv_in="shortconv.in_proj",
    conv="shortconv.conv",
    conv_out="shortconv.out_proj",
    final_norm="token_embd_norm",
)
DEFAULTS: dict[str, Any] = {  # defaults of transformers' config class
    "vocab_size": 65_536,
    "hidden_size": 2560,
    "intermediate_size": 12_288,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 128_000,
    "norm_eps": 1e-5,
    "rope_theta": 1_000_000.0,
    "tie_word_embeddings": True,
    "conv_L_cache": 3,
    "block_multiple_of": 256,
    "block_ffn_dim_multiplier": 1.0,
    "eos_token_id": 2,
}
OTHER_KEYS = {"intermediate_size": "block_ff_dim", "tie_word_embeddings": "tie_embedding"}  # other names, which win


def read_lfm2(config: ConfigTable) -> DecoderSpec:
    """Read a `Lfm2ForCausalLM`."""
    config = with_other_keys(config.with_defaults(DEFAULTS), OTHER_KEYS)
    return replace(build_hybrid(config, "lfm2"), intermediate_size=_intermediate_size(config))


def with_other_keys(config: ConfigTable, others: Mapping[str, str]) -> ConfigTable:
    """Return a table in which keys have the values under other names, if those are present."""
    renamed = {key: config.values[other] for key, other in others.items() if other in config.values}
    return ConfigTable({**config.values, **renamed}, config.where, config.source, config.names)


def build_hybrid(config: ConfigTable, family: str) -> DecoderSpec:
    """Read the keys that LFM2 and LFM2-MoE share."""
    spec = build_spec(config, family, read_rope(config))
    is_convolution = _convolution_layers(config)
    return replace(
        spec,
        norm_eps=config.positive("norm_eps"),
        activation="silu",
        qk_norm=True,
        ropes=tuple(None if each else rope for each, rope in zip(is_convolution, spec.ropes, strict=True)),
        convolutions=Convolutions(
            taps=config.integer("conv_L_cache", 1, MAX_TAPS),
            bias=config.flag("conv_bias", False),
            layers=is_convolution,
        ),
        names=NAMES,
    )


def _convolution_layers(config: ConfigTable) -> tuple[bool, ...]:
    """Return for each layer whether it has a convolution; at least one has attention."""
    layers = num_layers(config)
    if "layer_types" not in config:
        indexes = config.values.get("full_attn_idxs")
        indexes = list(range(layers)) if indexes is None else indexes
        if not isinstance(indexes, list) or not any(type(i) is int and 0 <= i < layers for i in indexes):
            raise config.refused("full_attn_idxs", f"a list with a layer of 0 to {layers - 1} that has attention")
        return tuple(layer not in indexes for layer in range(layers))
    types = config.values["layer_types"]
    known = ("conv", "full_attention")
    if not isinstance(types, list) or len(types) != layers or any(kind not in known for kind in types):
        raise config.refused("layer_types", f"{layers} times conv or full_attention")
    if "full_attention" not in types:
        raise config.refused("layer_types", "full_attention for one layer or more")
    return tuple(kind == "conv" for kind in types)


def _intermediate_size(config: ConfigTable) -> int:
    """Return the size of the MLP, which `block_auto_adjust_ff_dim` takes two thirds of and rounds up."""
    size = config.integer("intermediate_size", 1, MAX_WIDTH)
    if not config.flag("block_auto_adjust_ff_dim", True):
        return size
    size = int(2 * size / 3)
    if config.values["block_ffn_dim_multiplier"] is not None:
        multiple = config.integer("block_multiple_of", 1, MAX_WIDTH)
        size = -(-int(config.positive("block_ffn_dim_multiplier") * size) // multiple) * multiple
    if not 1 <= size <= MAX_WIDTH:
        raise config.refused("block_ffn_dim_multiplier", f"a number that gives an MLP of 1 to {MAX_WIDTH} columns")
    return size


def derive_layers(config: ConfigTable) -> Mapping[str, Any]:
    """Return the keys that files have in another form: layers without KV heads have a convolution."""
    num_kv_heads, has_attention = read_kv_heads(config)
    return {
        "num_key_value_heads": num_kv_heads,
        "layer_types": ["full_attention" if each else "conv" for each in has_attention],
        "norm_eps": config.values["rms_norm_eps"],
    }


def _derive(config: ConfigTable) -> Mapping[str, Any]:
    """Return `derive_layers`; files have the size of the MLP after its adjustment."""
    return {**derive_layers(config), "block_auto_adjust_ff_dim": False}


LFM2 = Family(
    ("Lfm2ForCausalLM",),
    ("lfm2",),
    read_lfm2,
    GGUFFormat("lfm2", KEYS | {"conv_L_cache": "shortconv.l_cache"}, LFM2_GGUF_NAMES, derive=_derive),
)
