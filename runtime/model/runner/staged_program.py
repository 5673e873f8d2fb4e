"""A program without state between runs: it has no pages, and computes its rows in stages."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ....kernels import Pool, Program
from ....kernels.ops import EphemeralAttention, Region
from ..program import ProgramPlan

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int32]


class StagedProgram:
    """A program bound to memory and threads. One set of rows is computed at a time."""

    def __init__(
        self, plan: ProgramPlan, pool: Pool, isa: str, *, max_rows: int, max_texts: int, vocab_size: int
    ) -> None:
        """Take `plan.arena_bytes` of memory. Raises MemoryError."""
        self._ends = stage_ends(plan.ops)
        self.num_stages = len(self._ends)  # one per layer, with the ops before the first and after the last
        self.program = program_without_pages(
            plan, pool, isa, max_rows=max_rows, max_texts=max_texts, vocab_size=vocab_size
        )
        self.kv_dtype = next((op.pages.dtype for op in plan.ops if isinstance(op, EphemeralAttention)), "f32")
        self._token_ids = self._row_start = np.zeros(0, np.int32)
        self._type_ids: Ints | None = None
        self._next = self.num_stages  # the stage to compute next

    def view(self, region: Region) -> Floats:
        """Return the memory of a region, f32 [rows, padded columns]."""
        return self.program.view(region)

    def begin(self, token_ids: Ints, row_start: Ints, type_ids: Ints | None = None) -> None:
        """Take the next rows; `row_start` has the first row of each text, and the end.

        Raises ValueError for unknown ids.
        """
        self.give_up()
        self.program.run_texts(token_ids, row_start, type_ids, 0, 0)  # checks all ids
        self._token_ids = token_ids
        self._row_start = row_start
        self._type_ids = type_ids
        self._next = 0

    def advance(self, num_stages: int) -> bool:
        """Compute the next stages; return whether all are done."""
        end = min(self._next + num_stages, self.num_stages)
        if self._next < end:
            first_op = self._ends[self._next - 1] if self._next else 0
            last = self._ends[end - 1]
            self.program.run_texts(self._token_ids, self._row_start, self._type_ids, first_op, last)
            self._next = end
        return self._next == self.num_stages

    def give_up(self) -> None:
        """Drop the remaining stages of the current rows."""
        self._next = self.num_stages


def stage_ends(ops: Sequence[object]) -> list[int]:
    """Return the op after each stage: a stage ends before the next layer's projection to queries, keys and values."""
    starts = [index - 1 for index, op in enumerate(ops) if isinstance(op, EphemeralAttention)]
    return [*starts[1:], len(ops)]


def program_without_pages(
    plan: ProgramPlan, pool: Pool, isa: str, *, max_rows: int, max_texts: int, vocab_size: int
) -> Program:
    """Return a program that keeps no keys and values, with `plan.arena_bytes` of memory. Raises MemoryError."""
    return Program(
        plan.ops,
        plan.arena_bytes,
        None,
        None,
        0,
        pool,
        max_rows=max_rows,
        max_samples=max_texts,
        max_sequences=max_texts,
        vocab_size=vocab_size,
        isa=isa,
    )
