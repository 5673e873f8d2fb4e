"""`quire models`: print the families, types of weights and tokenizers that are supported."""

from __future__ import annotations

from collections.abc import Iterator
from textwrap import wrap

from ..engine.text.gguf_vocabulary import VOCABULARIES
from ..engine.text.pre_tokenizers import PRE_TOKENIZERS
from ..model import FAMILIES
from ..model.encoder import ENCODERS, GGUF_ENCODERS
from ..model.quantization_config import METHODS
from ..model.weights import READABLE
from ..model.weights.ggml import SUPPORTED

Row = tuple[str, str]


def models() -> None:
    """Print the table."""
    print("\n".join(f"{name:<12}{text}" for name, text in supported()), flush=True)


def supported() -> Iterator[Row]:
    """Yield the families, by the names in config.json and in GGUF files, and the types of weights."""
    for family in FAMILIES:
        in_gguf = f", in GGUF files {family.gguf.architecture}" if family.gguf is not None else ""
        yield "family", f"{', '.join(family.architectures)}{in_gguf}"
    for encoder in ENCODERS:
        yield "encoder", ", ".join(encoder.architectures)
    yield "encoder", f"in GGUF files {', '.join(GGUF_ENCODERS)}"
    yield (
        "encoder",
        "each family above: Model and ForCausalLM with sentence-transformers' modules.json, and "
        "ForSequenceClassification",
    )
    yield "safetensors", ", ".join(READABLE)
    yield "quantized", ", ".join(METHODS)
    yield "GGUF", ", ".join((*READABLE, *SUPPORTED))
    yield "tokenizer", f"tokenizer.json, in GGUF files {', '.join(VOCABULARIES)}; tokenizer.ggml.pre may be:"
    yield from (("", names) for names in wrap(", ".join(PRE_TOKENIZERS), 100, break_on_hyphens=False))
