"""OLMo Hybrid: gated delta nets in three of four layers, which norm their input; OLMo 2's attention in the others.

Where the base of the rotary embedding is null, heads are not rotated.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..config_json import MAX_HEADS, ConfigTable, num_layers
from ..config_rope import read_rope
from ..spec import DecoderSpec, TensorNames
from .family import Family
from .olmo2 import build_olmo
from .qwen3_next import read_delta, read_linear_layers

DEFAULTS: dict[str, Any] = {  # defaults of transformers' config class
    "vocab_size": 100_352,
    "hidden_size": 3840,
    "intermediate_size": 11_008,
    "num_hidden_layers": 32,
    "num_attention_heads": 30,
    "max_position_embeddings": 65_536,
    "eos_token_id": 100_257,
    "linear_conv_kernel_dim": 4,
}
DELTA_NORM_EPS = 1e-5  # epsilon of the norm after a recurrence; config.json does not have it
NAMES = TensorNames(
    input_norm="attention_layer_norm",
    mlp_norm="feedforward_layer_norm",
    delta_qkv=("linear_attn.q_proj", "linear_attn.k_proj", "linear_attn.v_proj"),
    delta_gate="linear_attn.g_proj",
    delta_rates=("linear_attn.b_proj", "linear_attn.a_proj"),
    delta_conv=("linear_attn.q_conv1d", "linear_attn.k_conv1d", "linear_attn.v_conv1d"),
    delta_norm="linear_attn.o_norm",
    delta_out="linear_attn.o_proj",
)


def read_olmo_hybrid(config: ConfigTable) -> DecoderSpec:
    """Read an `OlmoHybridForCausalLM`."""
    config = _with_sizes(config.with_defaults(DEFAULTS))
    rope = read_rope(config)
    spec = build_olmo(config, "olmo_hybrid", rope)
    is_linear = read_linear_layers(config)
    delta = read_delta(config, is_linear, DELTA_NORM_EPS)
    if delta is not None:
        rate_scale = 2.0 if config.flag("linear_allow_neg_eigval", True) else 1.0
        delta = replace(delta, rate_scale=rate_scale, pre_norms=True)
    rotates = config.table("rope_parameters").values.get("rope_theta", ...) is not None
    return replace(
        spec,
        ropes=tuple(rope if rotates and not linear else None for linear in is_linear),
        delta=delta,
        names=NAMES,
    )


def _with_sizes(config: ConfigTable) -> ConfigTable:
    """Return the config with the sizes of gated delta nets, which follow from other sizes where they are absent."""
    heads = config.integer("num_attention_heads", 1, MAX_HEADS)
    key_heads = config.integer("linear_num_key_heads", 1, MAX_HEADS, heads)
    hidden = config.values["hidden_size"]
    key_dim = 3 * hidden // (4 * key_heads) if type(hidden) is int else None  # three quarters of the hidden size
    key_dim = config.values.get("linear_key_head_dim") or key_dim
    sizes = {
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": heads,
        "linear_key_head_dim": key_dim,
        "linear_value_head_dim": 2 * key_dim if type(key_dim) is int else None,
        "layer_types": _default_layers(config),
    }
    absent = {key: value for key, value in sizes.items() if key not in config}
    return ConfigTable({**config.values, **absent}, config.where, config.source, config.names)


def _default_layers(config: ConfigTable) -> list[str]:
    """Return the kinds of layers: every fourth one has attention, at least the last one."""
    kinds = ["full_attention" if layer % 4 == 3 else "linear_attention" for layer in range(num_layers(config))]
    return kinds if "full_attention" in kinds else [*kinds[:-1], "full_attention"]


OLMO_HYBRID = Family(("OlmoHybridForCausalLM",), ("olmo_hybrid",), read_olmo_hybrid)
