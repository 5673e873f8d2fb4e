"""Packing of a decoder's weights for the kernels: which tensors form which matrix, in one block of memory.

`build_weights` is the only description of a model's weights: the check of a checkpoint, the memory plan and the packing
all run it, so they cannot disagree. Must not import config.json's reader or the program.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar, cast

import numpy as np
import numpy.typing as npt

from ....kernels import available_cpus
from ....kernels.ops import WeightDtype as PackedDtype
from ....kernels.ops import padded
from ....kernels.pack import BLOCK_DTYPES, PackedMatrix, column_ranges, packed_nbytes
from ....pager import OutOfMemory, map_memory
from ...common.config import WeightDtype
from ...common.errors import ModelError, Unavailable
from ..spec import DecoderSpec
from . import READABLE, Checkpoint, as_f32
from .ggml import q5_0_as_q8_0, widen

Vector = npt.NDArray[np.float32]
Weights = TypeVar("Weights")  # of one kind of model
ELEMENTS_AT_ONCE = 1 << 20  # of a tensor, between two looks at whether the load was cancelled
PackedDtypes = PackedDtype | Sequence[tuple[int, PackedDtype]]  # of a matrix, or of ranges of its columns


@dataclass(frozen=True, slots=True)
class MlpWeights:
    """The weights of an MLP."""

    gate_up: PackedMatrix  # [2 padded(intermediate), hidden], 16 columns of gate, 16 of up, and so on
    gate_up_bias: Vector | None
    down: PackedMatrix  # [hidden, intermediate]
    down_bias: Vector | None


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """The weights of a mixture of experts: of the router, and for each expert those of an MLP."""

    router: PackedMatrix  # f32 [experts, hidden]; columns multiplied by those of the norm, whose input the router reads
    router_bias: Vector | None
    gate_up: tuple[PackedMatrix, ...]
    gate_up_biases: tuple[Vector, ...] | None
    down: tuple[PackedMatrix, ...]
    down_biases: tuple[Vector, ...] | None


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """The weights of one layer. Biases and norms that the family does not have are None."""

    input_norm: Vector | None  # [hidden]
    qkv: PackedMatrix  # [q_size + 2 kv_size, hidden]
    qkv_bias: Vector | None
    q_norm: Vector | None  # [head_dim], or with qk_norm_rows [q_size]
    k_norm: Vector | None  # [head_dim], or with qk_norm_rows [kv_size]
    sinks: Vector | None  # [num_heads]
    o: PackedMatrix  # [hidden, q_size]
    o_bias: Vector | None
    attention_post_norm: Vector | None  # [hidden]
    mlp_norm: Vector | None  # [hidden]
    mlp: MlpWeights | ExpertWeights
    mlp_post_norm: Vector | None  # [hidden]


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """The weights of a model. With tied embeddings, `lm_head` is the same object as `embedding`."""

    embedding: PackedMatrix  # [vocab, hidden]
    layers: tuple[LayerWeights, ...]
    final_norm: Vector  # [hidden]
    lm_head: PackedMatrix  # [vocab, hidden]


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of a tensor, and the columns of a packed matrix that they fill (see `PackedMatrix.fill`)."""

    tensor: str
    shape: tuple[int, ...]  # of the tensor: [rows, in_features], [experts, rows, in_features], or [rows] of a vector
    first_row: int = 0  # of all rows of all experts
    num_rows: int | None = None  # None: all that follow
    start: int = 0
    interleave: int | None = None

    @property
    def rows(self) -> slice:
        return slice(self.first_row, None if self.num_rows is None else self.first_row + self.num_rows)


class WeightFactory(Protocol):
    """Makes the matrices and vectors of `build_weights`, in the order of their place in memory."""

    def matrix(
        self,
        out_features: int,
        in_features: int,
        dtype: PackedDtypes,
        parts: Sequence[Part],
        factors: Vector | None = None,
    ) -> PackedMatrix:
        """Return a matrix whose columns, in the order of in_features, are multiplied by `factors`."""

    def vector(self, size: int, parts: Sequence[Part], offset: float = 0.0) -> Vector: ...


def pack_weights(
    spec: DecoderSpec, checkpoint: Checkpoint, dtype: WeightDtype, stop: threading.Event | None = None
) -> DecoderWeights:
    """Pack every matrix as `dtype`. The checkpoint must have passed `check_tensors`. See `pack_built`."""
    return pack_built(lambda factory, packed: build_weights(spec, packed, factory), checkpoint, dtype, stop)


def pack_built(
    build: Callable[[WeightFactory, WeightDtype], Weights],
    checkpoint: Checkpoint,
    dtype: WeightDtype,
    stop: threading.Event | None = None,
) -> Weights:
    """Pack every matrix that `build` makes into one block of exactly the planned size.

    Raises ModelError when the system has no memory for the block, and Unavailable after the tensors in work when
    another thread sets `stop`.
    """
    block = _map_weights(build, dtype)
    with ThreadPoolExecutor(available_cpus().threads) as threads:
        packer = _Packer(checkpoint, block, threads, stop or threading.Event())
        weights = build(packer, dtype)
        packer.finish()
    return weights


def plan_weights(spec: DecoderSpec, dtype: WeightDtype) -> tuple[DecoderWeights, Counter[PackedDtype]]:
    """Return weights of the right shapes without memory, to plan a program that is never run; and bytes by dtype."""
    planner = WeightPlanner()
    weights = build_weights(spec, dtype, planner)
    return weights, planner.nbytes


def weights_text(spec: DecoderSpec, dtype: WeightDtype) -> str:
    """Return the dtype of the weights for people; for `auto` the dtypes of the matrices, such as "q4, q8"."""
    return ", ".join(sorted(plan_weights(spec, dtype)[1])) if dtype == "auto" else dtype


def _map_weights(build: Callable[[WeightFactory, WeightDtype], Weights], dtype: WeightDtype) -> npt.NDArray[np.uint8]:
    nbytes = _planned_bytes(build, dtype)
    try:
        return map_memory(nbytes)
    except OutOfMemory as error:
        smallest = _planned_bytes(build, "q4")
        advice = f"weights q4 need {smallest:,} bytes" if smallest < nbytes else "use a smaller model or more memory"
        raise ModelError(f"the weights do not fit as {dtype}: {error}; {advice}") from error


def _planned_bytes(build: Callable[[WeightFactory, WeightDtype], Weights], dtype: WeightDtype) -> int:
    planner = WeightPlanner()
    build(planner, dtype)
    return planner.nbytes.total()


def build_weights(spec: DecoderSpec, dtype: WeightDtype, factory: WeightFactory) -> DecoderWeights:
    """Make all weights of a model with `factory`. With q4 the embedding and the LM head are q8."""
    vocabulary_dtype: WeightDtype = "q8" if dtype == "q4" else dtype
    names, hidden = spec.names, spec.hidden_size

    def vocabulary(name: str) -> PackedMatrix:
        shape = spec.vocab_size, hidden
        parts = [Part(f"{name}.weight", shape)]
        return factory.matrix(*shape, _packed_dtype(spec, vocabulary_dtype, parts), parts)

    embedding = vocabulary(names.embedding)
    layers = tuple(_build_layer(spec, layer, dtype, factory) for layer in range(spec.num_layers))
    final_norm = factory.vector(hidden, [Part(f"{names.final_norm}.weight", (hidden,))], spec.norm_offset)
    lm_head = embedding if spec.tie_embeddings else vocabulary(names.lm_head)
    return DecoderWeights(embedding, layers, final_norm, lm_head)


def _build_layer(spec: DecoderSpec, layer: int, dtype: WeightDtype, factory: WeightFactory) -> LayerWeights:
    names, hidden, intermediate = spec.names, spec.hidden_size, spec.intermediate_size
    prefix = names.layer.format(layer)

    def norm(present: bool, name: str, size: int) -> Vector | None:
        parts = [Part(f"{prefix}{name}.weight", (size,))]
        return factory.vector(size, parts, spec.norm_offset) if present else None

    def matrix(out_features: int, in_features: int, parts: Sequence[Part]) -> PackedMatrix:
        parts = named(parts, prefix, "weight", in_features)
        return factory.matrix(out_features, in_features, _packed_dtype(spec, dtype, parts), parts)

    def bias(present: bool, size: int, parts: Sequence[Part]) -> Vector | None:
        return factory.vector(size, named(parts, prefix, "bias")) if present else None

    def mlp() -> MlpWeights:
        gate_up, down = interleaved(names.gate_up, intermediate), stacked((names.down,), (hidden,))
        return MlpWeights(
            gate_up=matrix(2 * padded(intermediate), hidden, gate_up),
            gate_up_bias=bias(spec.mlp_bias, 2 * padded(intermediate), gate_up),
            down=matrix(hidden, intermediate, down),
            down_bias=bias(spec.mlp_bias, hidden, down),
        )

    qkv, o = stacked(names.qkv, (spec.q_size, spec.kv_size, spec.kv_size)), stacked((names.o,), (hidden,))
    q_norm_size, k_norm_size = (spec.q_size, spec.kv_size) if spec.qk_norm_rows else (spec.head_dim, spec.head_dim)
    mlp_norm = norm(spec.pre_norms, names.mlp_norm, hidden)
    has_experts = spec.experts is not None and spec.experts.layers[layer]
    return LayerWeights(
        input_norm=norm(spec.pre_norms, names.input_norm, hidden),
        qkv=matrix(spec.qkv_size, hidden, qkv),
        qkv_bias=bias(spec.qkv_bias, spec.qkv_size, qkv),
        q_norm=norm(spec.qk_norm, names.q_norm, q_norm_size),
        k_norm=norm(spec.qk_norm, names.k_norm, k_norm_size),
        sinks=factory.vector(spec.num_heads, [Part(f"{prefix}{names.sinks}", (spec.num_heads,))])
        if spec.sinks
        else None,
        o=matrix(hidden, spec.q_size, o),
        o_bias=bias(spec.o_bias, hidden, o),
        attention_post_norm=norm(spec.post_norms, names.attention_post_norm, hidden),
        mlp_norm=mlp_norm,
        mlp=_build_experts(spec, prefix, dtype, factory, mlp_norm) if has_experts else mlp(),
        mlp_post_norm=norm(spec.post_norms, names.mlp_post_norm, hidden),
    )


def _build_experts(
    spec: DecoderSpec, prefix: str, dtype: WeightDtype, factory: WeightFactory, norm: Vector | None
) -> ExpertWeights:
    """Make the weights of a layer's experts; all matrices of one kind have the same dtype."""
    assert spec.experts is not None, "only a spec with experts has layers with experts"
    names, hidden, size = spec.names, spec.hidden_size, spec.experts.intermediate_size
    num_experts, has_bias = spec.experts.num_experts, spec.experts.bias
    router = stacked((names.router,), (num_experts,))
    gate_up, down = interleaved(names.expert_gate_up, size), stacked((names.expert_down,), (hidden,))

    def of_experts(parts: Sequence[Part], suffix: str, *in_features: int) -> list[list[Part]]:
        each = ([_of_expert(part, expert, num_experts) for part in parts] for expert in range(num_experts))
        return [named(parts, prefix, suffix, *in_features) for parts in each]

    def matrices(out_features: int, in_features: int, parts: Sequence[Part]) -> tuple[PackedMatrix, ...]:
        experts = of_experts(parts, "weight", in_features)
        packed = _packed_dtype(spec, dtype, [part for parts in experts for part in parts])
        one = packed if isinstance(packed, str) else "q8"
        return tuple(factory.matrix(out_features, in_features, one, parts) for parts in experts)

    def biases(size: int, parts: Sequence[Part]) -> tuple[Vector, ...] | None:
        return tuple(factory.vector(size, parts) for parts in of_experts(parts, "bias")) if has_bias else None

    return ExpertWeights(
        router=factory.matrix(num_experts, hidden, "f32", named(router, prefix, "weight", hidden), norm),
        router_bias=factory.vector(num_experts, named(router, prefix, "bias")) if has_bias else None,
        gate_up=matrices(2 * padded(size), hidden, gate_up),
        gate_up_biases=biases(2 * padded(size), gate_up),
        down=matrices(hidden, size, down),
        down_biases=biases(hidden, down),
    )


def _of_expert(part: Part, expert: int, num_experts: int) -> Part:
    """Return a part of one expert's matrix: of a tensor of its own, or of one that holds those of all experts."""
    if "{}" in part.tensor:
        return replace(part, tensor=part.tensor.format(expert))
    (rows,) = part.shape
    first_row, num_rows = expert * rows + part.first_row, rows if part.num_rows is None else part.num_rows
    return replace(part, shape=(num_experts, rows), first_row=first_row, num_rows=num_rows)


def _packed_dtype(spec: DecoderSpec, dtype: WeightDtype, parts: Sequence[Part]) -> PackedDtypes:
    """Return the dtype of a matrix; with `auto` those of its tensors in the checkpoint, bf16 if one is not in blocks.

    Tensors of different types in ranges of columns keep them, if the kernels can have such ranges; else all are q8.
    """
    if dtype != "auto":
        return dtype
    if any(part.tensor not in spec.quantised for part in parts):
        return "bf16"
    dtypes = [BLOCK_DTYPES.get(spec.quantised[part.tensor], "q8") for part in parts]
    if len(set(dtypes)) == 1:
        return dtypes[0]
    ranges = [(part.shape[0], dtype) for part, dtype in zip(parts, dtypes, strict=True)]
    whole = all(columns % 32 == 0 for columns, _ in ranges[:-1])
    return ranges if whole and all(part.interleave is None for part in parts) else "q8"


def stacked(names: Sequence[str], sizes: Sequence[int]) -> list[Part]:
    """Return the parts of a matrix whose columns are those of several tensors in turn, or of one tensor with all."""
    if len(names) == 1:
        return [Part(names[0], (sum(sizes),))]
    starts = np.cumsum([0, *sizes[:-1]]).tolist()
    return [Part(name, (size,), start=start) for name, size, start in zip(names, sizes, starts, strict=True)]


def interleaved(names: Sequence[str], size: int) -> list[Part]:
    """Return the parts of a matrix of gate and up, `size` columns each, 16 of one and 16 of the other in turn."""
    if len(names) == 1:
        return [Part(names[0], (2 * size,), phase * size, size, interleave=phase) for phase in (0, 1)]
    return [Part(name, (size,), interleave=phase) for phase, name in enumerate(names)]


def named(parts: Sequence[Part], prefix: str, suffix: str, *in_features: int) -> list[Part]:
    return [
        replace(part, tensor=f"{prefix}{part.tensor}.{suffix}", shape=(*part.shape, *in_features)) for part in parts
    ]


class _Packer:
    """Takes memory for matrices from the block, front to back, and fills them on threads: filling releases the GIL."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        block: npt.NDArray[np.uint8],
        threads: ThreadPoolExecutor,
        stop: threading.Event,
    ) -> None:
        self._checkpoint = checkpoint
        self._unused = block
        self._threads = threads
        self._stop = stop
        self._filling: list[Future[None]] = []

    def matrix(
        self,
        out_features: int,
        in_features: int,
        dtype: PackedDtypes,
        parts: Sequence[Part],
        factors: Vector | None = None,
    ) -> PackedMatrix:
        nbytes = packed_nbytes(out_features, in_features, dtype)
        memory, self._unused = self._unused[:nbytes], self._unused[nbytes:]
        matrix = PackedMatrix(out_features, in_features, dtype, memory)
        self._filling.append(self._threads.submit(self._fill, matrix, parts, factors))
        return matrix

    def finish(self) -> None:
        """Wait until every matrix is filled; raise the first error."""
        for filling in self._filling:
            filling.result()

    def _fill(self, matrix: PackedMatrix, parts: Sequence[Part], factors: Vector | None) -> None:
        for part in parts:
            kind, columns_per_row = self._checkpoint.dtype(part.tensor), 1 if part.interleave is None else 2
            num_rows = max(ELEMENTS_AT_ONCE // matrix.in_features // 32, 1) * 32
            for row, rows in self._checkpoint.chunks(part.tensor, part.rows, num_rows):
                if self._stop.is_set():
                    raise Unavailable("loading the model was cancelled")
                start = part.start + row * columns_per_row
                if factors is None:
                    _fill_rows(matrix, rows, kind, start, part.interleave)
                else:
                    widened = as_f32(rows) if kind in READABLE else widen(rows, kind)
                    with np.errstate(over="ignore", invalid="ignore"):  # a NaN ends the requests that meet it
                        matrix.fill(widened * factors, start, part.interleave)

    def vector(self, size: int, parts: Sequence[Part], offset: float = 0.0) -> Vector:
        out = np.zeros(size, np.float32)
        for part in parts:
            values = as_f32(self._checkpoint.tensor(part.tensor).reshape(-1)[part.rows])
            with np.errstate(invalid="ignore"):  # a NaN ends the requests that meet it, not the load
                out[_columns(part, len(values))] = values + np.float32(offset)
        return out


def _fill_rows(matrix: PackedMatrix, rows: npt.NDArray[Any], kind: str, start: int, interleave: int | None) -> None:
    """Pack rows of a tensor of type `kind`, numbers or blocks, into the columns from `start` on."""
    if kind in READABLE:
        matrix.fill(rows, start, interleave)
    elif kind in BLOCK_DTYPES:
        matrix.fill_blocks(rows, kind, start, interleave)
    elif kind == "Q5_0":
        matrix.fill_blocks(q5_0_as_q8_0(rows), "Q8_0", start, interleave)
    else:
        matrix.fill(widen(rows, kind), start, interleave)


def _columns(part: Part, count: int) -> npt.NDArray[np.int64]:
    """Return the columns of a bias's values, which are those of the weight's rows in `PackedMatrix.fill`."""
    rows = np.arange(count)
    if part.interleave is None:
        return part.start + rows
    return part.start + rows // 16 * 32 + 16 * part.interleave + rows % 16


@dataclass(frozen=True, slots=True)
class _MatrixShape:
    """The attributes of a `PackedMatrix` that planning a program reads."""

    out_features: int
    in_features: int
    dtype: PackedDtype
    ranges: tuple[tuple[int, PackedDtype], ...]


class WeightPlanner:
    """Counts bytes and lists tensors; returns shapes instead of matrices."""

    def __init__(self) -> None:
        self.nbytes: Counter[PackedDtype] = Counter()  # of packed matrices
        self.tensors: dict[str, tuple[int, ...]] = {}  # name -> shape

    def matrix(
        self,
        out_features: int,
        in_features: int,
        dtype: PackedDtypes,
        parts: Sequence[Part],
        factors: Vector | None = None,
    ) -> PackedMatrix:
        ranges = column_ranges(out_features, dtype)
        for columns, one in ranges:
            self.nbytes[one] += packed_nbytes(columns, in_features, one)
        self.tensors |= {part.tensor: part.shape for part in parts}
        return cast(PackedMatrix, _MatrixShape(out_features, in_features, ranges[0][1], ranges))

    def vector(self, size: int, parts: Sequence[Part], offset: float = 0.0) -> Vector:
        self.tensors |= {part.tensor: part.shape for part in parts}
        return np.broadcast_to(np.float32(0), (size,))
