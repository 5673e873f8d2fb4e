"""MiniCPM: Llama with factors of the embeddings, of the output of attention and MLP, and of the logits.

MiniCPM 3 has latent attention. MiniCPM 1, 2 and 4 come with code of their own, which is not run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..config_json import MAX_HEADS, MAX_WIDTH, ConfigTable, build_spec, num_layers
from ..config_rope import read_rope
from ..gguf_config import KEYS, GGUFFormat
from ..spec import DecoderSpec
from .deepseek import build_latent_spec, with_rotated_heads
from .family import Family

DEFAULTS: dict[str, Any] = {
    "dim_model_base": 1,
    "eos_token_id": 2,
    "max_position_embeddings": 2048,
    "scale_depth": 1,
    "scale_emb": 1,
    "tie_word_embeddings": True,
}
MINICPM3_DEFAULTS: dict[str, Any] = {
    "dim_model_base": 256,
    "hidden_size": 2560,
    "intermediate_size": 6400,
    "kv_lora_rank": 256,
    "max_position_embeddings": 32_768,
    "num_attention_heads": 40,
    "num_hidden_layers": 62,
    "q_lora_rank": 768,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "rms_norm_eps": 1e-5,
    "scale_depth": 1.4,
    "scale_emb": 12,
    "tie_word_embeddings": True,
    "vocab_size": 73_448,
}
NO_BIASES = ("attention_bias", "mlp_bias")
GGUF_KEYS = {"scale_emb": "embedding_scale", "residual_scale": "residual_scale", "logit_scale": "logit_scale"}


def read_minicpm(config: ConfigTable) -> DecoderSpec:
    """Read a `MiniCPMForCausalLM`."""
    config = config.with_defaults(DEFAULTS)
    config.integer("num_experts", 0, 0, 0)
    if "sparse_config" in config:
        raise config.refused("sparse_config", "absent or null: each token attends to all earlier ones")
    return _with_factors(config, build_spec(config, "minicpm", read_rope(config)))


def read_minicpm3(config: ConfigTable) -> DecoderSpec:
    """Read a `MiniCPM3ForCausalLM`."""
    given = config.with_defaults(MINICPM3_DEFAULTS)
    hidden_size = given.integer("hidden_size", 1, MAX_WIDTH)
    heads = given.integer("num_attention_heads", 1, MAX_HEADS)
    meanings = {"q_lora_rank": 0, "v_head_dim": hidden_size // heads}  # 0: queries are products of the layer's input
    nulls = {key: value for key, value in meanings.items() if key not in given}
    config = with_rotated_heads(ConfigTable({**given.values, **nulls}, given.where, given.source, given.names))
    return _with_factors(config, build_latent_spec(config, "minicpm3", interleaved=False))


def _with_factors(config: ConfigTable, spec: DecoderSpec) -> DecoderSpec:
    for key in NO_BIASES:
        if config.flag(key, False):
            raise config.refused(key, "absent or false: layers have no biases")
    return replace(
        spec,
        embedding_scale=config.positive("scale_emb"),
        residual_scale=config.positive("scale_depth", spec.num_layers**0.5) / spec.num_layers**0.5,
        logits_scale=config.positive("dim_model_base", spec.hidden_size) / spec.hidden_size,
    )


def _derive(config: ConfigTable) -> Mapping[str, Any]:
    """Return the keys that files have in another form."""
    hidden_size = config.integer("hidden_size", 1, MAX_WIDTH)
    return {
        "scale_emb": config.positive("scale_emb", 1.0),
        "scale_depth": config.positive("residual_scale", 1.0) * num_layers(config) ** 0.5,
        "dim_model_base": hidden_size / config.positive("logit_scale", 1.0),
    }


MINICPM = Family(
    ("MiniCPMForCausalLM",),
    ("minicpm",),
    read_minicpm,
    GGUFFormat("minicpm", KEYS | GGUF_KEYS, neighboring_pairs=True, derive=_derive),
)
MINICPM3 = Family(("MiniCPM3ForCausalLM",), ("minicpm3",), read_minicpm3)
