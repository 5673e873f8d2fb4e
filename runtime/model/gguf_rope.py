"""The rotary embeddings of GGUF files: scaling in the metadata, and divisors of frequencies in tensors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from ..common.errors import CorruptCheckpoint, UnsupportedModel
from .config_json import MAX_HEAD_DIM
from .rope import rotary_dim
from .spec import DecoderSpec, FrequencyDivisors, Rope
from .weights.gguf import GGUFFile

ROPE_FREQS = "rope_freqs.weight"  # f32 [rotated elements / 2]: divisors of the frequencies
NOT_ROTATED = float(np.float32(1e30))  # the divisor of pairs that are not rotated
LONG_ROPE = {"short_factor": "rope_factors_short.weight", "long_factor": "rope_factors_long.weight"}  # the same
LONG_ROPE_SCALE = "rope.scaling.attn_factor"


def has_long_rope(file: GGUFFile) -> bool:
    return all(name in file.tensors for name in LONG_ROPE.values())


def rope_scaling(file: GGUFFile, architecture: str, scaling: dict[str, Any]) -> dict[str, Any]:
    """Return the object under rope_scaling. A factor without a type is linear, and 0 or 1 is no factor."""
    metadata = file.metadata
    if has_long_rope(file):
        factors = {key: list(_factors(file, name)) for key, name in LONG_ROPE.items()}
        attention_factor = metadata.get(f"{architecture}.{LONG_ROPE_SCALE}", 1.0)
        return {**scaling, "rope_type": "longrope", **factors, "attention_factor": attention_factor}
    factor = scaling.get("factor", metadata.get(f"{architecture}.rope.scale_linear", 1))
    kind = scaling.get("rope_type", "linear")
    if kind == "none" or (kind == "linear" and factor in (0, 1)):
        return {}
    return {**scaling, "rope_type": kind, "factor": factor}


def with_divisors(spec: DecoderSpec, file: GGUFFile, of_full_layers: bool) -> DecoderSpec:
    """Return `spec` with a file's divisors of frequencies, if it has them: the evaluated scaling of Llama 3.1.

    The last divisors may be 1e30, for pairs that are not rotated.
    """
    if ROPE_FREQS not in file.tensors:
        return spec
    divisors = _factors(file, ROPE_FREQS, last=NOT_ROTATED)
    divided = [not of_full_layers or not window for window in spec.windows]
    ropes = {rope for rope, each in zip(spec.ropes, divided, strict=True) if rope is not None and each}
    for layer, rope in enumerate(spec.ropes):
        if rope is None or rope not in ropes:
            continue
        pairs = rotary_dim(rope, spec.kv_heads_of(layer)[1]) // 2
        if len(ropes) > 1 or rope.scaling is not None or len(divisors) != pairs:
            raise UnsupportedModel(
                f"{file.path}: {ROPE_FREQS} has {len(divisors)} values beside {len(ropes)} rotary embeddings, one with "
                f"scaling {rope.scaling}; it must have {pairs}, beside one rotary embedding without scaling"
            )
    return replace(spec, ropes=tuple(_divided(rope, divisors) if rope in ropes else rope for rope in spec.ropes))


def _divided(rope: Rope | None, divisors: tuple[float, ...]) -> Rope | None:
    """Return a rotary embedding with divided frequencies."""
    if rope is None:
        return None
    rotated = divisors[: len(divisors) - divisors.count(NOT_ROTATED)]
    scaling = None if set(rotated) == {1.0} else FrequencyDivisors(rotated)
    if len(rotated) == len(divisors):
        return replace(rope, scaling=scaling)
    return replace(rope, scaling=scaling, dim=2 * len(rotated), span=rope.span or 2 * len(divisors))


def _factors(file: GGUFFile, name: str, last: float | None = None) -> tuple[float, ...]:
    """Return a vector that divides frequencies; all but the first one may be `last`, after all others.

    Raises UnsupportedModel or CorruptCheckpoint.
    """
    stored = file.tensors[name]
    if stored.type.name != "F32" or len(stored.shape) != 1 or stored.shape[0] > MAX_HEAD_DIM // 2:
        raise UnsupportedModel(
            f"{file.path}: {name} is {stored.type.name} {list(stored.shape)}; it must be F32, half as many values as a "
            "head has rotated elements"
        )
    factors = stored.file.read(stored.begin, stored.end).view("<f4")
    numbers = factors[: max(len(factors) - np.count_nonzero(factors == last), 1)]
    if not ((numbers >= 1e-6) & (numbers <= 1e6)).all():
        raise CorruptCheckpoint(f"{file.path}: {name} has a value that is not between 1e-6 and 1e6")
    return tuple(map(float, factors))
