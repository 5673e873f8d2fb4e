"""The encoder families, and the reading of a folder into an `EncoderSpec` and its tensors."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ...common.errors import UnsupportedModel
from ..config_json import CONFIG_FILE, MAX_VOCAB, MAX_WIDTH, ConfigTable, read_config
from ..families.family import Family
from ..families.gemma3 import GEMMA3
from ..families.registry import FAMILIES
from ..files import is_gguf
from ..spec import DecoderSpec
from ..weights import Checkpoint
from ..weights.tensors import check_built
from .bert import BERT, CAMEMBERT, ROBERTA, XLM_ROBERTA
from .distilbert import DISTILBERT
from .family import EncoderFamily
from .gguf import is_gguf_encoder, open_gguf_encoder, read_gguf_encoder
from .gte import GTE, SNOWFLAKE_GTE
from .modernbert import MODERNBERT
from .mpnet import MPNET
from .nomic_bert import NOMIC_BERT
from .sentence_transformers import (
    MODULES_FILE,
    AnswerTokens,
    Modules,
    has_modules,
    read_modules,
    read_prompts,
    read_score_activation,
)
from .spec import ANSWER, CANNOT_POOL, AnswerRows, BertSpec, EncoderSpec, Pooling, Projection, cannot_pool
from .tensors import AnswerTensors, EncoderTensors
from .transformer_module import Task, read_transformer_settings
from .weights import build_encoder_weights

ENCODERS = (BERT, DISTILBERT, ROBERTA, XLM_ROBERTA, CAMEMBERT, MODERNBERT, MPNET, NOMIC_BERT, GTE, SNOWFLAKE_GTE)
CLASSIFIER = "ForSequenceClassification"
CAUSAL = "ForCausalLM"
BIDIRECTIONAL = "use_bidirectional_attention"  # key of EmbeddingGemma's config
MAX_LABELS = 1 << 16
PAD_TOKENS = {"gemma2": 0, "gemma3": 0, "phi3": 32_000, "smollm3": 128_004}  # pad token in transformers' configs
MULTI_LABEL = "multi_label_classification"


def is_encoder(path: str | Path) -> bool:
    """Return whether a folder's model makes vectors or scores instead of text. Raises ModelError.

    A model does if it is an encoder, has a classification head or comes with sentence-transformers' modules.
    """
    if is_gguf(path):
        return is_gguf_encoder(path)
    name = _architecture(read_config(path))
    is_known = name in _by_architecture() or _decoder(name) is not None
    return is_known or name.endswith(CLASSIFIER) or has_modules(Path(path))


def read_encoder(path: str | Path) -> EncoderSpec:
    """Read the settings of a folder or GGUF file; no tensor. Raises ModelError."""
    if is_gguf(path):
        return read_gguf_encoder(path)
    folder = Path(path)
    config = read_config(path)
    body, family = _body(config)
    modules = read_modules(folder, body.hidden_size) if has_modules(folder) else Modules()
    pooling, projections = _after_body(config, family, body, modules)
    labels = projections[-1].out_features if _scores(config, modules) else 0
    settings = read_transformer_settings(folder, _task(config, modules))
    prompts, default_prompt = read_prompts(folder)
    return EncoderSpec(
        body=replace(body, tie_embeddings=True) if isinstance(body, DecoderSpec) else body,  # no LM head
        causal=not config.flag(BIDIRECTIONAL, False),
        pooling=pooling,
        projections=projections,
        normalize=modules.normalize,
        num_labels=labels,
        score_activation=read_score_activation(folder, config, labels) if labels else "identity",
        labels=_labels(config, labels) if _architecture(config).endswith(CLASSIFIER) else (),
        is_multi_label=config.text("problem_type", "") == MULTI_LABEL,
        max_model_len=min(body.max_position_embeddings, settings.max_length or body.max_position_embeddings),
        lower_case=settings.lower_case,
        messages=settings.messages,
        template_variables=settings.template_variables,
        pad_token_id=_pad_token_id(config, body, modules),
        prompts=prompts,
        default_prompt=default_prompt,
        matryoshka=_matryoshka(config),
        tensor_prefix=family.prefix if isinstance(family, EncoderFamily) else "",
        files=modules.files,
        answer=_answer(config, body, modules.answer),
    )


def open_encoder(path: str | Path) -> tuple[EncoderSpec, Checkpoint]:
    """Return the spec and the tensors of a folder or file, all checked and none read. Raises ModelError."""
    if is_gguf(path):
        return open_gguf_encoder(path)
    spec = read_encoder(path)
    tensors: Checkpoint = EncoderTensors(Path(path), spec)
    if spec.answer is not None:
        tensors = AnswerTensors(tensors, spec.answer)
    check_built(lambda factory: build_encoder_weights(spec, "f32", factory), tensors)
    return spec, tensors


def _architecture(config: ConfigTable) -> str:
    """Return `architectures[0]`, or the name that `model_type` stands for."""
    if "architectures" not in config:
        types = {name: family for family in ENCODERS for name in family.model_types}
        family = types.get(config.text("model_type", ""))
        return family.architectures[0] if family else ""
    names = config.values["architectures"]
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise config.refused("architectures", "a list of names")
    return names[0]


def _by_architecture() -> dict[str, EncoderFamily]:
    return {name: family for family in ENCODERS for name in family.architectures}


def _decoder(name: str) -> Family | None:
    """Return the family of decoders whose body or classifier has the architecture `name`.

    Families that also have models with images call the text part `<family>TextModel`.
    """
    if name.endswith(CAUSAL):
        return None
    stem = name.removesuffix(CLASSIFIER).removesuffix("Model").removesuffix("Text")
    return next((family for family in FAMILIES if f"{stem}{CAUSAL}" in family.architectures), None)


def _body(config: ConfigTable) -> tuple[BertSpec | DecoderSpec, EncoderFamily | Family]:
    name = _architecture(config)
    if "quantization_config" in config:
        raise config.refused("quantization_config", "absent: encoders are read from numbers of 16 or 32 bits")
    if name in (known := _by_architecture()):
        return known[name].read(config), known[name]
    family = _decoder(name) or next((family for family in FAMILIES if name in family.architectures), None)
    if family is None:
        raise UnsupportedModel(
            f"{CONFIG_FILE}: architectures[0] is {name:.80}; it must be one of {', '.join(known)}, or that of a decoder"
        )
    spec = _bidirectional(config, family) if config.flag(BIDIRECTIONAL, False) else family.read(config)
    if cannot_pool(spec):
        raise UnsupportedModel(f"{CONFIG_FILE}: architectures[0] is {name:.80}; {CANNOT_POOL}")
    return spec, family


def _bidirectional(config: ConfigTable, family: Family) -> DecoderSpec:
    """Read a decoder whose rows also attend to later rows. Half of a window is on each side of a row."""
    if family is not GEMMA3:
        raise config.refused(BIDIRECTIONAL, "false or absent: decoders attend causally")
    spec = family.read(ConfigTable({**config.values, BIDIRECTIONAL: False}))
    if 1 in spec.windows:
        raise config.refused("sliding_window", f"at least 2 with {BIDIRECTIONAL}")
    return replace(spec, windows=tuple(window // 2 for window in spec.windows))


def _after_body(
    config: ConfigTable, family: EncoderFamily | Family, body: BertSpec | DecoderSpec, modules: Modules
) -> tuple[Pooling, tuple[Projection, ...]]:
    """Return the pooling of a text's rows, and the layers after it."""
    if modules.pooling is not None:
        return modules.pooling, modules.projections
    if modules.answer is not None:
        return "last", (Projection(tensor=ANSWER, in_features=body.hidden_size, out_features=1, bias=False),)
    if _architecture(config).endswith(CLASSIFIER):
        labels = _num_labels(config)
        if isinstance(family, EncoderFamily):
            assert family.head is not None, "an architecture with a head is that of a family with one"
            return family.head_pooling(config), family.head(config, labels)
        return "last", (Projection(tensor="score", in_features=body.hidden_size, out_features=labels, bias=False),)
    if modules.is_declared:
        raise UnsupportedModel(f"{MODULES_FILE} has no module Pooling, and {CONFIG_FILE} names no classifier")
    if isinstance(body, DecoderSpec):
        raise UnsupportedModel(
            f"a decoder makes vectors or scores only if {MODULES_FILE} of sentence-transformers says how; the folder "
            "has no module that pools"
        )
    return "mean", ()


def _scores(config: ConfigTable, modules: Modules) -> bool:
    if modules.pooling is not None:
        return modules.scores
    return modules.answer is not None or _architecture(config).endswith(CLASSIFIER)


def _task(config: ConfigTable, modules: Modules) -> Task:
    if modules.answer is not None:
        return "text-generation"
    return "sequence-classification" if _scores(config, modules) and modules.pooling is None else "feature-extraction"


def _pad_token_id(config: ConfigTable, body: BertSpec | DecoderSpec, modules: Modules) -> int | None:
    """Return the padding token that a decoder's classifier skips at the end of a text; None for other models."""
    if (
        isinstance(body, BertSpec)
        or modules.pooling
        or modules.answer
        or not _architecture(config).endswith(CLASSIFIER)
    ):
        return None
    token = config.values.get("pad_token_id", PAD_TOKENS.get(body.family))
    return None if token is None else ConfigTable({"pad_token_id": token}).integer("pad_token_id", -1, MAX_VOCAB)


def _num_labels(config: ConfigTable) -> int:
    if "num_labels" in config:
        return config.integer("num_labels", 1, MAX_LABELS)
    labels = config.table("id2label").values
    if len(labels) > MAX_LABELS:
        raise UnsupportedModel(f"{CONFIG_FILE}: id2label has {len(labels)} labels; at most {MAX_LABELS}")
    return len(labels) or 2


def _labels(config: ConfigTable, count: int) -> tuple[str, ...]:
    """Return the names of labels, LABEL_0 and so on where `id2label` has none."""
    names = config.table("id2label")
    return tuple(names.text(str(index), f"LABEL_{index}") for index in range(count))


def _matryoshka(config: ConfigTable) -> tuple[int, ...]:
    """Return the numbers of dimensions that the model was trained for."""
    if "matryoshka_dimensions" not in config:
        return ()
    sizes = config.values["matryoshka_dimensions"]
    if not isinstance(sizes, list) or not all(type(size) is int and 1 <= size <= MAX_WIDTH for size in sizes):
        raise config.refused("matryoshka_dimensions", f"a list of integers from 1 to {MAX_WIDTH}")
    return tuple(sorted(set(sizes)))


def _answer(config: ConfigTable, body: BertSpec | DecoderSpec, tokens: AnswerTokens | None) -> AnswerRows | None:
    """Return the tokens that score a pair, and the matrix that has their rows: the LM head."""
    if tokens is None:
        return None
    if isinstance(body, BertSpec):
        raise UnsupportedModel(f"{MODULES_FILE}: the module LogitScore needs a decoder, not {body.family}")
    for key, token in (("true_token_id", tokens.true), ("false_token_id", tokens.false)):
        if token is not None and token >= body.vocab_size:
            raise UnsupportedModel(f"{key} is {token}; the vocabulary has {body.vocab_size} tokens")
    matrix = f"{body.names.embedding if body.tie_embeddings else body.names.lm_head}.weight"
    return AnswerRows(matrix=matrix, true=tokens.true, false=tokens.false)
