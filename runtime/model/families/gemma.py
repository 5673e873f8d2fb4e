"""What Gemma 2 and 3 share: norms around attention and MLP whose weights are stored less 1, embeddings times
sqrt(hidden_size), a MLP with GELU, scores scaled by a number of config.json, and caps.
"""

from __future__ import annotations

from dataclasses import replace

from ..config_json import MAX_POSITIONS, ConfigTable, build_spec, read_activation, windows_by_type
from ..spec import DecoderSpec, Rope, TensorNames

NAMES = TensorNames(mlp_norm="pre_feedforward_layernorm")


def build_gemma(config: ConfigTable, family: str, rope: Rope, full_every: int) -> DecoderSpec:
    """Read the keys of both families; without `layer_types` one layer in `full_every` sees all tokens, others slide."""
    if config.flag("use_bidirectional_attention", False):
        raise config.refused("use_bidirectional_attention", "false: attention is causal")
    spec = build_spec(config, family, rope)
    attention_bias = config.flag("attention_bias", False)
    return replace(
        spec,
        windows=_windows(config, spec.num_layers, full_every),
        attention_scale=config.positive("query_pre_attn_scalar") ** -0.5,
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        activation=read_activation(config, "hidden_activation"),
        post_norms=True,
        norm_offset=1.0,
        embedding_scale=spec.hidden_size**0.5,
        round_embedding_scale=True,
        attention_softcap=_cap(config, "attn_logit_softcapping"),
        logits_softcap=_cap(config, "final_logit_softcapping"),
        names=NAMES,
    )


def _windows(config: ConfigTable, layers: int, full_every: int) -> tuple[int, ...]:
    window = config.integer("sliding_window", 1, MAX_POSITIONS)
    if "layer_types" in config:
        return windows_by_type(config, layers, window)
    return tuple(0 if (layer + 1) % full_every == 0 else window for layer in range(layers))


def _cap(config: ConfigTable, key: str) -> float:
    """Return the cap under `key`; 0 for null."""
    return config.positive(key) if key in config else 0.0
