"""A program of a vision tower: it has no pages, and the ops for the rows of one image are computed in parts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from ....kernels import Pool
from ....kernels.ops import EphemeralAttention, Linear, Op
from ...common.errors import ConfigError
from ..program import ProgramPlan
from .paced_work import WorkPiece
from .staged_program import program_without_pages, stage_ends

LEAST_ROWS = 32  # rows of a part: fewer would mostly read weights
TILE = 64  # queries, or keys and values, of an item of attention

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int32]


class ImageProgram:
    """One program of a tower, for the rows of one image at a time. The constructor takes its memory."""

    def __init__(self, plan: ProgramPlan, max_rows: int, max_texts: int, vocab_size: int, pool: Pool, isa: str) -> None:
        try:
            self._program = program_without_pages(
                plan, pool, isa, max_rows=max_rows, max_texts=max_texts, vocab_size=vocab_size
            )
        except MemoryError as error:
            raise ConfigError(
                f"the vision tower needs {plan.arena_bytes:,} bytes for an image, which the system does not give; use "
                "a smaller model or more memory"
            ) from error
        self._ops = plan.ops
        self._ends = stage_ends(plan.ops)
        self._workers = pool.workers
        self._inputs = [self._program.view(given) for given in plan.inputs]  # [rows, padded columns] each
        self._results = [self._program.view(result)[:, : result.columns] for result in plan.results]
        self._token_ids = np.zeros(0, np.int32)
        self._rotary: Floats | None = None

    def begin(self, token_ids: Ints, rotary: Floats | None = None) -> None:
        """Take the rows of an image, whose inputs are written next, and drop an unfinished image."""
        self._token_ids = token_ids
        self._rotary = rotary

    def write(self, first_row: int, *inputs: Floats) -> None:
        """Write rows of all inputs, from `first_row` on."""
        for memory, array in zip(self._inputs, inputs, strict=True):
            rows = slice(first_row, first_row + len(array))
            columns = array.shape[1]
            memory[rows, :columns] = array
            memory[rows, columns:] = 0  # another value of the arena may have been there

    def stage(self, index: int, row_start: Ints) -> Iterator[WorkPiece]:
        """Yield the work of a layer; the first and the last layer include the work before and after the layers.

        `row_start` has the first row of each group of rows that attend to each other, and the end.
        """
        for number in range(self._ends[index - 1] if index else 0, self._ends[index]):
            op = self._ops[number]
            if isinstance(op, EphemeralAttention):
                yield from self._attention(op, number, row_start)
            else:
                kind = type(op).__name__
                size = _row_size(op)
                yield self._part(kind, number, row_start, (0, self._num_rows), self._num_rows, size, LEAST_ROWS)

    def result(self, index: int = 0) -> Floats:
        """Return one of the results, [rows, columns], which the next stage may overwrite."""
        return self._results[index]

    @property
    def _num_rows(self) -> int:
        return len(self._token_ids)

    def _attention(self, op: EphemeralAttention, number: int, row_start: Ints) -> Iterator[WorkPiece]:
        """Yield the work of storing keys and values, then the work of attending to them."""
        lengths = np.diff(row_start)
        tiles = -(-lengths // TILE)
        stored = int(tiles[lengths > 1].sum()) * op.num_kv_heads
        items = stored + int(tiles.sum()) * op.num_heads
        seen = float((tiles * lengths).sum() / tiles.sum())  # average number of tokens
        tile = TILE * op.head_dim
        if stored:
            yield self._part("store", number, row_start, (0, stored), items, tile, self._workers)
        yield self._part("attend", number, row_start, (stored, items), items, 2 * tile * seen, self._workers)

    def _part(
        self, kind: str, number: int, row_start: Ints, among: tuple[int, int], items: int, size: float, part_items: int
    ) -> WorkPiece:
        """Return some of the items of an op as work."""

        def do(first: int, end: int) -> None:
            part = (among[0] + first, among[0] + end, items)
            self._program.run_texts(self._token_ids, row_start, None, number, number + 1, self._rotary, part)

        return WorkPiece(kind, among[1] - among[0], size, part_items, do)


def _row_size(op: Op) -> float:
    """Return the size of a row's work in an op: products, or numbers that are read and written."""
    if isinstance(op, Linear):
        return float(op.weight.in_features * op.weight.out_features)
    columns: Sequence[int] = [getattr(op, name).columns for name in ("input", "out") if getattr(op, name, None)]
    return float(sum(columns))
