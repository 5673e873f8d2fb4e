"""Granite 4: Mamba-2 in most layers, attention without rotary embedding in the others, and Granite's multipliers.

Models with experts have one in each layer that computes every token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..config_json import MAX_EXPERTS, MAX_WIDTH, ConfigTable, build_spec, read_experts, read_head_dim
from ..config_rope import read_rope
from ..gguf_config import EXPERT_KEYS, KEYS, GGUFFormat, read_kv_heads
from ..spec import DecoderSpec, Experts, TensorNames
from .family import Family
from .granite import GGUF_KEYS, with_multipliers
from .mamba import MAMBA_DEFAULTS, MAMBA_KEYS, layer_kinds, read_mamba

NAMES = TensorNames(
    gate_up=("shared_mlp.input_linear",),
    down="shared_mlp.output_linear",
)
EXPERT_NAMES = TensorNames(
    router="block_sparse_moe.router.layer",
    expert_gate_up=("block_sparse_moe.input_linear",),
    expert_down="block_sparse_moe.output_linear",
    shared_gate_up=("shared_mlp.input_linear",),
    shared_down="shared_mlp.output_linear",
)
DEFAULTS: dict[str, Any] = {
    **MAMBA_DEFAULTS,
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
    "eos_token_id": 2,
    "shared_intermediate_size": 1024,
    "intermediate_size": 11_008,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}


def read_granite_hybrid(config: ConfigTable) -> DecoderSpec:
    """Read a `GraniteMoeHybridForCausalLM`."""
    config = config.with_defaults(DEFAULTS)
    size = config.integer("shared_intermediate_size", 1, MAX_WIDTH)
    shared = ConfigTable({**config.values, "intermediate_size": size}, config.where, config.source, config.names)
    kinds = layer_kinds(config, "layer_types")
    is_mamba = tuple(kind == "mamba" for kind in kinds)
    rotates = config.text("position_embedding_type", "nope") == "rope"
    rope = read_rope(config)
    spec = with_multipliers(config, build_spec(shared, "granite_hybrid", rope))
    attention_bias = config.flag("attention_bias", False)
    experts = _read_experts(config, size, spec.residual_scale)
    return replace(
        spec,
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        ropes=tuple(None if mamba or not rotates else rope for mamba in is_mamba),
        mamba=read_mamba(config, is_mamba) if any(is_mamba) else None,
        experts=experts,
        names=NAMES if experts is None else EXPERT_NAMES,
    )


def _read_experts(config: ConfigTable, shared_size: int, scale: float) -> Experts | None:
    """Read the experts, whose results are multiplied by `scale`; None for a model with MLPs."""
    if config.integer("num_local_experts", 0, MAX_EXPERTS) == 0:
        return None
    experts = read_experts(config, "num_local_experts", "intermediate_size", normalized=True)
    return replace(experts, rule=replace(experts.rule, scale=scale), shared_size=shared_size)


def _derive(config: ConfigTable) -> Mapping[str, Any]:
    """Return the keys that files have in another form: layers without KV heads have a Mamba-2 mixer."""
    num_kv_heads, has_attention = read_kv_heads(config)
    return {
        "num_key_value_heads": num_kv_heads,
        "layer_types": ["attention" if each else "mamba" for each in has_attention],
        "attention_multiplier": config.positive("attention_multiplier", read_head_dim(config) ** -0.5),
        "position_embedding_type": "rope" if config.flag("rotates", True) else "nope",
        "num_local_experts": config.values["num_local_experts"] or 0,
    }


GRANITE_HYBRID = Family(
    ("GraniteMoeHybridForCausalLM",),
    ("granitemoehybrid",),
    read_granite_hybrid,
    GGUFFormat(
        "granitehybrid",
        KEYS | GGUF_KEYS | MAMBA_KEYS | EXPERT_KEYS | {"shared_intermediate_size": "expert_shared_feed_forward_length"},
        neighboring_pairs=True,
        derive=_derive,
    ),
)
