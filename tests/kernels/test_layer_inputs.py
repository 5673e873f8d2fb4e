"""The ops of a layer's own embeddings and of a mixture beside an MLP: known values at every level."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from quire.kernels import Pool, Program, supported_levels
from quire.kernels.ops import AddNorm, Combine, Embed, GateRows, Op, Region, RouteRows, Routing, RoutingRule, padded
from quire.kernels.pack import PackedMatrix, packed_nbytes
from quire.pager.layout import KVLayout

from .conftest import aligned_bytes

LEVELS = supported_levels()
LAYOUT = KVLayout(1, 1, 16, "f32", 64)


def table(rows: list[list[float]]) -> PackedMatrix:
    values = np.array(rows, np.float32)
    matrix = PackedMatrix(*values.shape, "f32", aligned_bytes(packed_nbytes(*values.shape, "f32")))
    matrix.fill(values)
    return matrix


def run(ops: list[Op], out: Region, isa: str, rows: int = 2) -> np.ndarray:
    program = Program(
        ops, 1 << 16, aligned_bytes(LAYOUT.page_bytes), LAYOUT, 1, Pool(2), max_rows=2, max_samples=1, max_sequences=1,
        vocab_size=2, isa=isa,
    )  # fmt: skip
    steps: dict[str, Any] = {"token_ids": range(rows), "row_start": [0, rows], "first_position": [0], "page_ids": [0]}
    steps |= {"page_start": [0, 1], "sample_rows": [0]}
    program.run(**{name: np.array(list(values), np.int32) for name, values in steps.items()})
    return program.view(out)[:rows].copy()


class Arena:
    """Regions one after another."""

    def __init__(self) -> None:
        self.end = 0

    def region(self, columns: int, rows: int = 2, dtype: Any = "f32") -> Region:
        region = Region(self.end, rows, columns, dtype)
        self.end += -(-rows * padded(columns) * 4 // 64) * 64
        return region


def gelu_tanh(x: float) -> float:
    return 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


@pytest.mark.parametrize("isa", LEVELS)
def test_gated_rows_are_gelu_times_the_norm_and_the_embedding(isa: str) -> None:
    """The second layer's two columns give (3, 4) / sqrt(12.5) times the norm's weights, plus the table's, halved."""
    arena = Arena()
    x, a, b, out = (arena.region(columns) for columns in (2, 4, 4, 2))
    ops: list[Op] = [
        Embed(table([[1, -2], [0.5, 0]]), x),
        Embed(table([[9, 9, 3, 4], [9, 9, 0, 2]]), a),
        Embed(table([[9, 9, 1, 0], [9, 9, -1, 5]]), b),
        GateRows(x, a, b, 2, np.array([2, 1], np.float32), 0.0, 0.5, out),
    ]
    root = math.sqrt(12.5)
    expected = [
        [gelu_tanh(1) * (3 / root * 2 + 1) / 2, gelu_tanh(-2) * (4 / root) / 2],
        [gelu_tanh(0.5) * (0 - 1) / 2, 0],
    ]
    assert run(ops, out, isa)[:, :2] == pytest.approx(np.array(expected), rel=1e-6, abs=1e-7)


@pytest.mark.parametrize("isa", LEVELS)
def test_a_norm_is_added_before_the_sum_is_scaled(isa: str) -> None:
    arena = Arena()
    x, out = arena.region(2), arena.region(2)
    ops: list[Op] = [
        Embed(table([[3, 4], [1, 1]]), x),
        Embed(table([[1, 2], [0, -1]]), out),
        AddNorm(x, np.array([1, 1], np.float32), 0.0, out, scale=0.25),
    ]
    root = math.sqrt(12.5)
    expected = [[(1 + 3 / root) / 4, (2 + 4 / root) / 4], [0.25, 0]]
    assert run(ops, out, isa)[:, :2] == pytest.approx(np.array(expected), rel=1e-6, abs=1e-7)


@pytest.mark.parametrize("isa", LEVELS)
def test_weights_of_experts_have_scales_and_their_sum_may_replace_the_rows(isa: str) -> None:
    """Two of three experts with logits ln 3 and 0 weigh 3/4 and 1/4, times 2 and 4."""
    arena = Arena()
    logits = arena.region(3)
    routing = Routing(3, 2, arena.region(2), arena.region(2, dtype="i32"), arena.region(3, 8, dtype="i32"))
    rows, out = arena.region(1, 4), arena.region(1)
    ops: list[Op] = [
        Embed(table([[math.log(3), -9, 0], [0, -9, math.log(3)]]), logits),
        Embed(table([[100], [100]]), out),
        RouteRows(logits, routing, RoutingRule(normalized=True), scales=np.array([2, 9, 4], np.float32)),
    ]
    weights = run(ops, routing.weights, isa)[:, :2]
    assert weights == pytest.approx(np.array([[1.5, 1.0], [3.0, 0.5]]), rel=1e-6)
    assert not run([*ops, Combine(rows, routing, out, adds=False)], out, isa)[:, 0].any()


def test_columns_of_gated_rows_must_be_inside() -> None:
    arena = Arena()
    x, a, b, out = (arena.region(columns) for columns in (2, 4, 4, 2))
    with pytest.raises(ValueError, match="2 columns from 3 on are not inside"):
        run([GateRows(x, a, b, 3, np.ones(2, np.float32), 0.0, 1.0, out)], out, LEVELS[0])
