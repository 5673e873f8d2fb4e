"""Embedding models in GGUF files: decoders whose metadata name a kind of pooling, such as Qwen3-Embedding."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ...common.errors import UnsupportedModel
from ..families.registry import read_spec
from ..weights.gguf import Metadata, open_gguf
from .spec import CANNOT_POOL, EncoderSpec, Pooling, cannot_pool

POOLING_TYPE = "pooling_type"
POOLINGS: dict[int, Pooling] = {1: "mean", 2: "first", 3: "last"}  # numbers of llama.cpp
NO_POOLING = 0


def is_gguf_encoder(path: str | Path) -> bool:
    """Return whether a file's model makes vectors. Raises ModelError."""
    metadata = open_gguf(path).metadata
    return bool(metadata.get(_key(metadata), NO_POOLING) != NO_POOLING)


def read_gguf_encoder(path: str | Path) -> EncoderSpec:
    """Read a file's metadata. Vectors have length 1, as llama.cpp makes them. Raises ModelError."""
    body = read_spec(path)
    metadata = open_gguf(path).metadata
    kind = metadata.get(_key(metadata))
    if kind not in POOLINGS:
        raise metadata.refused(_key(metadata), "1, 2 or 3 (mean, first or last row); rerankers are read from folders")
    if cannot_pool(body):
        raise UnsupportedModel(f"{path}: general.architecture is {body.family}; {CANNOT_POOL}")
    return EncoderSpec(
        body=replace(body, tie_embeddings=True),  # no LM head
        pooling=POOLINGS[kind],
        normalize=True,
        max_model_len=body.max_position_embeddings,
    )


def _key(metadata: Metadata) -> str:
    return f"{metadata.text('general.architecture')}.{POOLING_TYPE}"
