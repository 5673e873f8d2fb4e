"""The struct that describes an encoder family: its names in config.json, and the readers of body and head."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from ..config_json import MAX_HEADS, MAX_POSITIONS, MAX_VOCAB, MAX_WIDTH, ConfigTable, num_layers, read_head_dim
from ..spec import Rope
from .spec import BertSpec, MlpActivation, Pooling, Projection

Name = TypeVar("Name", bound=str)

GATED_ACTIVATIONS: dict[str, MlpActivation] = {  # activation of an MLP with a gate
    "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "silu": "silu",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class EncoderFamily:
    """An encoder family. The readers raise UnsupportedModel naming the key of config.json."""

    name: str  # first part of the architectures' names
    model_types: tuple[str, ...]  # config.json's `model_type`, for files without `architectures`
    read: Callable[[ConfigTable], BertSpec]
    head: Callable[[ConfigTable, int], tuple[Projection, ...]] | None = None  # the layers of a head for n labels
    head_pooling: Callable[[ConfigTable], Pooling] = lambda config: "first"
    prefix: str = ""  # prefix of the body's tensors where the checkpoint has a head

    @property
    def architectures(self) -> tuple[str, ...]:
        """The names in config.json's `architectures[0]`."""
        kinds = ("Model", "ForMaskedLM", "ForSequenceClassification") if self.head else ("Model", "ForMaskedLM")
        return tuple(f"{self.name}{kind}" for kind in kinds)


def build_bert_spec(config: ConfigTable, family: str, activation: MlpActivation, rope: Rope | None) -> BertSpec:
    """Read the keys that all families share. All layers see all tokens and have the same `rope`.

    A family replaces the fields that differ.
    """
    layers = num_layers(config)
    return BertSpec(
        family=family,
        vocab_size=config.integer("vocab_size", 1, MAX_VOCAB),
        hidden_size=config.integer("hidden_size", 1, MAX_WIDTH),
        num_layers=layers,
        num_heads=config.integer("num_attention_heads", 1, MAX_HEADS),
        head_dim=read_plain_head_dim(config) if rope is None else read_head_dim(config),
        intermediate_size=config.integer("intermediate_size", 1, MAX_WIDTH),
        norm_eps=config.positive("layer_norm_eps", 1e-12),
        max_position_embeddings=config.integer("max_position_embeddings", 1, MAX_POSITIONS),
        activation=activation,
        ropes=(rope,) * layers,
        windows=(0,) * layers,
    )


def read_named(config: ConfigTable, key: str, names: Mapping[str, Name], default: str | None = None) -> Name:
    """Return the value of `names` for the text under `key`."""
    found = names.get(config.text(key, default))
    if found is None:
        raise config.refused(key, f"one of {', '.join(names)}")
    return found


def read_plain_head_dim(config: ConfigTable) -> int:
    """Return the size of a head without a rotary embedding."""
    hidden_size = config.integer("hidden_size", 1, MAX_WIDTH)
    num_heads = config.integer("num_attention_heads", 1, MAX_HEADS)
    head_dim = config.integer("head_dim", 1, MAX_WIDTH, hidden_size // num_heads)
    if head_dim % 2 and (hidden_size % num_heads == 0 or "head_dim" in config):
        raise config.refused(
            "head_dim" if "head_dim" in config else "num_attention_heads",
            f"such that a head has an even number of elements, as attention needs (here it has {head_dim})",
        )
    return read_head_dim(config)
