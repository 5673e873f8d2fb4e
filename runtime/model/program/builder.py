"""The builder of programs: its methods are the layers of a decoder, its result is a list of ops.

Independent of models. Every op of the result reads only values that an earlier op wrote and no later op overwrote.

A `Value` is symbolic until `build` places it in the arena. Values have `max_tokens` rows, after `gather` `max_samples`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from ....kernels.ops import (
    BLOCK,
    AddNorm,
    Attention,
    Combine,
    Convert,
    Dispatch,
    DType,
    Embed,
    Epilogue,
    ExpertLinear,
    Gather,
    Linear,
    Normed,
    Op,
    Region,
    RouteRows,
    Routing,
    StoredDtype,
    max_groups,
    padded,
    region_nbytes,
)
from ....kernels.pack import PackedMatrix
from .arena_layout import ArenaLayout, Lifetime, lay_out

Vector = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Value:
    """The result of an op, [rows, columns] of one dtype, before it is placed. Valid for its own builder only."""

    index: int
    name: str
    rows: int
    columns: int
    dtype: StoredDtype

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


@dataclass(frozen=True, slots=True)
class Heads:
    """The shape of one attention layer, the place of its keys and values, and what applies to heads and scores."""

    group: int  # layer group: layers that share a page table
    layer: int  # slot in the group's pages
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float  # of queries
    window: int  # 0: all earlier tokens
    softcap: float  # of scores; 0: none
    norms_rows: bool  # q_norm and k_norm are over all heads of a row


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
    logits: Region  # f32 [max_samples, vocab]
    maxima: Region  # f32 [max_samples, padded(vocab) / 32]
    values: tuple[PlacedValue, ...]

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


class ProgramBuilder:
    """Collects the ops of a program, in order, for steps of up to `max_tokens` rows, `max_samples` of which sample."""

    def __init__(self, max_tokens: int, max_samples: int) -> None:
        self.max_tokens = max_tokens
        self.max_samples = max_samples
        self._values: list[Value] = []
        self._first: list[int] = []  # per value: the op that writes it
        self._last: list[int] = []  # per value: the last op that uses it
        self._emit: list[Callable[[Sequence[Region]], Op]] = []  # per op: makes it from the regions of all values
        self._kept: list[Value] = []  # values that nothing overwrites until the end of the step
        self._norm_writers: dict[int, int] = {}  # value -> the op that wrote it last and can still write its norm

    def embed(self, weight: PackedMatrix, scale: float = 1.0) -> Value:
        """Start the residual stream: the embedding of each token times `scale`, f32 [tokens, hidden]."""
        out = self._value("residual", self.max_tokens, weight.in_features, "f32")
        self._norm_writers[out.index] = len(self._emit)
        self._add([out], lambda at: Embed(weight, out.placed(at), scale=scale))
        return out

    def norm(self, x: Value, weight: Vector, eps: float, dtype: DType) -> NormedValue:
        """Norm each row (RMS norm), in the dtype the next linear layer reads.

        This is no op of its own: the op that wrote `x` writes the norm too. Raises ValueError if that op is not
        `embed`, `linear_add`, `add_norm` or `gather`, or if it writes a norm already.
        """
        writer = self._norm_writers.pop(x.index, None)
        if writer is None:
            raise ValueError(f"the op that wrote {x.name} cannot write its norm, or already writes one")
        out = NormedValue(
            self._value("normed", x.rows, x.columns, dtype, writer),
            self._value("squares", x.rows, padded(x.columns) // BLOCK, "f32", writer),
            weight,
            eps,
        )
        write = self._emit[writer]
        self._emit[writer] = lambda at: _with_norm(write(at), out.placed(at))
        return out

    def convert(self, x: Value, dtype: DType) -> Value:
        """Convert `x` to another dtype; return `x` itself if it has that dtype."""
        if x.dtype == dtype:
            return x
        out = self._value(f"{x.name}:{dtype}", x.rows, x.columns, dtype)
        self._add([x, out], lambda at: Convert(x.placed(at), out.placed(at)))
        return out

    def linear(self, x: Value | NormedValue, weight: PackedMatrix, bias: Vector | None, name: str) -> Value:
        """Compute x @ weight.T + bias, f32 [rows, out_features]."""
        out = self._value(name, x.rows, weight.out_features, "f32")
        self._add([*x.parts, out], lambda at: Linear(x.placed(at), weight, bias, out.placed(at), "store"))
        return out

    def router(self, x: Value, normed: NormedValue, weight: PackedMatrix, bias: Vector | None) -> Value:
        """Compute the logits of the experts, f32 [rows, experts], from the f32 row that `normed` is the norm of.

        The weight's columns have been multiplied by those of the norm.
        """
        return self.linear(replace(normed, data=x), weight, bias, "router logits")

    def linear_add(
        self, x: Value, weight: PackedMatrix, bias: Vector | None, residual: Value, scale: float = 1.0
    ) -> None:
        """Add (x @ weight.T + bias) * scale to `residual`, in place."""
        self._norm_writers[residual.index] = len(self._emit)
        self._add([x, residual], lambda at: Linear(x.placed(at), weight, bias, residual.placed(at), "add", scale=scale))

    def add_norm(self, x: Value, weight: Vector, eps: float, residual: Value) -> None:
        """Add the RMS norm of `x` to `residual`, in place."""
        self._norm_writers[residual.index] = len(self._emit)
        self._add([x, residual], lambda at: AddNorm(x.placed(at), weight, eps, residual.placed(at)))

    def gated(
        self,
        x: Value | NormedValue,
        weight: PackedMatrix,
        bias: Vector | None,
        columns: int,
        epilogue: Epilogue,
        dtype: DType,
    ) -> Value:
        """Compute the product of gate and up of a gated `epilogue`, [rows, columns] in the next layer's dtype.

        The weight's columns are 16 of gate and 16 of up in turn.
        """
        out = self._value("activated", x.rows, columns, dtype)
        self._add([*x.parts, out], lambda at: Linear(x.placed(at), weight, bias, out.placed(at), epilogue))
        return out

    def route(self, logits: Value, top_k: int, normalised: bool) -> RoutingValue:
        """Choose the `top_k` experts of each row, and group the rows by expert."""
        num_experts = logits.columns
        routing = RoutingValue(
            num_experts,
            top_k,
            self._value("expert weights", logits.rows, top_k, "f32"),
            self._value("expert places", logits.rows, top_k, "i32"),
            self._value("expert groups", 1 + max_groups(logits.rows, num_experts, top_k), 3, "i32"),
        )
        self._kept.append(routing.groups)
        self._add([logits, *routing.parts], lambda at: RouteRows(logits.placed(at), routing.placed(at), normalised))
        return routing

    def dispatch(self, x: NormedValue, routing: RoutingValue) -> NormedValue:
        """Copy each row of `x` to the places of its experts, [tokens * top_k, columns]."""
        rows = x.rows * routing.top_k
        out = NormedValue(
            self._value("dispatched", rows, x.data.columns, x.data.dtype),
            self._value("squares", rows, x.squares.columns, "f32"),
            x.weight,
            x.eps,
        )
        self._add(
            [*x.parts, *routing.parts, *out.parts],
            lambda at: Dispatch(x.placed(at), routing.placed(at), out.placed(at)),
        )
        return out

    def expert_gated(
        self,
        x: NormedValue,
        weights: tuple[PackedMatrix, ...],
        biases: tuple[Vector, ...] | None,
        routing: RoutingValue,
        columns: int,
        epilogue: Epilogue,
        dtype: DType,
    ) -> Value:
        """Compute `gated` of each place with the weight and bias of its expert."""
        out = self._value("activated", x.rows, columns, dtype)
        self._add(
            [*x.parts, *routing.parts, out],
            lambda at: ExpertLinear(x.placed(at), weights, routing.placed(at), out.placed(at), epilogue, biases),
        )
        return out

    def expert_linear(
        self, x: Value, weights: tuple[PackedMatrix, ...], biases: tuple[Vector, ...] | None, routing: RoutingValue
    ) -> Value:
        """Compute x @ weight.T + bias of each place with those of its expert, f32 [places, out_features]."""
        out = self._value("expert outputs", x.rows, weights[0].out_features, "f32")
        self._add(
            [x, *routing.parts, out],
            lambda at: ExpertLinear(x.placed(at), weights, routing.placed(at), out.placed(at), "store", biases),
        )
        return out

    def combine_add(self, x: Value, routing: RoutingValue, residual: Value) -> None:
        """Add the weighted sum of each row's places in `x` to `residual`, in place."""
        self._norm_writers[residual.index] = len(self._emit)
        self._add(
            [x, *routing.parts, residual], lambda at: Combine(x.placed(at), routing.placed(at), residual.placed(at))
        )

    def attention(
        self,
        qkv: Value,
        heads: Heads,
        q_norm: Vector | None,
        k_norm: Vector | None,
        eps: float,
        rotary: Vector | None,
        sinks: Vector | None,
        dtype: DType,
    ) -> Value:
        """Attend causally over the pages, [tokens, num_heads * head_dim] in `dtype`.

        Stores K and V in their pages. Without a `rotary` table heads are not rotated. If the query
        heads of a KV head do not fill whole blocks, the op's result is f32 and a `Convert` follows.
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
                scale=heads.scale,
                window=heads.window,
                softcap=heads.softcap,
                norms_rows=heads.norms_rows,
                sinks=sinks,
            ),
        )
        return self.convert(out, dtype)

    def gather(self, x: Value) -> Value:
        """Take the rows of `x` that sample, [samples, columns]."""
        out = self._value("sampled", self.max_samples, x.columns, x.dtype)
        self._norm_writers[out.index] = len(self._emit)
        self._add([x, out], lambda at: Gather(x.placed(at), out.placed(at)))
        return out

    def logits(self, x: Value | NormedValue, weight: PackedMatrix, scale: float = 1.0, softcap: float = 0.0) -> Logits:
        """Compute x @ weight.T * scale, soft-capped if there is a cap: the logits of the rows that sample."""
        values = self._value("logits", x.rows, weight.out_features, "f32")
        maxima = self._value("maxima", x.rows, padded(weight.out_features) // BLOCK, "f32")
        self._add(
            [*x.parts, values, maxima],
            lambda at: Linear(
                x.placed(at),
                weight,
                None,
                values.placed(at),
                "store",
                maxima=maxima.placed(at),
                scale=scale,
                softcap=softcap,
            ),
        )
        return Logits(values, maxima)

    def build(self, logits: Logits) -> ProgramPlan:
        """Place every value and make the ops. `logits` stay readable after the step."""
        for kept in (logits.values, logits.maxima, *self._kept):
            self._last[kept.index] = len(self._emit)
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

    def _value(self, name: str, rows: int, columns: int, dtype: StoredDtype, writer: int | None = None) -> Value:
        """Return a new value, written by op `writer` or else by the next op added."""
        value = Value(len(self._values), name, rows, columns, dtype)
        self._values.append(value)
        self._first.append(len(self._emit) if writer is None else writer)
        self._last.append(len(self._emit) if writer is None else writer)
        return value

    def _add(self, used: Sequence[Value], emit: Callable[[Sequence[Region]], Op]) -> None:
        for value in used:
            self._last[value.index] = len(self._emit)
        self._emit.append(emit)

    def _lay_out(self) -> ArenaLayout:
        return lay_out(
            [
                Lifetime(region_nbytes(value.rows, value.columns, value.dtype), first, last)
                for value, first, last in zip(self._values, self._first, self._last, strict=True)
            ]
        )


def _with_norm(op: Op, normed: Normed) -> Op:
    assert isinstance(op, Embed | Linear | Gather | AddNorm | Combine)
    return replace(op, normed=normed)
