"""Programs that read their rows from a table: token i is row i. For tests of single ops with states."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from quire.kernels import Pool, Program
from quire.kernels.ops import Embed, Op, Region
from quire.pager.layout import KVLayout

from tests.kernels.test_linear import packed
from tests.support.reference import ReferenceProgram

LAYOUT = KVLayout(1, 1, 16, "f32", 64)
PAGES = 16
ROWS = 100


class TableProgram:
    """An `Embed` of the table, then the ops that `ops` makes of its region."""

    def __init__(
        self,
        table: np.ndarray,
        ops: Callable[[Region], Sequence[Op]],
        out: Region,
        *,
        isa: str | None = None,
        threads: int = 2,
        slots: int = 4,
    ) -> None:
        self.out = out
        x = Region(0, ROWS, table.shape[1], "f32")
        self.ops = [Embed(packed(table, "f32"), x), *ops(x)]
        memory = np.zeros(PAGES * LAYOUT.page_bytes, np.uint8)
        limits = {"max_rows": ROWS, "max_samples": 1, "max_sequences": slots, "vocab_size": len(table)}
        nbytes = out.offset + out.nbytes
        self.program = Program(self.ops, nbytes, memory, LAYOUT, PAGES, Pool(threads), isa=isa, **limits)
        self.program.states[:] = 0xFF  # NaN

    def reference(self) -> ReferenceProgram:
        return ReferenceProgram(self.ops, "f32", 64, PAGES)

    def run(self, *sequences, slots=None, program=None) -> np.ndarray:
        """Run (first position, tokens) sequences; return the rows."""
        program = program or self.program
        counts = [len(tokens) for _, tokens in sequences]
        program.run(
            np.concatenate([tokens for _, tokens in sequences]).astype(np.int32),
            np.cumsum([0, *counts]).astype(np.int32),
            np.array([first for first, _ in sequences], np.int32),
            np.tile(np.arange(PAGES, dtype=np.int32), len(sequences)),
            np.arange(len(sequences) + 1, dtype=np.int32) * PAGES,
            np.zeros(0, np.int32),
            state_slots=None if slots is None else np.array(slots, np.int32),
        )
        if isinstance(program, ReferenceProgram):
            return program.regions[self.out]
        rows = program.view(self.out)[: sum(counts), : self.out.columns].copy()
        return (rows.astype(np.uint32) << 16).view(np.float32) if self.out.dtype == "bf16" else rows


def following(region: Region, columns: int, dtype: str = "f32") -> Region:
    """Return a region of ROWS rows after another one."""
    return Region(region.offset + region.nbytes, ROWS, columns, dtype)
