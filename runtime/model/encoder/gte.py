"""GTE 1.5 and multilingual GTE: BERT with rotary embeddings, gated GELU and packed matrices.

Alibaba's own code calls the model `New`, and Snowflake's copy of it `Gte`.
"""

from __future__ import annotations

from dataclasses import replace
from decimal import Decimal

from ..config_json import MAX_WIDTH, ConfigTable, read_head_dim
from ..config_rope import rope_of
from ..spec import LinearScaling, Rope
from .bert import MAX_TYPES
from .family import GATED_ACTIVATIONS, EncoderFamily, build_bert_spec, read_named
from .spec import BertSpec, EncoderNames, Projection

MAX_FACTOR = 1e6
TEXTS = {"position_embedding_type": "rope", "layer_norm_type": "layer_norm"}  # key -> the only supported value
FLAGS = {"pack_qkv": True, "logn_attention_scale": False}  # flag -> the only supported value and default
NAMES = EncoderNames(
    qkv=("attention.qkv_proj",),
    o="attention.o_proj",
    attention_norm="attn_ln",
    up=("mlp.up_gate_proj",),
    down="mlp.down_proj",
    mlp_norm="mlp_ln",
)


def read_gte(config: ConfigTable) -> BertSpec:
    """Read a `NewModel`."""
    for key, text in TEXTS.items():
        if config.text(key, text) != text:
            raise config.refused(key, f'"{text}" or absent')
    for key, flag in FLAGS.items():
        if config.flag(key, flag) != flag:
            raise config.refused(key, f"{str(flag).lower()} or absent")
    activation = read_named(config, "hidden_act", GATED_ACTIVATIONS, "gelu")
    return replace(
        build_bert_spec(config, "gte", activation, _rope(config)),
        gated=True,
        up_first=True,
        num_types=config.integer("type_vocab_size", 0, MAX_TYPES, 1),
        up_bias=False,
        names=NAMES,
    )


def _rope(config: ConfigTable) -> Rope:
    """Return the rotary embedding. The scaling `ntk` has a larger base and divides all frequencies, at any length."""
    scaling = config.table("rope_scaling")
    if scaling.text("type", scaling.text("rope_type", "default")) != "ntk":
        return rope_of(config, scaling)
    if scaling.values.get("mixed_b") is not None:
        raise scaling.refused("mixed_b", "null or absent")
    factor = scaling.positive("factor")
    if not 1 <= factor <= MAX_FACTOR:
        raise scaling.refused("factor", f"from 1 to {MAX_FACTOR:g}")
    plain = rope_of(config, ConfigTable({}))
    divisor = Decimal(factor) ** (Decimal(2) / read_head_dim(config))
    return Rope(plain.theta * factor, LinearScaling(float(divisor)))


def read_gte_head(config: ConfigTable, labels: int) -> tuple[Projection, ...]:
    """Return the layers of a `NewForSequenceClassification`."""
    hidden = config.integer("hidden_size", 1, MAX_WIDTH)
    return (
        Projection(tensor="new.pooler.dense", in_features=hidden, out_features=hidden, activation="tanh"),
        Projection(tensor="classifier", in_features=hidden, out_features=labels),
    )


GTE = EncoderFamily("New", ("new",), read_gte, read_gte_head, prefix="new.")
SNOWFLAKE_GTE = EncoderFamily("Gte", ("gte",), read_gte)
