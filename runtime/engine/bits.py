"""The bits id: a digest of everything that the bits of keys, values and outputs depend on besides the request.

Engines with the same id continue each other's requests, and use each other's snapshots. Threads, batch sizes and the
length of the KV cache are not part of it, and neither is the ISA level where all levels compute the same bits. A
request's adapter is not part of it either: its key is in the request, and in the keys of its pages.
"""

from __future__ import annotations

import dataclasses
import hashlib
from functools import cache
from importlib.metadata import version

from ..common.config import EngineConfig
from ..model import model_path, read_spec, weights_text
from ..model.encoder import is_encoder, read_encoder
from ..model.rope import uses_long_factors
from ..model.runner import ModelRunner
from ..model.spec import DecoderSpec
from ..model.weights.packing import Q8_FORM


def bits_id(runner: ModelRunner, config: EngineConfig, model_digest: bytes) -> bytes:
    """Return the bits id, 32 bytes, of a loaded model. `model_digest` comes from `model/files.py`."""
    capacity = runner.capacity
    weights = weights_text(runner.spec, config.weights)
    by_level = "bf16" in weights.split(", ") or config.kv_cache_dtype == "bf16"
    rotation = uses_long_factors(runner.spec.ropes, capacity.max_model_len)
    states = config.state_dtype if runner.spec.has_matrices else ""
    level = capacity.isa if by_level else "every level"
    parts = (_version(), Q8_FORM, weights, capacity.layout, states, rotation, level)
    return hashlib.sha256(repr(parts).encode() + model_digest).digest()


def encoder_bits_id(isa: str, weights: str, model_digest: bytes) -> bytes:
    """Return the bits id, 32 bytes, of a loaded encoder."""
    level = "every level" if weights in ("q8", "f32") else isa
    return hashlib.sha256(repr((_version(), Q8_FORM, weights, level)).encode() + model_digest).digest()


def models_digest(config: EngineConfig) -> str:
    """Return a short digest of the models' configurations, for API servers, which have no weights to compare.

    Raises ModelError.
    """
    paths = [model_path(config.model)]
    if config.embedding_model is not None:
        paths.append(model_path(config.embedding_model))
    digest = hashlib.sha256()
    for path in paths:
        spec = read_encoder(path) if is_encoder(path) else read_spec(path)
        # Quantized tensors are read from the files of the weights.
        if isinstance(spec, DecoderSpec):
            spec = dataclasses.replace(spec, quantized={})
        elif isinstance(spec.body, DecoderSpec):
            spec = dataclasses.replace(spec, body=dataclasses.replace(spec.body, quantized={}))
        digest.update(repr(spec).encode())
    return digest.hexdigest()[:16]


@cache
def _version() -> str:
    """Return the installed version, whose file takes milliseconds to read."""
    return version("quire")
