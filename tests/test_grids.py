"""Grids of parameters: few combinations in which any two values meet."""

from __future__ import annotations

from itertools import combinations, product

import pytest

from tests.support.grids import grid

AXES = [("a", "b", "c", "d", "e"), (1, 2, 3), (0.5, 1.5), ("x", "y", "z", "w")]


@pytest.mark.parametrize(("num_axes", "num_cells"), [(2, 15), (3, 15), (4, 20)])
def test_any_two_values_of_two_axes_meet_in_few_cells(num_axes: int, num_cells: int) -> None:
    axes = AXES[:num_axes]
    cells = grid(*axes, is_full=False)
    assert len(set(cells)) == len(cells) == num_cells
    for first, second in combinations(range(num_axes), 2):
        assert {(cell[first], cell[second]) for cell in cells} == set(product(axes[first], axes[second]))


def test_a_full_grid_has_all_combinations() -> None:
    assert grid(*AXES, is_full=True) == list(product(*AXES))
