"""Products with low-rank adapters beside numpy: mixed rows, dtypes, epilogues, levels; and refusals of a table."""

from __future__ import annotations

import numpy as np
import pytest
from quire.kernels import Pool, Program, supported_levels
from quire.kernels.lora import LoraTable
from quire.kernels.ops import Embed, Linear, Lora, LoraShrink, Region

from tests.kernels.table_program import LAYOUT, PAGES, ROWS, following
from tests.kernels.test_linear import packed
from tests.support.reference import gated

INPUTS, OUTPUTS, RANK = 70, 64, 20
RNG = np.random.default_rng(3)
TABLE = RNG.standard_normal((ROWS, INPUTS)).astype(np.float32)
WEIGHT = RNG.standard_normal((OUTPUTS, INPUTS)).astype(np.float32)
A = RNG.standard_normal((2, RANK, INPUTS)).astype(np.float32)
B = RNG.standard_normal((2, OUTPUTS, RANK)).astype(np.float32)
SLOTS = np.array([-1, 0, 0, 1, -1, 1, 0] * 14, np.int32)


def panels(columns: np.ndarray, dtype: str) -> tuple[str, np.ndarray, np.ndarray]:
    """Return the panels of a matrix [columns, K], all of K in each."""
    count = -(-len(columns) // 16)
    stored = np.zeros((count * 16, columns.shape[1]), np.float32)
    stored[: len(columns)] = columns
    data = np.ascontiguousarray(stored.reshape(count, 16, -1).swapaxes(1, 2).reshape(-1, 16))
    places = np.array([[0, columns.shape[1], panel * columns.shape[1]] for panel in range(count)], np.int32)
    return dtype, (data if dtype == "f32" else (data.view(np.uint32) >> 16).astype(np.uint16)), places


def as_stored(matrix: np.ndarray, dtype: str) -> np.ndarray:
    return matrix if dtype == "f32" else (matrix.view(np.uint32) & 0xFFFF0000).view(np.float32)


def run(dtype: str, epilogue: str, isa: str | None = None, threads: int = 2, rows: slice = slice(None)) -> np.ndarray:
    x = Region(0, ROWS, INPUTS, "f32")
    shrunk = following(x, 32)
    out = following(shrunk, OUTPUTS if epilogue == "store" else OUTPUTS // 2)
    ops = [
        Embed(packed(TABLE, "f32"), x),
        LoraShrink(x, None, 0, shrunk, 0.5),
        Linear(x, packed(WEIGHT, "f32"), None, out, epilogue, scale=0.5, lora=Lora(0, shrunk)),  # type: ignore[arg-type]
    ]
    table = LoraTable(2, [(INPUTS, 32, OUTPUTS)])
    for slot in range(2):
        table.set(slot, [(panels(A[slot], dtype), panels(B[slot], dtype))])
    memory = np.zeros(PAGES * LAYOUT.page_bytes, np.uint8)
    limits = {"max_rows": ROWS, "max_samples": 1, "max_sequences": 1, "vocab_size": ROWS}
    program = Program(ops, out.offset + out.nbytes, memory, LAYOUT, PAGES, Pool(threads), isa=isa, lora=table, **limits)
    tokens = np.arange(len(SLOTS), dtype=np.int32)[rows]
    ends = np.array([0, len(tokens)], np.int32)
    pages = np.arange(PAGES, dtype=np.int32)
    tables = np.array([0, PAGES], np.int32)
    none = np.zeros(0, np.int32)
    program.run(tokens, ends, np.zeros(1, np.int32), pages, tables, none, adapters=SLOTS[rows].copy())
    return program.view(out)[: len(tokens), : out.columns].copy()


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("epilogue", ["store", "swiglu"])
def test_each_row_has_the_products_of_its_own_adapter(dtype, epilogue):
    x = TABLE[: len(SLOTS)].astype(np.float64)
    y = x @ WEIGHT.T.astype(np.float64)
    for slot in range(2):
        own = np.flatnonzero(np.equal(SLOTS, slot))
        a, b = (as_stored(each[slot], dtype).T.astype(np.float64) for each in (A, B))
        y[own] += x[own] @ a @ b
    expected = 0.5 * y if epilogue == "store" else gated(0.5 * y, epilogue)
    assert np.abs(run(dtype, epilogue) - expected).max() < 1e-5 * np.abs(expected).max()


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("epilogue", ["store", "swiglu"])
def test_levels_threads_and_neighbors_change_no_bit(dtype, epilogue):
    expected = run(dtype, epilogue, "scalar", 1)
    for level in supported_levels():
        assert run(dtype, epilogue, level, 3).tobytes() == expected.tobytes()
    for row in (0, 1, 3):
        assert run(dtype, epilogue, rows=slice(row, row + 1)).tobytes() == expected[row].tobytes()


def test_a_table_refuses_matrices_that_lead_outside_their_memory():
    table = LoraTable(1, [(INPUTS, 32, OUTPUTS)])
    a, b = panels(A[0], "f32"), panels(B[0], "f32")
    for wrong in (panels(A[0][:, :8], "f32")[2] + [[8, 63, 0]], a[2] + [[0, 0, 1]], a[2] - [[0, 0, 1]]):
        with pytest.raises(ValueError, match="a panel reads beyond 70 elements or 140 rows of data"):
            table.set(0, [(("f32", a[1], wrong.astype(np.int32)), b)])
    with pytest.raises(ValueError, match="are not the places of panels with 64 columns"):
        table.set(0, [(a, panels(np.zeros((80, RANK), np.float32), "f32"))])
    with pytest.raises(ValueError, match="slot 1 is outside the 1 of this program"):
        table.set(1, None)
    with pytest.raises(ValueError, match="a pair or None for 1 targets, not 2"):
        table.set(0, [None, None])
