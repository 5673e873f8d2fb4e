"""Packing of weights for the kernels, in one block of memory, and its plan, for descriptions of weights of any model.

A description, such as `build_weights` in `decoder_weights.py`, makes matrices and vectors with a `WeightFactory`: one
factory packs, one plans, and one checks the tensors.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from decimal import Decimal
from math import prod
from typing import Any, Protocol, TypeVar, cast

import numpy as np
import numpy.typing as npt

from ....kernels import available_cpus
from ....kernels.ops import BLOCK
from ....kernels.ops import WeightDtype as PackedDtype
from ....kernels.pack import BLOCK_DTYPES, PackedMatrix, column_ranges, packed_nbytes, widen_blocks
from ....pager import OutOfMemory, map_memory
from ...common.config import WeightDtype
from ...common.errors import ModelError, Unavailable
from . import READABLE, Checkpoint, as_f32
from .numbers import check_numbers

Vector = npt.NDArray[np.float32]
InputOrder = npt.NDArray[np.int32]  # the input that each column along K of a matrix belongs to
Weights = TypeVar("Weights")  # weights of one kind of model
ELEMENTS_PER_CHECK = 1 << 20  # elements of a tensor between two checks for cancellation
PackedDtypes = PackedDtype | Sequence[tuple[int, PackedDtype]]  # dtype of a matrix, or of ranges of its columns


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of a tensor, and the columns of a packed matrix that they fill (see `PackedMatrix.fill`)."""

    tensor: str
    shape: tuple[int, ...]  # [rows, in_features], [experts, rows, in_features], or a vector's [rows]
    first_row: int = 0  # first row among all rows of all experts
    num_rows: int | None = None  # None: all rows from `first_row`
    start: int = 0
    interleave: int | None = None

    @property
    def count(self) -> int:
        """The number of rows."""
        return prod(self.shape[:-1]) - self.first_row if self.num_rows is None else self.num_rows

    @property
    def rows(self) -> slice:
        return slice(self.first_row, None if self.num_rows is None else self.first_row + self.num_rows)


@dataclass(frozen=True, slots=True)
class MatrixPlan:
    """A packed matrix, and the parts of tensors that fill it."""

    out_features: int
    in_features: int
    dtype: PackedDtypes
    parts: Sequence[Part]
    factors: Vector | None = None  # multiply the columns, in the order of in_features
    input_order: InputOrder | None = None  # order of the inputs in the tensors and in the matrix
    group: int = 0  # group of a `PackedMatrix`


Q8_FORM = 2  # version of the form of q8 that is quantized while it is packed: rotated, with groups of GROUP blocks
GROUP = 4
MAX_LOG = 80.0  # the exp of larger numbers is no f32


def attention_group(num_heads: int, num_kv_heads: int, head_dim: int) -> int:
    """Return the group of a matrix that reads the output of attention.

    The query heads of a KV head are written together; heads that fill no blocks are converted row by row.
    """
    columns = num_heads // num_kv_heads * head_dim
    return GROUP if columns % BLOCK else min(GROUP, columns // BLOCK & -(columns // BLOCK))


class WeightFactory(Protocol):
    """Makes the matrices and vectors of `build_weights`, in the order of their place in memory."""

    def matrix(self, plan: MatrixPlan) -> PackedMatrix:
        """Return the matrix that `plan` describes."""

    def vector(self, size: int, parts: Sequence[Part], offset: float = 0.0) -> Vector: ...


def pack_built(
    build: Callable[[WeightFactory, WeightDtype], Weights],
    checkpoint: Checkpoint,
    dtype: WeightDtype,
    stop: threading.Event | None = None,
) -> Weights:
    """Pack every matrix that `build` makes into one block of exactly the planned size.

    Raises ModelError when the system has no memory for the block, and Unavailable when another thread sets `stop`,
    after the tensors in progress.
    """
    block = _map_weights(build, dtype)
    with ThreadPoolExecutor(available_cpus().threads) as threads:
        packer = _Packer(checkpoint, block, threads, stop or threading.Event())
        weights = build(packer, dtype)
        packer.finish()
    return weights


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


def stacked(names: Sequence[str], sizes: Sequence[int]) -> list[Part]:
    """Return the parts of a matrix whose columns come from several tensors, one after another, or from one tensor."""
    if len(names) == 1:
        return [Part(names[0], (sum(sizes),))]
    starts = np.cumsum([0, *sizes[:-1]]).tolist()
    return [Part(name, (size,), start=start) for name, size, start in zip(names, sizes, starts, strict=True)]


def interleaved(names: Sequence[str], size: int, up_first: bool = False) -> list[Part]:
    """Return the parts of a matrix that alternates 16 columns of gate and 16 of up, `size` columns each.

    With `up_first`, a tensor that has both begins with up.
    """
    if len(names) == 1:
        return [Part(names[0], (2 * size,), (phase ^ up_first) * size, size, interleave=phase) for phase in (0, 1)]
    return [Part(name, (size,), interleave=phase) for phase, name in enumerate(names)]


def named(parts: Sequence[Part], prefix: str, suffix: str, *in_features: int) -> list[Part]:
    return [
        replace(part, tensor=f"{prefix}{part.tensor}.{suffix}", shape=(*part.shape, *in_features)) for part in parts
    ]


def packed_dtypes(
    quantized: Mapping[str, str], dtype: WeightDtype | PackedDtype, parts: Sequence[Part]
) -> PackedDtypes:
    """Return the dtype of a matrix; with `auto` the dtypes of its tensors in `quantized`, bf16 if one is not in blocks.

    Tensors of different types in ranges of columns keep them, if the kernels can have such ranges; else all are q8.
    """
    if dtype != "auto":
        return dtype
    if any(part.tensor not in quantized for part in parts):
        return "bf16"
    dtypes = [BLOCK_DTYPES.get(quantized[part.tensor], "q8") for part in parts]
    if len(set(dtypes)) == 1:
        return dtypes[0]
    ranges = [(part.shape[0], dtype) for part, dtype in zip(parts, dtypes, strict=True)]
    whole = all(columns % 32 == 0 for columns, _ in ranges[:-1])
    return ranges if whole and all(part.interleave is None for part in parts) else "q8"


def scaled(bias: Vector | None, factor: float) -> Vector | None:
    """Return a bias times a factor, for a linear layer whose scale must not change it, or by less."""
    return bias if bias is None or factor == 1 else bias * np.float32(factor)


def decay_rates(logarithms: Vector) -> Vector:
    """Return -exp of each element, with the same bits on every machine, where numpy's exp may have others."""
    return np.array([-Decimal(min(float(each), MAX_LOG)).exp() for each in logarithms], np.float32)


class _Packer:
    """A factory that takes memory for matrices from the block, front to back, and fills them on threads."""

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

    def matrix(self, plan: MatrixPlan) -> PackedMatrix:
        nbytes = packed_nbytes(plan.out_features, plan.in_features, plan.dtype, plan.group)
        memory = self._unused[:nbytes]
        self._unused = self._unused[nbytes:]
        padded_columns = -(-plan.out_features // BLOCK) * BLOCK
        matrix = PackedMatrix(
            plan.out_features,
            plan.in_features,
            plan.dtype,
            memory,
            plan.input_order,
            plan.group,
            has_padding=sum(part.count for part in plan.parts) < padded_columns,
        )
        self._filling.append(self._threads.submit(self._fill, matrix, plan.parts, plan.factors))
        return matrix

    def finish(self) -> None:
        """Wait until every matrix is filled; raise the first error."""
        for filling in self._filling:
            filling.result()

    def _fill(self, matrix: PackedMatrix, parts: Sequence[Part], factors: Vector | None) -> None:
        for part in parts:
            kind = self._checkpoint.dtype(part.tensor)
            columns_per_row = 1 if part.interleave is None else 2
            num_rows = max(ELEMENTS_PER_CHECK // matrix.in_features // 32, 1) * 32
            for row, rows in self._checkpoint.chunks(part.tensor, part.rows, num_rows):
                if self._stop.is_set():
                    raise Unavailable("loading the model was cancelled")
                check_numbers(rows, kind, part.tensor, self._checkpoint.path)
                start = part.start + row * columns_per_row
                if factors is None:
                    fill_rows(matrix, rows, kind, start, part.interleave)
                else:
                    widened = as_f32(rows) if kind in READABLE else widen_blocks(rows, kind)
                    matrix.fill(widened * factors, start, part.interleave)

    def vector(self, size: int, parts: Sequence[Part], offset: float = 0.0) -> Vector:
        out = np.zeros(size, np.float32)
        for part in parts:
            values = self._checkpoint.tensor(part.tensor).reshape(-1)[part.rows]
            check_numbers(values, self._checkpoint.dtype(part.tensor), part.tensor, self._checkpoint.path)
            out[columns_of(part, len(values))] = as_f32(values) + np.float32(offset)
        return out


def fill_rows(matrix: PackedMatrix, rows: npt.NDArray[Any], kind: str, start: int, interleave: int | None) -> None:
    """Pack rows of a tensor of type `kind`, numbers or blocks, into the columns from `start` on."""
    if kind in READABLE:
        matrix.fill(rows, start, interleave)
    else:
        matrix.fill_blocks(rows, kind, start, interleave)


def columns_of(part: Part, count: int) -> npt.NDArray[np.int64] | slice:
    """Return the columns of a bias's values, in the order in which `PackedMatrix.fill` places the weight's rows."""
    if part.interleave is None:
        return slice(part.start, part.start + count)
    rows = np.arange(count)
    return part.start + rows // 16 * 32 + 16 * part.interleave + rows % 16


@dataclass(frozen=True, slots=True)
class _MatrixShape:
    """The attributes of a `PackedMatrix` that planning a program reads."""

    out_features: int
    in_features: int
    dtype: PackedDtype
    ranges: tuple[tuple[int, PackedDtype], ...]
    input_order: InputOrder | None
    group: int


class WeightPlanner:
    """A factory that counts bytes and lists tensors; it returns shapes instead of matrices."""

    def __init__(self) -> None:
        self.nbytes: Counter[PackedDtype] = Counter()  # bytes of packed matrices
        self.tensors: dict[str, tuple[int, ...]] = {}  # name -> shape

    def matrix(self, plan: MatrixPlan) -> PackedMatrix:
        ranges = column_ranges(plan.out_features, plan.dtype)
        for columns, dtype in ranges:
            self.nbytes[dtype] += packed_nbytes(columns, plan.in_features, dtype, plan.group)
        self.tensors |= {part.tensor: part.shape for part in plan.parts}
        shape = _MatrixShape(plan.out_features, plan.in_features, ranges[0][1], ranges, plan.input_order, plan.group)
        return cast(PackedMatrix, shape)

    def vector(self, size: int, parts: Sequence[Part], offset: float = 0.0) -> Vector:
        self.tensors |= {part.tensor: part.shape for part in parts}
        return np.broadcast_to(np.float32(0), (size,))
