"""BERT, RoBERTa and XLM-RoBERTa: learned positions, token types, norms after the residual additions."""

from __future__ import annotations

from dataclasses import replace

from ..config_json import MAX_POSITIONS, MAX_VOCAB, MAX_WIDTH, ConfigTable
from .family import EncoderFamily, build_bert_spec, read_named
from .spec import BertSpec, MlpActivation, Projection

MAX_TYPES = 1 << 16
ACTIVATIONS: dict[str, MlpActivation] = {
    "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu",
}  # fmt: skip


def read_bert(config: ConfigTable) -> BertSpec:
    """Read a `BertModel`."""
    return read_bert_from(config, "bert", 0)


def read_roberta(config: ConfigTable) -> BertSpec:
    """Read a `RobertaModel`, whose positions begin after the padding token's."""
    return read_bert_from(config, "roberta", config.integer("pad_token_id", 0, MAX_VOCAB, 1) + 1)


def read_bert_from(config: ConfigTable, family: str, first_position: int) -> BertSpec:
    """Read the keys that BERT's relatives share; the first token has row `first_position` of the positions."""
    if config.text("position_embedding_type", "absolute") != "absolute":
        raise config.refused("position_embedding_type", '"absolute" or absent')
    if config.flag("is_decoder", False):
        raise config.refused("is_decoder", "false or absent")
    num_positions = config.integer("max_position_embeddings", 1, MAX_POSITIONS)
    if num_positions <= first_position:
        raise config.refused("max_position_embeddings", f"above {first_position}, the position of the first token")
    return replace(
        build_bert_spec(config, family, read_named(config, "hidden_act", ACTIVATIONS, "gelu"), None),
        max_position_embeddings=num_positions - first_position,
        num_positions=num_positions,
        first_position=first_position,
        num_types=config.integer("type_vocab_size", 1, MAX_TYPES, 2),
    )


def read_bert_head(config: ConfigTable, labels: int) -> tuple[Projection, ...]:
    """Return the layers of a `BertForSequenceClassification`."""
    hidden = config.integer("hidden_size", 1, MAX_WIDTH)
    return (
        Projection(tensor="bert.pooler.dense", in_features=hidden, out_features=hidden, activation="tanh"),
        Projection(tensor="classifier", in_features=hidden, out_features=labels),
    )


def read_roberta_head(config: ConfigTable, labels: int) -> tuple[Projection, ...]:
    """Return the layers of a `RobertaForSequenceClassification`."""
    hidden = config.integer("hidden_size", 1, MAX_WIDTH)
    return (
        Projection(tensor="classifier.dense", in_features=hidden, out_features=hidden, activation="tanh"),
        Projection(tensor="classifier.out_proj", in_features=hidden, out_features=labels),
    )


BERT = EncoderFamily("Bert", ("bert",), read_bert, read_bert_head, prefix="bert.")
ROBERTA = EncoderFamily("Roberta", ("roberta",), read_roberta, read_roberta_head, prefix="roberta.")
XLM_ROBERTA = EncoderFamily("XLMRoberta", ("xlm-roberta",), read_roberta, read_roberta_head, prefix="roberta.")
CAMEMBERT = EncoderFamily("Camembert", ("camembert",), read_roberta, read_roberta_head, prefix="roberta.")
