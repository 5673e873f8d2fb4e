"""Gemma 4: five of six layers slide, full layers have larger heads, and the last layers may read the keys and values of
earlier ones. Small models have embeddings of their own for each layer, one model has a mixture of experts beside the
MLP.

In a checkpoint with images (`Gemma4ForConditionalGeneration`) this is the text part; its towers are not read.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ....kernels.ops import RoutingRule
from ..config_json import (
    MAX_EXPERTS,
    MAX_GROUP,
    MAX_HEAD_DIM,
    MAX_HEADS,
    MAX_LAYERS,
    MAX_POSITIONS,
    MAX_WIDTH,
    ConfigTable,
    build_spec,
    num_layers,
    read_activation,
    read_head_dim,
    sliding_layers,
    windows_by_type,
)
from ..gguf_config import KEYS, GGUFFormat
from ..spec import Activation, DecoderSpec, Experts, LinearScaling, Rope, TensorNames
from .family import Family

NAMES = TensorNames(
    mlp_norm="pre_feedforward_layernorm",
    router="router.proj",
    expert_gate_up=("experts.gate_up_proj",),
    expert_down="experts.down_proj",
)
DEFAULTS: dict[str, Any] = {  # defaults of transformers' config class; checkpoints leave out keys with default values
    "vocab_size": 262_144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131_072,
    "eos_token_id": 1,
    "tie_word_embeddings": True,
    "sliding_window": 512,
    "global_head_dim": 512,
    "hidden_size_per_layer_input": 256,
    "vocab_size_per_layer_input": 262_144,
}
UNIFIED_DEFAULTS = {"max_position_embeddings": 262_144, "sliding_window": 1024, "hidden_size_per_layer_input": 0}
ROPES: dict[str, dict[str, Any]] = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
}
FULL_EVERY = 6
LLAMA_CPP_THETA = 10_000.0  # the base of rotary embeddings in files without one
GGUF_KEYS = {
    "sliding_window": "attention.sliding_window",
    "sliding_window_pattern": "attention.sliding_window_pattern",
    "num_kv_shared_layers": "attention.shared_kv_layers",
    "head_dim_swa": "attention.key_length_swa",
    "value_dim_swa": "attention.value_length_swa",
    "rotary_dim_swa": "rope.dimension_count_swa",
    "rope_theta_swa": "rope.freq_base_swa",
    "hidden_size_per_layer_input": "embedding_length_per_layer_input",
    "final_logit_softcapping": "final_logit_softcapping",
    "num_experts": "expert_count",
    "top_k_experts": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
}


def read_gemma4(config: ConfigTable) -> DecoderSpec:
    """Read a `Gemma4ForCausalLM`."""
    unified = config.values.get("model_type") == "gemma4_unified_text"
    config = config.with_defaults(DEFAULTS | (UNIFIED_DEFAULTS if unified else {}))
    if config.values.get("use_bidirectional_attention") not in (None, "vision"):
        raise config.refused("use_bidirectional_attention", 'null or "vision": attention among text is causal')
    spec = build_spec(config, "gemma4", Rope(1.0))
    layers = spec.num_layers
    windows = _windows(config)
    own = _own_heads(config, layers)
    heads = tuple(_heads(config, own.get(layer), window == 0, spec) for layer, window in enumerate(windows))
    sources = _sources(config, windows)
    if any(heads[layer] != heads[source] for layer, source in enumerate(sources)):
        raise config.refused("num_kv_shared_layers", "such that layers read those with as many KV heads of their size")
    bias = config.flag("attention_bias", False)
    tied = config.flag("attention_k_eq_v", False)
    wide = config.flag("use_double_wide_mlp", False)
    if wide and 2 * spec.intermediate_size > MAX_WIDTH:
        raise config.refused("intermediate_size", f"at most {MAX_WIDTH // 2} with use_double_wide_mlp")
    return replace(
        spec,
        windows=windows,
        ropes=tuple(_rope(config, window == 0, each[1]) for window, each in zip(windows, heads, strict=True)),
        kv_heads=heads,
        kv_sources=sources,
        values_are_keys=tuple(tied and window == 0 for window in windows),
        intermediate_sizes=tuple(
            spec.intermediate_size * (2 if wide and sources[layer] != layer else 1) for layer in range(layers)
        ),
        attention_scale=1.0,
        qk_norm=True,
        v_norm=True,
        qkv_bias=bias,
        o_bias=bias,
        activation=_activation(config),
        post_norms=True,
        embedding_scale=spec.hidden_size**0.5,
        round_embedding_scale=True,
        logits_softcap=config.positive("final_logit_softcapping") if "final_logit_softcapping" in config else 0.0,
        layer_scales=True,
        layer_inputs=_layer_inputs(config, spec.vocab_size),
        experts=_experts(config) if config.flag("enable_moe_block", False) else None,
        names=NAMES,
    )


def read_gemma4_with_images(config: ConfigTable) -> DecoderSpec:
    """Read the text part of a `Gemma4ForConditionalGeneration`."""
    text = config.table("text_config")
    # Embeddings are tied by the whole model's key, whatever text_config has, as in transformers.
    whole: dict[str, Any] = {"tie_word_embeddings": config.flag("tie_word_embeddings", True)}
    if "eos_token_id" not in text and "eos_token_id" in config:
        whole["eos_token_id"] = config.values["eos_token_id"]
    return read_gemma4(ConfigTable({**text.values, **whole}, text.where, text.source, text.names))


def _windows(config: ConfigTable) -> tuple[int, ...]:
    """Return the window of each layer. The last layer is full, whatever config.json has, as in transformers."""
    layers = num_layers(config)
    window = config.integer("sliding_window", 1, MAX_POSITIONS)
    if "layer_types" in config:
        return (*windows_by_type(config, layers, window)[:-1], 0)
    return tuple(0 if (layer + 1) % FULL_EVERY == 0 or layer + 1 == layers else window for layer in range(layers))


def _own_heads(config: ConfigTable, layers: int) -> dict[int, ConfigTable]:
    """Return the objects of `per_layer_config` by layer. Its keys are numbers of layers, with leading zeros or not."""
    table = config.table("per_layer_config")
    own: dict[int, ConfigTable] = {}
    for key in table.values:
        layer = int(key) if key.isascii() and key.isdecimal() and len(key) <= len(str(MAX_LAYERS)) else layers
        if layer >= layers or layer in own:
            raise table.refused(key, f"absent: a key is the number of one of {layers} layers, once")
        own[layer] = table.table(key)
        if unknown := own[layer].values.keys() - {"head_dim", "num_key_value_heads"}:
            raise own[layer].refused(min(unknown), "absent: layers differ in head_dim and num_key_value_heads alone")
    return own


def _heads(config: ConfigTable, own: ConfigTable | None, is_full: bool, spec: DecoderSpec) -> tuple[int, int]:
    """Return the number and the size of a layer's KV heads.

    A layer has `own` keys where transformers 5 wrote the file; published files have one key for all full layers.
    """
    if own is not None:
        source, size, count = own, "head_dim", "num_key_value_heads"
    elif is_full and "per_layer_config" not in config:
        source, size, count = config, "global_head_dim", "num_global_key_value_heads"
    else:
        return spec.num_kv_heads, spec.head_dim
    head_dim = source.integer(size, 2, MAX_HEAD_DIM, spec.head_dim)
    if head_dim % 2:
        raise source.refused(size, f"even, because rotary embedding turns pairs (here it is {head_dim})")
    if source is config and not config.flag("attention_k_eq_v", False):
        return spec.num_kv_heads, head_dim
    kv_heads = source.integer(count, 1, MAX_HEADS, spec.num_kv_heads)
    if spec.num_heads % kv_heads or spec.num_heads // kv_heads > MAX_GROUP:
        allowed = f"a divisor of num_attention_heads ({spec.num_heads}), at most {MAX_GROUP} times smaller"
        raise source.refused(count, allowed)
    return kv_heads, head_dim


def _sources(config: ConfigTable, windows: tuple[int, ...]) -> tuple[int, ...]:
    """Return the layer whose keys and values each layer reads: of the last layers, the last one of their kind before.

    Raises UnsupportedModel if there is no such layer.
    """
    layers = len(windows)
    first = layers - config.integer("num_kv_shared_layers", 0, layers - 1, 0)
    stored = {window == 0: layer for layer, window in enumerate(windows[:first])}
    if first < layers and not {window == 0 for window in windows[first:]} <= stored.keys():
        raise config.refused("num_kv_shared_layers", "so low that an earlier layer of each kind stores keys and values")
    return tuple(layer if layer < first else stored[window == 0] for layer, window in enumerate(windows))


def _rope(config: ConfigTable, is_full: bool, head_dim: int) -> Rope:
    kind = "full_attention" if is_full else "sliding_attention"
    if "rope_parameters" not in config:
        config = ConfigTable({"rope_parameters": ROPES}, config.where, config.source, config.names)
    table = config.table("rope_parameters").table(kind)
    theta = table.positive("rope_theta")
    if theta <= 1:
        raise table.refused("rope_theta", "above 1")
    form = table.text("rope_type", "default")
    if form == "default":
        return Rope(theta, dim=head_dim)
    if form != "proportional":
        raise table.refused("rope_type", "default or proportional")
    pairs = int(table.positive("partial_rotary_factor", 1.0) * head_dim // 2)
    if not 1 <= pairs <= head_dim // 2:
        raise table.refused(
            "partial_rotary_factor", f"at most 1, and rotate a pair of the {head_dim} elements of a head"
        )
    factor = table.positive("factor", 1.0)
    return Rope(theta, None if factor == 1 else LinearScaling(factor), 2 * pairs, head_dim)


def _activation(config: ConfigTable) -> Activation:
    activation = read_activation(config, "hidden_activation")
    if activation != "gelu_tanh":
        raise config.refused("hidden_activation", '"gelu_pytorch_tanh"')
    return activation


def _layer_inputs(config: ConfigTable, vocab_size: int) -> int:
    size = config.integer("hidden_size_per_layer_input", 0, MAX_WIDTH, 0)
    if size and config.integer("vocab_size_per_layer_input", 1, 1 << 30, vocab_size) != vocab_size:
        raise config.refused("vocab_size_per_layer_input", f"{vocab_size}, the vocab_size")
    if size * num_layers(config) > MAX_WIDTH:
        raise config.refused("hidden_size_per_layer_input", f"such that all layers have at most {MAX_WIDTH} columns")
    return size


def _experts(config: ConfigTable) -> Experts:
    num_experts = config.integer("num_experts", 1, MAX_EXPERTS)
    return Experts(
        num_experts=num_experts,
        top_k=config.integer("top_k_experts", 1, num_experts),
        intermediate_size=config.integer("moe_intermediate_size", 1, MAX_WIDTH),
        rule=RoutingRule(normalized=True),
        layers=(True,) * num_layers(config),
        beside_mlp=True,
        scales=True,
    )


def _derive(config: ConfigTable) -> dict[str, Any]:
    """Return the keys of config.json that GGUF files have in another form: by layer, or under a key for each kind."""
    layers = num_layers(config)
    if not isinstance(config.values["sliding_window_pattern"], list):
        raise config.refused("sliding_window_pattern", f"a list of {layers} flags")
    slides = sliding_layers(config, layers, FULL_EVERY)
    full_size = read_head_dim(config)
    size = config.integer("head_dim_swa", 2, MAX_HEAD_DIM)
    for key in ("value_dim_swa", "rotary_dim_swa"):
        config.integer(key, size, size, size)
    if config.values["rope_scaling"]:
        raise config.refused("rope_scaling.factor", "absent: rotary embeddings are not scaled")
    heads = _kv_heads_of_file(config, layers)
    theta = config.positive("rope_theta", LLAMA_CPP_THETA)
    thetas = {"full_attention": theta, "sliding_attention": config.positive("rope_theta_swa", theta)}
    for key, each in zip(("rope_theta", "rope_theta_swa"), thetas.values(), strict=True):
        if each <= 1:
            raise config.refused(key, "above 1")
    forms = {"full_attention": "proportional", "sliding_attention": "default"}
    return {
        "layer_types": ["sliding_attention" if each else "full_attention" for each in slides],
        "head_dim": size,
        "num_key_value_heads": heads[slides.index(True) if True in slides else 0],
        "per_layer_config": {
            f"{layer}": {"head_dim": size if each else full_size, "num_key_value_heads": heads[layer]}
            for layer, each in enumerate(slides)
        },
        "rope_parameters": {kind: {"rope_type": forms[kind], "rope_theta": thetas[kind]} for kind in forms},
        "hidden_activation": DEFAULTS["hidden_activation"],
        "vocab_size_per_layer_input": None,
        "enable_moe_block": config.integer("num_experts", 0, MAX_EXPERTS, 0) > 0,
        **_mlps_of_file(config, layers),
    }


def _kv_heads_of_file(config: ConfigTable, layers: int) -> list[int]:
    """Return the number of KV heads of each layer, from a number or a list."""
    counts = config.values["num_key_value_heads"]
    each = counts if isinstance(counts, list) else [counts] * layers
    heads = config.integer("num_attention_heads", 1, MAX_HEADS)
    allowed = [count for count in range(1, heads + 1) if heads % count == 0 and heads // count <= MAX_GROUP]
    if len(each) != layers or any(type(count) is not int or count not in allowed for count in each):
        raise config.refused(
            "num_key_value_heads", f"a divisor of {heads}, at most {MAX_GROUP} times smaller, or {layers} of them"
        )
    return each


def _mlps_of_file(config: ConfigTable, layers: int) -> dict[str, Any]:
    """Return the size of MLPs, and whether layers that store no keys and values have twice this size."""
    sizes = config.values["intermediate_size"]
    if not isinstance(sizes, list):
        return {}
    shared = config.integer("num_kv_shared_layers", 0, layers - 1, 0)
    if len(sizes) != layers or sizes != [sizes[0]] * (layers - shared) + [2 * sizes[0]] * shared:
        raise config.refused(
            "intermediate_size", f"a number for all layers, or a list of {layers}: twice as much in the last {shared}"
        )
    return {"intermediate_size": sizes[0], "use_double_wide_mlp": True}


GEMMA4 = Family(
    ("Gemma4ForCausalLM", "Gemma4UnifiedForCausalLM"),
    ("gemma4_text", "gemma4_unified_text"),
    read_gemma4,
    GGUFFormat("gemma4", KEYS | GGUF_KEYS, divides_full_layers=True, derive=_derive),
)
GEMMA4_WITH_IMAGES = Family(
    ("Gemma4ForConditionalGeneration", "Gemma4UnifiedForConditionalGeneration"),
    ("gemma4", "gemma4_unified"),
    read_gemma4_with_images,
)
