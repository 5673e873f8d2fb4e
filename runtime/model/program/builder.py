"""From a model's description to a program: the methods are the model's vocabulary, the result is a list of ops.

It must not know any model, nor run anything. The one invariant: every op of the result reads only values that an
earlier op wrote and that nothing has overwritten since.

A `Value` is symbolic until `build` gives it a place in the arena. Values over tokens have `max_tokens` rows, those
behind `gather` have `max_samples`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from ....kernels.ops import (
    BLOCK,
    Attention,
    Convert,
    DType,
    Embed,
    Gather,
    Linear,
    Normed,
    Op,
    Region,
    padded,
    region_nbytes,
)
from ....kernels.pack import PackedMatrix
from .memory import ArenaLayout, Lifetime, lay_out

Vector = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Value:
    """What an op yields: f32, bf16 or q8 [rows, columns], not yet anywhere. Meaningful to the builder that made it."""

    index: int
    name: str
    rows: int
    columns: int
    dtype: DType

    @property
    def parts(self) -> tuple[Value, ...]:
        return (self,)

    def placed(self, regions: Sequence[Region]) -> Region:
        return regions[self.index]


@dataclass(frozen=True, slots=True)
class NormedValue:
    """What `norm` yields: a `kernels.ops.Normed`, not yet anywhere. Only a linear layer can read it."""

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
class Logits:
    """What a program is for, and the largest of each 32 of them, which spares greedy sampling most of the reading."""

    values: Value  # f32 [samples, vocab]
    maxima: Value  # f32 [samples, padded(vocab) / 32]


@dataclass(frozen=True, slots=True)
class Heads:
    """The shape of one attention layer, and where its keys and values lie."""

    group: int  # of layers that share a page table
    layer: int  # slot in the group's pages
    num_heads: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class PlacedValue:
    """One value in the arena, and the ops that first and last touch it."""

    name: str
    region: Region
    first_op: int
    last_op: int


@dataclass(frozen=True, slots=True)
class ProgramPlan:
    """What `kernels.Program` is made of, and the arena's map."""

    ops: list[Op]
    arena_bytes: int
    logits: Region  # f32 [max_samples, vocab]
    maxima: Region  # f32 [max_samples, padded(vocab) / 32]
    values: tuple[PlacedValue, ...]

    def describe(self) -> str:
        """The arena's map for people: one line per place and use, with how often it is used."""
        uses: dict[tuple[int, str, str], int] = {}
        for value in self.values:
            shape = f"{value.region.dtype} [{value.region.rows}, {value.region.columns}]"
            key = value.region.offset, f"{value.name:<14}{shape:<22}", f"{value.region.nbytes:>14,} B"
            uses[key] = uses.get(key, 0) + 1
        by_offset = sorted(uses.items(), key=lambda use: use[0][0])
        lines = [f"{offset:>14,}  {what}{size}  x{count}" for (offset, what, size), count in by_offset]
        return "\n".join([*lines, f"{self.arena_bytes:>14,}  end of arena, {len(self.ops)} ops"])


class ProgramBuilder:
    """Collects ops in order of execution for steps of up to `max_tokens` rows, `max_samples` of which sample."""

    def __init__(self, max_tokens: int, max_samples: int) -> None:
        self.max_tokens = max_tokens
        self.max_samples = max_samples
        self._values: list[Value] = []
        self._first: list[int] = []  # per value: the op that writes it
        self._last: list[int] = []  # per value: the last op that touches it
        self._emit: list[Callable[[Sequence[Region]], Op]] = []  # one per op, given every value's region
        self._unnormed: dict[int, int] = {}  # values whose last writer can leave a norm of them, and has not: that op

    def embed(self, weight: PackedMatrix) -> Value:
        """f32 [tokens, hidden]: the residual stream begins."""
        out = self._value("residual", self.max_tokens, weight.in_features, "f32")
        self._unnormed[out.index] = len(self._emit)
        self._add([out], lambda at: Embed(weight, out.placed(at)))
        return out

    def norm(self, x: Value, weight: Vector, eps: float, dtype: DType) -> NormedValue:
        """RMS norm of each row, in the dtype the next linear layer reads. Not an op: whoever wrote `x` leaves it too.

        Raises ValueError where that is not `embed`, `linear_add` or `gather`, or has left a norm already.
        """
        writer = self._unnormed.pop(x.index, None)
        if writer is None:
            raise ValueError(f"the op that wrote {x.name} cannot leave a norm of it, or has already left one")
        out = NormedValue(
            self._value("normed", x.rows, x.columns, dtype, writer),
            self._value("squares", x.rows, padded(x.columns) // BLOCK, "f32", writer),
            weight,
            eps,
        )
        write = self._emit[writer]
        self._emit[writer] = lambda at: _leaving(write(at), out.placed(at))
        return out

    def convert(self, x: Value, dtype: DType) -> Value:
        """`x` in another dtype; `x` itself where it has that dtype already."""
        if x.dtype == dtype:
            return x
        out = self._value(f"{x.name}:{dtype}", x.rows, x.columns, dtype)
        self._add([x, out], lambda at: Convert(x.placed(at), out.placed(at)))
        return out

    def linear(self, x: Value | NormedValue, weight: PackedMatrix, bias: Vector | None, name: str) -> Value:
        """x @ weight.T + bias, f32 [rows, out_features]."""
        out = self._value(name, x.rows, weight.out_features, "f32")
        self._add([*x.parts, out], lambda at: Linear(x.placed(at), weight, bias, out.placed(at), "store"))
        return out

    def linear_add(self, x: Value, weight: PackedMatrix, bias: Vector | None, residual: Value) -> None:
        """residual += x @ weight.T + bias, in place."""
        self._unnormed[residual.index] = len(self._emit)
        self._add([x, residual], lambda at: Linear(x.placed(at), weight, bias, residual.placed(at), "add"))

    def swiglu(
        self, x: Value | NormedValue, weight: PackedMatrix, bias: Vector | None, columns: int, dtype: DType
    ) -> Value:
        """silu(gate) * up, [rows, columns] in the dtype the next linear layer reads.

        The weight's columns interleave gate and up by 16.
        """
        out = self._value("activated", x.rows, columns, dtype)
        self._add([*x.parts, out], lambda at: Linear(x.placed(at), weight, bias, out.placed(at), "swiglu"))
        return out

    def attention(
        self,
        qkv: Value,
        heads: Heads,
        q_norm: Vector | None,
        k_norm: Vector | None,
        eps: float,
        rotary: Vector,
        window: int,
        dtype: DType,
    ) -> Value:
        """Causal attention of the rotated heads over the pages, [tokens, num_heads * head_dim].

        K and V go to their pages; queries are scaled by head_dim ** -0.5; `window` 0 sees everything. In `dtype` where
        the query heads of a KV head fill whole blocks, else in f32.
        """
        whole = heads.num_heads // heads.num_kv_heads * heads.head_dim % BLOCK == 0
        out = self._value("attended", qkv.rows, heads.num_heads * heads.head_dim, dtype if whole else "f32")
        self._add(
            [qkv, out],
            lambda at: Attention(
                qkv=qkv.placed(at),
                out=out.placed(at),
                group=heads.group,
                layer=heads.layer,
                num_heads=heads.num_heads,
                num_kv_heads=heads.num_kv_heads,
                head_dim=heads.head_dim,
                q_norm=q_norm,
                k_norm=k_norm,
                eps=eps,
                rotary=rotary,
                scale=heads.head_dim**-0.5,
                window=window,
            ),
        )
        return self.convert(out, dtype)

    def gather(self, x: Value) -> Value:
        """The rows of `x` that sample, [samples, columns]."""
        out = self._value("sampled", self.max_samples, x.columns, x.dtype)
        self._unnormed[out.index] = len(self._emit)
        self._add([x, out], lambda at: Gather(x.placed(at), out.placed(at)))
        return out

    def logits(self, x: Value | NormedValue, weight: PackedMatrix) -> Logits:
        """x @ weight.T."""
        values = self._value("logits", x.rows, weight.out_features, "f32")
        maxima = self._value("maxima", x.rows, padded(weight.out_features) // BLOCK, "f32")
        self._add(
            [*x.parts, values, maxima],
            lambda at: Linear(x.placed(at), weight, None, values.placed(at), "store", maxima=maxima.placed(at)),
        )
        return Logits(values, maxima)

    def build(self, logits: Logits) -> ProgramPlan:
        """Places every value and emits the ops. `logits` stay readable after the step."""
        self._last[logits.values.index] = self._last[logits.maxima.index] = len(self._emit)
        layout = self._lay_out()
        regions = [
            Region(offset, value.rows, value.columns, value.dtype)
            for offset, value in zip(layout.offsets, self._values, strict=True)
        ]
        return ProgramPlan(
            ops=[emit(regions) for emit in self._emit],
            arena_bytes=layout.nbytes,
            logits=logits.values.placed(regions),
            maxima=logits.maxima.placed(regions),
            values=tuple(
                PlacedValue(value.name, regions[value.index], self._first[value.index], self._last[value.index])
                for value in self._values
            ),
        )

    def _value(self, name: str, rows: int, columns: int, dtype: DType, writer: int | None = None) -> Value:
        """A value that op `writer` will write, or else the next op added."""
        value = Value(len(self._values), name, rows, columns, dtype)
        self._values.append(value)
        self._first.append(len(self._emit) if writer is None else writer)
        self._last.append(len(self._emit) if writer is None else writer)
        return value

    def _add(self, touched: Sequence[Value], emit: Callable[[Sequence[Region]], Op]) -> None:
        for value in touched:
            self._last[value.index] = len(self._emit)
        self._emit.append(emit)

    def _lay_out(self) -> ArenaLayout:
        return lay_out(
            [
                Lifetime(region_nbytes(value.rows, value.columns, value.dtype), first, last)
                for value, first, last in zip(self._values, self._first, self._last, strict=True)
            ]
        )


def _leaving(op: Op, normed: Normed) -> Op:
    assert isinstance(op, Embed | Linear | Gather)
    return replace(op, normed=normed)
