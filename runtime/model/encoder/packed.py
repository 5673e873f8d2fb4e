"""Packed encoders: the spec, the packed weights and the program; and the memory that they take."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

from ....kernels import scratch_nbytes
from ....kernels.ops import KVDtype
from ....kernels.ops import WeightDtype as PackedDtype
from ...common.config import WeightDtype
from ...common.errors import ConfigError
from ..files import model_path
from ..program import ProgramBuilder, ProgramPlan
from ..rope import planned_tables, rotary_nbytes, rotary_tables
from ..weights.packing import pack_built
from .emit import emit_encoder
from .mpnet import bias_columns
from .registry import open_encoder
from .spec import BertSpec, EncoderSpec
from .weights import EncoderWeights, build_encoder_weights, plan_encoder_weights

KEYS_VALUES: dict[WeightDtype, KVDtype] = {"f32": "f32", "bf16": "bf16", "auto": "bf16", "q8": "int8", "q4": "int8"}


@dataclass(frozen=True, slots=True)
class PackedEncoder:
    """An encoder's spec and packed weights, which are read-only."""

    path: Path  # path of the folder
    spec: EncoderSpec
    weights: EncoderWeights
    keys_values: KVDtype

    def compile(self, *, max_rows: int, max_texts: int) -> ProgramPlan:
        """Return the program for batches of `max_rows` tokens of `max_texts` texts."""
        body = self.spec.body
        builder = ProgramBuilder(max_rows, max_texts, self.keys_values)
        rotary = rotary_tables(body.ropes, body.head_dim, self.spec.max_model_len)
        return builder.build(emit_encoder(builder, self.spec, self.weights, rotary))


def pack_encoder(
    model: str | Path,
    weights: WeightDtype,
    max_model_len: int | None = None,
    stop: threading.Event | None = None,
) -> PackedEncoder:
    """Check a folder, then pack its weights as dtype `weights`, for texts of at most `max_model_len` tokens.

    Raises the errors of `pack_model`.
    """
    if weights not in get_args(WeightDtype):
        raise ConfigError(f"weights is {weights!r}; it must be one of {', '.join(get_args(WeightDtype))}")
    path = model_path(model)
    spec, tensors = open_encoder(path)
    if max_model_len is not None:
        spec = replace(spec, max_model_len=max_model_len)
    packed = pack_built(lambda factory, dtype: build_encoder_weights(spec, dtype, factory), tensors, weights, stop)
    return PackedEncoder(path, spec, packed, KEYS_VALUES[weights])


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderMemoryPlan:
    """Bytes by purpose, and the program that the arena is planned for; its ops cannot be run."""

    weights: Mapping[PackedDtype, int]  # bytes of the packed matrices by dtype
    arena_bytes: int  # keys and values included
    position_bytes: int  # tables by position: rotary ones, and biases of scores
    scratch_bytes: int  # scratch memory of ops, over all worker threads
    program: ProgramPlan

    @property
    def weights_bytes(self) -> int:
        return sum(self.weights.values())

    @property
    def total_bytes(self) -> int:
        """All that the encoder adds to a process."""
        return self.weights_bytes + self.arena_bytes + self.position_bytes + self.scratch_bytes


def plan_encoder_memory(
    spec: EncoderSpec, *, weights: WeightDtype, max_rows: int, max_texts: int, workers: int
) -> EncoderMemoryPlan:
    """Plan the memory; the arguments are equal to those for packing, compiling and running."""
    shapes, weights_bytes = plan_encoder_weights(spec, weights)
    body = spec.body
    builder = ProgramBuilder(max_rows, max_texts, KEYS_VALUES[weights])
    rotary = planned_tables(body.ropes, body.head_dim, spec.max_model_len)
    program = builder.build(emit_encoder(builder, spec, shapes, rotary))
    return EncoderMemoryPlan(
        weights=weights_bytes,
        arena_bytes=program.arena_bytes,
        position_bytes=rotary_nbytes(body.ropes, body.head_dim, spec.max_model_len) + _bias_nbytes(spec),
        scratch_bytes=scratch_nbytes(workers, program.ops),
        program=program,
    )


def _bias_nbytes(spec: EncoderSpec) -> int:
    """Return the bytes of the bias that all layers share."""
    body = spec.body
    biased = isinstance(body, BertSpec) and body.num_distances
    return 4 * body.num_heads * bias_columns(spec.max_model_len) if biased else 0
