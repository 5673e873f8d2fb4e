"""The values that a program computes, before they are placed in the arena, and the program that `ProgramBuilder` makes.

A `Value` is symbolic until `ProgramBuilder.build` places it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ....kernels.ops import INPUT_DTYPES, DType, HeadNorm, Lora, Normed, Op, Region, Routing, StoredDtype
from ....kernels.pack import PackedMatrix

Vector = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class RowForm:
    """The form of rows: their dtype, and the group of blocks that share a scale in q8 (see `Region`)."""

    dtype: DType
    group: int = 0


F32 = RowForm("f32")


def multiplied_form(weight: PackedMatrix) -> RowForm:
    """Return the form of the rows that a weight multiplies."""
    return RowForm(INPUT_DTYPES[weight.dtype], weight.group)


def input_form(weight: PackedMatrix) -> RowForm:
    """Return the form of a linear layer's input; f32 if the columns of the input are reordered first."""
    return multiplied_form(weight) if weight.input_order is None else F32


@dataclass(frozen=True, slots=True)
class Value:
    """The result of an op, [rows, columns] of one dtype, before it is placed. Valid for its own builder only."""

    index: int
    name: str
    rows: int
    columns: int
    dtype: StoredDtype
    group: int = 0  # the group of a `Region`

    @property
    def form(self) -> RowForm:
        assert self.dtype != "i32", "tables have no form of rows"
        return RowForm(self.dtype, self.group)

    @property
    def parts(self) -> tuple[Value, ...]:
        return (self,)

    def placed(self, regions: Sequence[Region]) -> Region:
        return regions[self.index]


@dataclass(frozen=True, slots=True)
class NormedValue:
    """The result of `norm`: a `kernels.ops.Normed` before it is placed. Only a linear layer can read it."""

    data: Value
    squares: Value
    weight: Vector
    eps: float

    @property
    def rows(self) -> int:
        return self.data.rows

    @property
    def parts(self) -> tuple[Value, ...]:
        return self.data, self.squares

    def placed(self, regions: Sequence[Region]) -> Normed:
        return Normed(self.data.placed(regions), self.squares.placed(regions), self.weight, self.eps)


@dataclass(frozen=True, slots=True)
class LoraTarget:
    """A linear layer that adapters may change."""

    weight: PackedMatrix
    ranks: int  # columns of A x for all parts of the layer


class LoraTargets:
    """The linear layers of a program that adapters may change, numbered in order."""

    def __init__(self, targets: Sequence[LoraTarget] = ()) -> None:
        self._targets = tuple(targets)
        self._numbers = {id(target.weight): number for number, target in enumerate(targets)}

    def number(self, weight: PackedMatrix) -> int | None:
        """Return the number of the layer with this weight; None if adapters do not change the layer."""
        return self._numbers.get(id(weight))

    def ranks(self, number: int) -> int:
        return self._targets[number].ranks


@dataclass(frozen=True, slots=True)
class LoraValue:
    """A `kernels.ops.Lora` before it is placed."""

    target: int
    rows: Value

    def placed(self, regions: Sequence[Region]) -> Lora:
        return Lora(self.target, self.rows.placed(regions))


@dataclass(frozen=True, slots=True)
class RoutingValue:
    """The result of `route`: a `kernels.ops.Routing` before it is placed."""

    num_experts: int
    top_k: int
    weights: Value
    places: Value
    groups: Value

    @property
    def parts(self) -> tuple[Value, ...]:
        return self.weights, self.places, self.groups

    def placed(self, regions: Sequence[Region]) -> Routing:
        return Routing(self.num_experts, self.top_k, *(part.placed(regions) for part in self.parts))


@dataclass(frozen=True, slots=True)
class Logits:
    """The result of a program, and the maximum of each 32 logits, so that greedy sampling reads few of them."""

    values: Value  # f32 [samples, vocab]
    maxima: Value  # f32 [samples, padded(vocab) / 32]
    hidden: Value | None = None  # normed rows, which a head reads: all rows of a step, or of a head's those that sample

    @property
    def parts(self) -> tuple[Value, ...]:
        results = self.values, self.maxima
        return results if self.hidden is None else (*results, self.hidden)


@dataclass(frozen=True, slots=True)
class Heads:
    """The shape of one attention layer, the place of its keys and values, and the operations on heads and scores."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float  # factor of queries
    window: int  # 0: all earlier tokens, or with causal = False all tokens
    group: int = 0  # layer group: layers that share a page table
    layer: int = 0  # slot in the group's pages
    softcap: float = 0.0  # cap of scores; 0: no cap
    gated: bool = False  # a gate follows each query head; its sigmoid multiplies the output
    norms_rows: bool = False  # q_norm and k_norm are over all heads of a row
    head_norm: HeadNorm = "rms"  # kind of q_norm and k_norm
    causal: bool = True  # a row sees itself and earlier rows only
    bias: npt.NDArray[np.float32] | None = None  # bias of scores, by positions of query and key: `EphemeralAttention`
    rotary_dim: int = 0  # elements that are rotated by rows of every step instead of a table
    rotary_span: int = 0  # elements whose first pairs are rotated by a table; 0: as many as it rotates
    stores: bool = True  # keys and values are projected and stored; else those at the same place are read
    values_are_keys: bool = False  # values are the keys before norm and rotation


@dataclass(frozen=True, slots=True)
class PlacedValue:
    """A value in the arena, and the first and last op that use it."""

    name: str
    region: Region
    first_op: int
    last_op: int


@dataclass(frozen=True, slots=True)
class ProgramPlan:
    """The ops and the arena's size for `kernels.Program`, and the map of the arena."""

    ops: list[Op]
    arena_bytes: int
    inputs: tuple[Region, ...]  # f32 [max_tokens, columns]: values that the caller writes before a step
    results: tuple[
        Region, ...
    ]  # f32 [max_samples, columns]: logits and their maxima, vectors, scores; or rows of images
    values: tuple[PlacedValue, ...]

    @property
    def logits(self) -> Region:
        """The logits of a decoder, f32 [max_samples, vocab]."""
        return self.results[0]

    @property
    def maxima(self) -> Region:
        """The maximum of each 32 logits, f32 [max_samples, padded(vocab) / 32]."""
        return self.results[1]

    @property
    def hidden(self) -> Region | None:
        """The normed rows that a head reads, f32; None if the program has no such result."""
        return self.results[2] if len(self.results) > 2 else None

    def describe(self) -> str:
        """Return the arena's map as text: one line per place and use, with the number of uses."""
        uses: dict[tuple[int, str, str], int] = {}
        for value in self.values:
            shape = f"{value.region.dtype} [{value.region.rows}, {value.region.columns}]"
            key = value.region.offset, f"{value.name:<14}{shape:<22}", f"{value.region.nbytes:>14,} B"
            uses[key] = uses.get(key, 0) + 1
        by_offset = sorted(uses.items(), key=lambda use: use[0][0])
        lines = [f"{offset:>14,}  {what}{size}  x{count}" for (offset, what, size), count in by_offset]
        return "\n".join([*lines, f"{self.arena_bytes:>14,}  end of arena, {len(self.ops)} ops"])
