"""DistilBERT: half of BERT's layers, no token types, and config.json with names of its own."""

from __future__ import annotations

from dataclasses import replace

from ..config_json import MAX_WIDTH, ConfigTable
from .bert import ACTIVATIONS
from .family import EncoderFamily, build_bert_spec, read_named
from .spec import BertSpec, EncoderNames, Projection

OWN_NAMES = {
    "hidden_size": "dim",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "intermediate_size": "hidden_dim",
}
NORM_EPS = 1e-12  # config.json has none
NAMES = EncoderNames(
    layer="transformer.layer.{}.",
    qkv=("attention.q_lin", "attention.k_lin", "attention.v_lin"),
    o="attention.out_lin",
    attention_norm="sa_layer_norm",
    up=("ffn.lin1",),
    down="ffn.lin2",
    mlp_norm="output_layer_norm",
)


def read_distilbert(config: ConfigTable) -> BertSpec:
    """Read a `DistilBertModel`."""
    config = _renamed(config).with_defaults({"max_position_embeddings": 512})
    spec = build_bert_spec(config, "distilbert", read_named(config, "activation", ACTIVATIONS, "gelu"), None)
    return replace(spec, norm_eps=NORM_EPS, num_positions=spec.max_position_embeddings, names=NAMES)


def read_distilbert_head(config: ConfigTable, labels: int) -> tuple[Projection, ...]:
    """Return the layers of a `DistilBertForSequenceClassification`."""
    hidden = _renamed(config).integer("hidden_size", 1, MAX_WIDTH)
    return (
        Projection(tensor="pre_classifier", in_features=hidden, out_features=hidden, activation="relu"),
        Projection(tensor="classifier", in_features=hidden, out_features=labels),
    )


def _renamed(config: ConfigTable) -> ConfigTable:
    """Return the config under the names that other families use."""
    values = {key: config.values[own] for key, own in OWN_NAMES.items() if own in config.values}
    return ConfigTable({**config.values, **values}, names=OWN_NAMES)


DISTILBERT = EncoderFamily("DistilBert", ("distilbert",), read_distilbert, read_distilbert_head, prefix="distilbert.")
