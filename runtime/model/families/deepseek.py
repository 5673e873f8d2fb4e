"""DeepSeek-V2, DeepSeek-V3 and GLM-4.7-Flash: latent attention, and many small experts with shared ones beside them.

The first layers have an MLP. V2's router has a softmax. The other routers have sigmoids and a bias for the choice,
and V3's experts may be in groups. Models of Moonshot AI with these architectures (Moonlight, Kimi K2) are read as V3.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ....kernels.ops import BLOCK, RoutingRule
from ..config_json import (
    MAX_EXPERTS,
    MAX_HEAD_DIM,
    MAX_HEADS,
    MAX_LAYERS,
    MAX_WIDTH,
    ConfigTable,
    build_spec,
    layers_after,
    num_layers,
    read_experts,
    read_experts_in_groups,
    shared_experts_size,
)
from ..config_rope import read_rope, shared_rope_table, yarn_factor
from ..gguf_config import KEYS, NEXT_TOKENS, SIGMOID, GGUFFormat
from ..spec import SHARED_EXPERTS, DecoderSpec, Experts, Latent
from .family import Family

MAX_KEY = 1024  # QUIRE_MAX_HEAD of the kernels
NORM_EPS = 1e-6  # epsilon of the norms of latents, whatever rms_norm_eps is
YARN_MULTIPLIER = 0.1  # GGUF files have mscale_all_dim times this number
VALUES_OF_NULL: dict[str, Any] = {  # q_lora_rank 0: queries are products of the layer's input
    "n_group": 1,
    "norm_topk_prob": False,
    "q_lora_rank": 0,
    "routed_scaling_factor": 1.0,
    "topk_group": 1,
}
V2_DEFAULTS: dict[str, Any] = {  # defaults of transformers' config classes
    "eos_token_id": 2,
    "first_k_dense_replace": 0,
    "intermediate_size": 11_008,
    "kv_lora_rank": 512,
    "max_position_embeddings": 2048,
    "moe_intermediate_size": 1407,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 102_400,
}
V3_DEFAULTS: dict[str, Any] = V2_DEFAULTS | {
    "eos_token_id": 1,
    "first_k_dense_replace": 3,
    "hidden_size": 7168,
    "intermediate_size": 18_432,
    "max_position_embeddings": 4096,
    "moe_intermediate_size": 2048,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "rope_interleave": True,
    "routed_scaling_factor": 2.5,
    "topk_group": 4,
    "vocab_size": 129_280,
}
GLM_DEFAULTS: dict[str, Any] = V3_DEFAULTS | {
    "hidden_size": 2048,
    "intermediate_size": 10_240,
    "max_position_embeddings": 202_752,
    "moe_intermediate_size": 1536,
    "n_group": 1,
    "n_routed_experts": 64,
    "num_attention_heads": 20,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 47,
    "q_lora_rank": 768,
    "qk_nope_head_dim": 192,
    "rms_norm_eps": 1e-5,
    "routed_scaling_factor": 1.8,
    "topk_group": 1,
    "v_head_dim": 256,
    "vocab_size": 154_880,
}


def read_deepseek_v2(config: ConfigTable) -> DecoderSpec:
    """Read a `DeepseekV2ForCausalLM`."""
    config = _with_defaults(config, V2_DEFAULTS)
    method = config.text("topk_method", "greedy")
    if method != "greedy":
        raise config.refused("topk_method", '"greedy": groups of experts by their largest score are unsupported')
    if config.flag("norm_topk_prob", False):
        raise config.refused("norm_topk_prob", "false: the weights of V2's experts are not normalized")
    rule = RoutingRule(normalized=False, scale=config.positive("routed_scaling_factor", 1.0))
    layers = layers_after(config, "first_k_dense_replace")
    experts = None
    if any(layers):
        experts = read_experts(config, "n_routed_experts", "moe_intermediate_size", normalized=False, layers=layers)
        experts = replace(experts, rule=rule)
    return _build(config, "deepseek_v2", "softmax", experts, interleaved=True)


def read_deepseek_v3(config: ConfigTable) -> DecoderSpec:
    """Read a `DeepseekV3ForCausalLM`."""
    config = _with_defaults(config, V3_DEFAULTS)
    experts = read_experts_in_groups(config, layers_after(config, "first_k_dense_replace"))
    return _build(config, "deepseek_v3", "sigmoid", experts, config.flag("rope_interleave", False))


def read_glm4_moe_lite(config: ConfigTable) -> DecoderSpec:
    """Read a `Glm4MoeLiteForCausalLM`."""
    config = _with_defaults(config, GLM_DEFAULTS)
    count = num_layers(config)
    kinds = config.values.get("mlp_layer_types") or ["dense"] + ["sparse"] * (count - 1)
    if not isinstance(kinds, list) or len(kinds) != count or any(kind not in ("dense", "sparse") for kind in kinds):
        raise config.refused("mlp_layer_types", f"{count} times dense or sparse")
    layers = tuple(kind == "sparse" for kind in kinds)
    experts = read_experts_in_groups(config, layers)
    return _build(config, "glm4_moe_lite", "sigmoid", experts, config.flag("rope_interleave", False))


def _with_defaults(config: ConfigTable, defaults: dict[str, Any]) -> ConfigTable:
    """Return config.json with defaults, and with the heads that `build_spec` reads: those of the rotary embedding."""
    if config.values.get("q_lora_rank") == 0:
        raise config.refused("q_lora_rank", "null or at least 1")
    given = {key: value for key, value in VALUES_OF_NULL.items() if config.values.get(key, value) is None}
    merged = ConfigTable({**config.values, **given}, config.where, config.source, config.names).with_defaults(defaults)
    return with_rotated_heads(merged)


def with_rotated_heads(config: ConfigTable) -> ConfigTable:
    """Return config.json with the heads of the rotary embedding, which `build_spec` reads."""
    rotated = config.integer("qk_rope_head_dim", 2, MAX_HEAD_DIM)
    heads = config.integer("num_attention_heads", 1, MAX_HEADS)
    values = {**config.values, "head_dim": rotated, "num_key_value_heads": heads}
    return ConfigTable(values, config.where, config.source, config.names)


def _build(config: ConfigTable, family: str, scoring: str, experts: Experts | None, interleaved: bool) -> DecoderSpec:
    if config.text("scoring_func", scoring) != scoring:
        raise config.refused("scoring_func", f'"{scoring}", as in the published models')
    config.integer("moe_layer_freq", 1, 1, 1)
    for key in ("attention_bias", "mlp_bias"):
        if config.flag(key, False):
            raise config.refused(key, "absent or false: layers with latent attention have no biases")
    return replace(
        build_latent_spec(config, family, interleaved),
        experts=_with_shared(config, experts) if experts is not None and any(experts.layers) else None,
        names=SHARED_EXPERTS,
    )


def build_latent_spec(config: ConfigTable, family: str, interleaved: bool) -> DecoderSpec:
    """Read the spec of a model with latent attention. The config comes from `with_rotated_heads`."""
    latent = _read_latent(config, interleaved)
    rope = replace(read_rope(config), dim=latent.rope_dim)
    return replace(
        build_spec(config, family, rope),
        num_kv_heads=1,
        head_dim=latent.key_dim,
        attention_scale=latent.query_dim**-0.5 * _scale_of_yarn(config),
        latent=latent,
    )


def _read_latent(config: ConfigTable, interleaved: bool) -> Latent:
    latent = Latent(
        rank=config.integer("kv_lora_rank", BLOCK, MAX_KEY - BLOCK),
        query_rank=config.integer("q_lora_rank", 0, MAX_WIDTH),
        nope_dim=config.integer("qk_nope_head_dim", 1, MAX_KEY),
        rope_dim=config.integer("qk_rope_head_dim", 2, MAX_KEY),
        value_dim=config.integer("v_head_dim", BLOCK, MAX_KEY),
        norm_eps=NORM_EPS,
        neighboring_pairs=interleaved,
    )
    for key, value in (("kv_lora_rank", latent.rank), ("v_head_dim", latent.value_dim)):
        if value % BLOCK:
            raise config.refused(key, f"a multiple of {BLOCK}")
    if latent.rope_dim % 2 or latent.key_dim > MAX_KEY:
        raise config.refused("qk_rope_head_dim", f"even, and at most {MAX_KEY} with kv_lora_rank ({latent.rank})")
    return latent


def _scale_of_yarn(config: ConfigTable) -> float:
    """Return the factor of scores: the square of YaRN's factor of queries and keys for `mscale_all_dim`."""
    table = shared_rope_table(config)
    if table.text("rope_type", table.text("type", "default")) == "default" or not table.values.get("mscale_all_dim"):
        return 1.0
    factor = table.positive("factor")
    return yarn_factor(factor, table.positive("mscale_all_dim")) ** 2


def _with_shared(config: ConfigTable, experts: Experts) -> Experts:
    if "n_shared_experts" not in config:
        return experts
    return replace(experts, shared_size=shared_experts_size(config, "n_shared_experts", 0, experts))


def _gguf(has_sigmoids: bool) -> GGUFFormat:
    """Return the form of files whose router has sigmoids, or a softmax: V3's and GLM's, or V2's."""
    keys = {key: name for key, name in KEYS.items() if key != "num_key_value_heads"}
    return GGUFFormat(
        "deepseek2",
        keys
        | {
            "head_dim": "rope.dimension_count",
            "rope_scaling.log_multiplier": "rope.scaling.yarn_log_multiplier",
            "kv_lora_rank": "attention.kv_lora_rank",
            "q_lora_rank": "attention.q_lora_rank",
            "query_dim": "attention.key_length_mla",
            "v_head_dim": "attention.value_length_mla",
            "first_k_dense_replace": "leading_dense_block_count",
            "n_routed_experts": "expert_count",
            "num_experts_per_tok": "expert_used_count",
            "n_shared_experts": "expert_shared_count",
            "moe_intermediate_size": "expert_feed_forward_length",
            "routed_scaling_factor": "expert_weights_scale",
            "norm_topk_prob": "expert_weights_norm",
            "scoring_func": "expert_gating_func",
            "next_tokens": NEXT_TOKENS,
        }
        | ({"n_group": "expert_group_count", "topk_group": "expert_group_used_count"} if has_sigmoids else {}),
        neighboring_pairs=True,
        experts=True,
        latent=True,
        marker="expert_gating_func" if has_sigmoids else "",
        marked_by=SIGMOID if has_sigmoids else 0,
        derive=_derive,
    )


def _derive(config: ConfigTable) -> Mapping[str, Any]:
    """Return the keys of config.json that files have in another form.

    YaRN's factor of scores is there, and its factor of queries and keys is 1.
    """
    rotated = config.integer("head_dim", 2, MAX_KEY)
    query_dim = config.integer("query_dim", rotated + 1, MAX_KEY)
    layers = num_layers(config) - config.integer("next_tokens", 0, num_layers(config) - 1, 0)
    given = config.integer("scoring_func", 0, 1 << 30, 1)
    derived: dict[str, Any] = {
        "num_hidden_layers": layers,
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": query_dim - rotated,
        "norm_topk_prob": config.flag("norm_topk_prob", False),
        "scoring_func": {1: "softmax", SIGMOID: "sigmoid"}.get(given, f"{given}"),
        "first_k_dense_replace": config.integer("first_k_dense_replace", 0, MAX_LAYERS, 0),
    }
    for key in ("n_group", "topk_group"):
        if key in config.values:
            derived[key] = config.integer(key, 0, MAX_EXPERTS, 0) or 1
    given_scaling = config.table("rope_scaling")
    scaling = {key: value for key, value in given_scaling.values.items() if key != "log_multiplier"}
    if "log_multiplier" in given_scaling:
        scaling["mscale"] = scaling["mscale_all_dim"] = given_scaling.positive("log_multiplier") / YARN_MULTIPLIER
    return {**derived, "rope_scaling": scaling}


DEEPSEEK_V2 = Family(
    ("DeepseekV2ForCausalLM",), ("deepseek_v2",), read_deepseek_v2, _gguf(has_sigmoids=False), neighboring_pairs=True
)
DEEPSEEK_V3 = Family(
    ("DeepseekV3ForCausalLM",), ("deepseek_v3",), read_deepseek_v3, _gguf(has_sigmoids=True), neighboring_pairs=True
)
GLM4_MOE_LITE = Family(("Glm4MoeLiteForCausalLM",), ("glm4_moe_lite",), read_glm4_moe_lite, neighboring_pairs=True)
