"""Mixtral: Mistral with a mixture of experts in every layer, whose weights are w1 (gate), w2 (down) and w3 (up)."""

from __future__ import annotations

from dataclasses import replace

from ..config_json import ConfigTable, build_spec, read_experts, sliding_window
from ..config_rope import read_rope
from ..gguf_config import EXPERT_KEYS, KEYS, GGUFFormat
from ..spec import DecoderSpec, TensorNames
from .family import Family

NAMES = TensorNames(
    router="block_sparse_moe.gate",
    expert_gate_up=("block_sparse_moe.experts.{}.w1", "block_sparse_moe.experts.{}.w3"),
    expert_down="block_sparse_moe.experts.{}.w2",
)


def read_mixtral(config: ConfigTable) -> DecoderSpec:
    """Read a `MixtralForCausalLM`."""
    config = config.with_defaults(
        {"eos_token_id": 2, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "num_local_experts": 8, "num_experts_per_tok": 2}
    )
    spec = build_spec(config, "mixtral", read_rope(config))
    experts = read_experts(config, "num_local_experts", "intermediate_size", normalized=True)
    return replace(spec, windows=(sliding_window(config),) * spec.num_layers, experts=experts, names=NAMES)


MIXTRAL = Family(
    ("MixtralForCausalLM",),
    ("mixtral",),
    read_mixtral,
    GGUFFormat("llama", KEYS | EXPERT_KEYS, neighboring_pairs=True, experts=True),
)
