"""Embedding models and rerankers in GGUF files: BERT and its relatives, and decoders whose metadata name a pooling."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ...common.errors import UnsupportedModel
from ..config_json import ConfigTable
from ..families.registry import open_model, read_spec
from ..gguf_config import (
    FUSED_QKV,
    LAYER_NORM_EPS,
    POOLING_TYPE,
    QUANTIZATION,
    QUANTIZATION_VERSION,
    RANK,
    SCORING_LAYER,
    check_neutral,
)
from ..spec import DecoderSpec
from ..weights import Checkpoint
from ..weights.gguf import GGUFFile, Metadata, open_gguf
from ..weights.gguf_checkpoint import GGUFCheckpoint
from ..weights.tensors import check_built
from .bert import BERT
from .modernbert import MODERNBERT
from .nomic_bert import NOMIC_BERT
from .spec import (
    ANSWER,
    CANNOT_POOL,
    Activation,
    AnswerRows,
    BertSpec,
    EncoderNames,
    EncoderSpec,
    Pooling,
    Projection,
    cannot_pool,
)
from .tensors import AnswerTensors
from .weights import build_encoder_weights

POOLINGS: dict[int, Pooling] = {1: "mean", 2: "first", 3: "last"}  # numbers of llama.cpp
NO_POOLING = 0
BERT_POOLINGS: dict[int, Pooling] = {NO_POOLING: "mean", **POOLINGS}
HEAD_POOLINGS: dict[int, Pooling] = {1: "mean", 2: "first"}
ROPE_THETA = 10_000.0  # llama.cpp's default
ANSWERS = ["yes", "no"]  # rows of the classifier of Qwen3-Reranker
FIRST_LAYER, LABELS = "cls", "classifier.output_labels"
MOST_LABELS_IN_ORDER = 10  # the converter sorts labels by the text of their numbers: "10" comes before "2"
ENCODER_KEYS = {  # keys of config.json, and the metadata keys with the same values, after "<architecture>."
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "intermediate_size": "feed_forward_length",
    "max_position_embeddings": "context_length",
    "layer_norm_eps": LAYER_NORM_EPS,
    "rope_theta": "rope.freq_base",
}
NEUTRAL_OF_ENCODERS: dict[str, tuple[object, ...]] = {  # allowed values of keys that could change the model
    "attention.causal": (False,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.sliding_window": (0,),
    "expert_count": (0,),
    "moe_every_n_layers": (0,),
    "rope.scaling.factor": (0, 1),
    "rope.scaling.type": ("none",),
}
NAMES = EncoderNames(
    words="token_embd",
    positions="position_embd",
    types="token_types",
    embedding_norm="token_embd_norm",
    layer="blk.{}.",
    qkv=("attn_q", "attn_k", "attn_v"),
    o="attn_output",
    attention_norm="attn_output_norm",
    up=("ffn_up",),
    down="ffn_down",
    mlp_norm="layer_output_norm",
)
MODERN_KEYS = {
    **{key: suffix for key, suffix in ENCODER_KEYS.items() if key not in ("layer_norm_eps", "rope_theta")},
    "norm_eps": LAYER_NORM_EPS,
    "global_rope_theta": "rope.freq_base",
    "local_rope_theta": "rope.freq_base_swa",
    "local_attention": "attention.sliding_window",
    "global_attn_every_n_layers": "attention.sliding_window_pattern",
    "hidden_activation": "hidden_activation",
}
MODERN_NAMES = replace(
    NAMES, qkv=(FUSED_QKV,), attention_norm="attn_norm", mlp_norm="ffn_norm", final_norm="output_norm"
)


@dataclass(frozen=True, slots=True)
class EncoderFormat:
    """The form of a family's GGUF files, whose positions begin at the first row of their table."""

    architecture: str  # general.architecture
    read: Callable[[ConfigTable], BertSpec]  # the reader of config.json
    names: EncoderNames = NAMES
    keys: Mapping[str, str] = field(default_factory=lambda: ENCODER_KEYS)
    head_pooling: Pooling = "first"  # the rows that a classifier reads, unless the metadata say it
    head_activation: Activation = "tanh"  # activation of a classifier's first layer


ENCODER_FORMATS = (
    EncoderFormat("bert", BERT.read),  # RoBERTa and XLM-RoBERTa, too
    EncoderFormat("nomic-bert", NOMIC_BERT.read, replace(NAMES, up=("ffn_gate", "ffn_up"))),
    EncoderFormat(
        "modern-bert", MODERNBERT.read, MODERN_NAMES, MODERN_KEYS, head_pooling="mean", head_activation="gelu"
    ),
)
GGUF_ENCODERS = tuple(form.architecture for form in ENCODER_FORMATS)


def is_gguf_encoder(path: str | Path) -> bool:
    """Return whether a file's model makes vectors or scores. Raises ModelError."""
    metadata = open_gguf(path).metadata
    return _format(metadata) is not None or bool(metadata.get(_pooling_key(metadata), NO_POOLING) != NO_POOLING)


def read_gguf_encoder(path: str | Path) -> EncoderSpec:
    """Read a file's metadata. Vectors have length 1, as llama.cpp makes them. Raises ModelError."""
    file = open_gguf(path)
    form = _format(file.metadata)
    return _read_decoder(path, file.metadata) if form is None else _read_bert(file, form)


def open_gguf_encoder(path: str | Path) -> tuple[EncoderSpec, Checkpoint]:
    """Return the spec and the tensors of a file, all checked and none read. Raises ModelError."""
    spec = read_gguf_encoder(path)
    file = open_gguf(path)
    is_bert = isinstance(spec.body, BertSpec)
    tensors: Checkpoint = GGUFCheckpoint(file) if is_bert else open_model(path)[1]
    if spec.answer is not None:
        tensors = AnswerTensors(tensors, spec.answer)
    used = check_built(lambda factory: build_encoder_weights(spec, "f32", factory), tensors)
    if is_bert and (unused := file.tensors.keys() - used):
        architecture = file.metadata.text("general.architecture")
        raise UnsupportedModel(f"{path} has tensor {min(unused)}, which {architecture} does not use")
    return spec, tensors


def _format(metadata: Metadata) -> EncoderFormat | None:
    architecture = metadata.text("general.architecture")
    return next((form for form in ENCODER_FORMATS if form.architecture == architecture), None)


def _pooling_key(metadata: Metadata) -> str:
    return f"{metadata.text('general.architecture')}.{POOLING_TYPE}"


def _read_bert(file: GGUFFile, form: EncoderFormat) -> EncoderSpec:
    metadata = file.metadata
    check_neutral(metadata, form.architecture, NEUTRAL_OF_ENCODERS, form.keys.values())
    names = form.names
    if f"{names.layer.format(0)}{FUSED_QKV}.weight" in file.tensors:
        names = replace(names, qkv=(FUSED_QKV,))
    types = _num_rows(file, names.types)
    quantized = GGUFCheckpoint(file).quantized()
    if quantized:
        metadata.integer(QUANTIZATION_VERSION, QUANTIZATION, QUANTIZATION, QUANTIZATION)
    read = form.read(_config(file, form, {"type_vocab_size": types or 1}))
    body = replace(read, num_types=types, names=names, quantized=quantized)
    labels = _num_rows(file, SCORING_LAYER)
    kind = metadata.get(_pooling_key(metadata), NO_POOLING)
    if (kind == RANK and not labels) or (kind != RANK and kind not in BERT_POOLINGS):
        raise metadata.refused(
            _pooling_key(metadata), f"0 to 3 (none, mean, first or last row), or 4 with {SCORING_LAYER}"
        )
    return EncoderSpec(
        body=body,
        pooling=_head_pooling(metadata, form) if labels else BERT_POOLINGS[kind],
        projections=_head(file, form, body, labels),
        normalize=not labels,
        num_labels=labels,
        score_activation="sigmoid" if labels == 1 else "identity",
        labels=_labels(metadata, form.architecture, labels),
        max_model_len=body.max_position_embeddings,
    )


def _config(file: GGUFFile, form: EncoderFormat, found: Mapping[str, Any]) -> ConfigTable:
    """Return the metadata in the form of config.json."""
    keys = {key: f"{form.architecture}.{suffix}" for key, suffix in form.keys.items()}
    embedding = f"{form.names.words}.weight"
    first = form.names.layer.format(0)
    biases = {
        "attention_bias": f"{first}{form.names.o}.bias" in file.tensors,
        "mlp_bias": f"{first}{form.names.down}.bias" in file.tensors,
        "norm_bias": f"{form.names.embedding_norm}.bias" in file.tensors,
    }
    values = {key: file.metadata[name] for key, name in keys.items() if name in file.metadata}
    if embedding in file.tensors:
        values["vocab_size"] = file.tensors[embedding].shape[0]
    keys["vocab_size"] = f"the number of rows of {embedding}"
    defaults = {"rope_theta": ROPE_THETA, "local_rope_theta": None}  # None: that of layers that see all tokens
    return ConfigTable({**defaults, **biases, **values, **found}, source=str(file.path), names=keys)


def _num_rows(file: GGUFFile, name: str) -> int:
    """Return the rows of a matrix, 0 if the file does not have it. llama.cpp's tools write one row as a vector."""
    tensor = file.tensors.get(f"{name}.weight")
    if tensor is None:
        return 0
    return tensor.shape[0] if len(tensor.shape) > 1 else 1


def _head_pooling(metadata: Metadata, form: EncoderFormat) -> Pooling:
    """Return the rows that a classifier reads."""
    key = f"{form.architecture}.classifier.pooling_type"
    if key not in metadata:
        return form.head_pooling
    if metadata[key] not in HEAD_POOLINGS:
        raise metadata.refused(key, "1 or 2 (mean or first row)")
    return HEAD_POOLINGS[metadata[key]]


def _head(file: GGUFFile, form: EncoderFormat, body: BertSpec, labels: int) -> tuple[Projection, ...]:
    """Return the layers of a classifier: with or without a layer before the last one."""
    if not labels:
        return ()
    hidden = body.hidden_size
    last = Projection(
        tensor=SCORING_LAYER,
        in_features=hidden,
        out_features=labels,
        bias=f"{SCORING_LAYER}.bias" in file.tensors,
    )
    if f"{FIRST_LAYER}.weight" not in file.tensors:
        return (last,)
    norm = f"{FIRST_LAYER}.norm"
    first = Projection(
        tensor=FIRST_LAYER,
        in_features=hidden,
        out_features=hidden,
        bias=f"{FIRST_LAYER}.bias" in file.tensors,
        activation=form.head_activation,
        norm=norm if f"{norm}.weight" in file.tensors else None,
        norm_bias=f"{norm}.bias" in file.tensors,
        norm_eps=body.norm_eps,
    )
    return first, last


def _labels(metadata: Metadata, architecture: str, count: int) -> tuple[str, ...]:
    """Return the names of a classifier's labels."""
    key = f"{architecture}.{LABELS}"
    names = metadata.get(key) or []
    if not names or count > MOST_LABELS_IN_ORDER:
        return tuple(f"LABEL_{index}" for index in range(count))
    if not isinstance(names, list) or len(names) != count or not all(isinstance(name, str) for name in names):
        raise metadata.refused(key, f"a list of {count} texts")
    return tuple(names)


def _read_decoder(path: str | Path, metadata: Metadata) -> EncoderSpec:
    body = replace(read_spec(path), tie_embeddings=True)  # no LM head
    key = _pooling_key(metadata)
    kind = metadata.get(key)
    if kind == RANK and body.family == "qwen3":
        return _read_reranker(metadata, body)
    if kind not in POOLINGS:
        raise metadata.refused(key, "1, 2 or 3 (mean, first or last row), or 4 in files of BERT's relatives and Qwen3")
    if cannot_pool(body):
        raise UnsupportedModel(f"{path}: general.architecture is {body.family}; {CANNOT_POOL}")
    return EncoderSpec(body=body, pooling=POOLINGS[kind], normalize=True, max_model_len=body.max_position_embeddings)


def _read_reranker(metadata: Metadata, body: DecoderSpec) -> EncoderSpec:
    """Read a Qwen3-Reranker: the classifier has the rows of the LM head for two answers."""
    key = f"{metadata.text('general.architecture')}.{LABELS}"
    if metadata.get(key) != ANSWERS:
        raise metadata.refused(key, f"{ANSWERS}")
    return EncoderSpec(
        body=body,
        pooling="last",
        projections=(Projection(tensor=ANSWER, in_features=body.hidden_size, out_features=1, bias=False),),
        num_labels=1,
        score_activation="sigmoid",
        messages="auto",
        max_model_len=body.max_position_embeddings,
        answer=AnswerRows(matrix=f"{SCORING_LAYER}.weight", true=ANSWERS.index("yes"), false=ANSWERS.index("no")),
    )
