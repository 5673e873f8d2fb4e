"""ModernBERT: rotary embeddings, layers that alternate between all tokens and a window, gated GELU, no biases."""

from __future__ import annotations

from dataclasses import replace

from ..config_json import MAX_POSITIONS, MAX_WIDTH, ConfigTable
from ..config_rope import rope_of
from ..spec import Rope
from .family import GATED_ACTIVATIONS, EncoderFamily, build_bert_spec, read_named
from .spec import Activation, BertSpec, EncoderNames, Pooling, Projection

LAYER_KINDS = ("full_attention", "sliding_attention")
OLD_THETAS = {"full_attention": ("global_rope_theta", 160_000.0), "sliding_attention": ("local_rope_theta", 10_000.0)}
HEAD_ACTIVATIONS: dict[str, Activation] = {
    "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu", "tanh": "tanh",
}  # fmt: skip
POOLINGS: dict[str, Pooling] = {"cls": "first", "mean": "mean"}
NAMES = EncoderNames(
    words="embeddings.tok_embeddings",
    embedding_norm="embeddings.norm",
    layer="layers.{}.",
    qkv=("attn.Wqkv",),
    o="attn.Wo",
    attention_norm="attn_norm",
    up=("mlp.Wi",),
    down="mlp.Wo",
    mlp_norm="mlp_norm",
)


def read_modernbert(config: ConfigTable) -> BertSpec:
    """Read a `ModernBertModel`."""
    activation = read_named(config, "hidden_activation", GATED_ACTIVATIONS, "gelu")
    ropes = {kind: _rope(config, kind) for kind in LAYER_KINDS}
    spec = build_bert_spec(config, "modernbert", activation, ropes["full_attention"])
    kinds = _kinds(config, spec.num_layers)
    window = config.integer("local_attention", 2, MAX_POSITIONS, 128) // 2
    attention_bias = config.flag("attention_bias", False)
    mlp_bias = config.flag("mlp_bias", False)
    return replace(
        spec,
        norm_eps=config.positive("norm_eps", 1e-5),
        gated=True,
        ropes=tuple(ropes[kind] for kind in kinds),
        windows=tuple(window if kind == "sliding_attention" else 0 for kind in kinds),
        pre_norms=True,
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        up_bias=mlp_bias,
        down_bias=mlp_bias,
        norm_bias=config.flag("norm_bias", False),
        names=NAMES,
    )


def _kinds(config: ConfigTable, layers: int) -> tuple[str, ...]:
    """Return the kind of each layer: `layer_types`, or full attention in every `global_attn_every_n_layers`th layer."""
    if "layer_types" not in config:
        every = config.integer("global_attn_every_n_layers", 1, 1 << 30, 3)
        return tuple(LAYER_KINDS[bool(layer % every)] for layer in range(layers))
    types = config.values["layer_types"]
    if not isinstance(types, list) or len(types) != layers or any(kind not in LAYER_KINDS for kind in types):
        raise config.refused("layer_types", f"{layers} times {' or '.join(LAYER_KINDS)}")
    return tuple(types)


def _rope(config: ConfigTable, kind: str) -> Rope:
    """Return the rotary embedding of one kind of layer, as transformers 5 or 4 writes it."""
    key, theta = OLD_THETAS[kind]
    if kind == "sliding_attention" and key in config.values and config.values[key] is None:
        key, theta = OLD_THETAS["full_attention"]
    return rope_of(config.with_defaults({key: theta}), config.table("rope_parameters").table(kind), theta_key=key)


def read_modernbert_head(config: ConfigTable, labels: int) -> tuple[Projection, ...]:
    """Return the layers of a `ModernBertForSequenceClassification`."""
    hidden = config.integer("hidden_size", 1, MAX_WIDTH)
    return (
        Projection(
            tensor="head.dense",
            in_features=hidden,
            out_features=hidden,
            bias=config.flag("classifier_bias", False),
            activation=read_named(config, "classifier_activation", HEAD_ACTIVATIONS, "gelu"),
            norm="head.norm",
            norm_bias=config.flag("norm_bias", False),
            norm_eps=config.positive("norm_eps", 1e-5),
        ),
        Projection(tensor="classifier", in_features=hidden, out_features=labels),
    )


def read_head_pooling(config: ConfigTable) -> Pooling:
    """Return the input of a classification head."""
    return read_named(config, "classifier_pooling", POOLINGS, "cls")


MODERNBERT = EncoderFamily(
    "ModernBert", ("modernbert",), read_modernbert, read_modernbert_head, read_head_pooling, prefix="model."
)
