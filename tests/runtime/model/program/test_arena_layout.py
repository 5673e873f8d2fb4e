"""The arena's layout: no byte has two live values, and the arena is little larger than the values that are live at one
op."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from quire.kernels.ops import ALIGNMENT, aligned
from quire.runtime.model.program.arena_layout import ArenaLayout, Lifetime, lay_out

from tests.runtime.model.conftest import max_live_bytes

LIFETIME = st.builds(
    lambda nbytes, first, length: Lifetime(nbytes, first, first + length),
    st.integers(1, 5000),
    st.integers(0, 30),
    st.integers(0, 10),
)


def clashes(values: Sequence[Lifetime], layout: ArenaLayout) -> list[tuple[int, int]]:
    """Return pairs that are live at the same op and share a byte, by comparing every byte."""
    occupied = [
        {(op, block) for op in range(v.first, v.last + 1) for block in range(at // 64, (at + v.nbytes + 63) // 64)}
        for v, at in zip(values, layout.offsets, strict=True)
    ]
    return [(i, j) for i, j in combinations(range(len(values)), 2) if occupied[i] & occupied[j]]


@given(st.lists(LIFETIME, max_size=30))
def test_no_two_live_values_overlap(values: list[Lifetime]) -> None:
    layout = lay_out(values)
    assert clashes(values, layout) == []
    assert all(offset % ALIGNMENT == 0 for offset in layout.offsets)
    assert all(at + aligned(v.nbytes) <= layout.nbytes for v, at in zip(values, layout.offsets, strict=True))


@given(st.lists(LIFETIME, max_size=30))
def test_the_arena_is_between_the_most_live_bytes_and_the_sum(values: list[Lifetime]) -> None:
    assert max_live_bytes(values) <= lay_out(values).nbytes <= sum(aligned(v.nbytes) for v in values)


@pytest.mark.parametrize(
    ("values", "offsets", "nbytes"),
    [
        ([], (), 0),
        ([Lifetime(100, 0, 1), Lifetime(100, 2, 3)], (0, 0), 128),
        (
            [Lifetime(100, 0, 1), Lifetime(100, 1, 2)],
            (0, 128),
            256,
        ),  # op 1 reads one and writes the other: both are live
        ([Lifetime(64, 0, 9), Lifetime(640, 0, 1), Lifetime(320, 2, 3)], (0, 64, 64), 704),
        # The second value leaves a gap below the fourth, in which the last one fits.
        (
            [Lifetime(64, 0, 9), Lifetime(128, 0, 6), Lifetime(64, 0, 5), Lifetime(64, 6, 9), Lifetime(64, 7, 9)],
            (0, 64, 192, 192, 64),
            256,
        ),
    ],
)
def test_exact_offsets(values: list[Lifetime], offsets: tuple[int, ...], nbytes: int) -> None:
    assert lay_out(values) == ArenaLayout(offsets, nbytes)
