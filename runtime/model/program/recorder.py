"""The ops of a program in order, and the values that they write and read, until these have a place in the arena.

Independent of the arithmetic of ops: `builder.py` has a method for each. Every op of the result reads only values that
an earlier op wrote and no later op overwrote.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ....kernels.ops import Op, Region, StoredDtype, region_nbytes
from .arena_layout import ArenaLayout, Lifetime, lay_out
from .values import Logits, PlacedValue, ProgramPlan, Value


class OpRecorder:
    """A list of ops and values; places the values when all ops are known."""

    def __init__(self) -> None:
        self._values: list[Value] = []
        self._first: list[int] = []  # per value: the op that writes it
        self._last: list[int] = []  # per value: the last op that uses it
        self._emit: list[Callable[[Sequence[Region]], Op]] = []  # per op: makes it from the regions of all values
        self._inputs: list[Value] = []  # values that the caller writes
        self._kept: list[Value] = []  # values that nothing overwrites until the end of the step

    def build(self, result: Logits | Value, *others: Value) -> ProgramPlan:
        """Place every value and make the ops. The `result` and `others` stay readable after the step."""
        results = (*result.parts, *others)
        for kept in (*results, *self._kept):
            self._last[kept.index] = len(self._emit)
        layout = self._lay_out()
        regions = [
            Region(offset, value.rows, value.columns, value.dtype, value.group)
            for offset, value in zip(layout.offsets, self._values, strict=True)
        ]
        return ProgramPlan(
            ops=[emit(regions) for emit in self._emit],
            arena_bytes=layout.nbytes,
            inputs=tuple(each.placed(regions) for each in self._inputs),
            results=tuple(part.placed(regions) for part in results),
            values=tuple(
                PlacedValue(value.name, regions[value.index], self._first[value.index], self._last[value.index])
                for value in self._values
            ),
        )

    def _value(
        self, name: str, rows: int, columns: int, dtype: StoredDtype, writer: int | None = None, group: int = 0
    ) -> Value:
        """Return a new value, written by op `writer` or else by the next op added."""
        value = Value(len(self._values), name, rows, columns, dtype, group)
        self._values.append(value)
        self._first.append(len(self._emit) if writer is None else writer)
        self._last.append(len(self._emit) if writer is None else writer)
        return value

    def _add(self, used: Sequence[Value], emit: Callable[[Sequence[Region]], Op]) -> None:
        """Add an op that uses these values; `emit` makes it from the regions of all values."""
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
