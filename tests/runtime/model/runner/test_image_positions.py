"""The positions of tokens in prompts with images, and the cosines and sines that follow."""

from __future__ import annotations

import numpy as np
from quire.runtime.model.runner.image_positions import ImagePositions, token_positions
from quire.scheduler import PlacedImage, ScheduledSequence

BLOCK = 8


def image(position: int, rows: int, columns: int) -> PlacedImage:
    return PlacedImage(position, rows * columns, b"", rows * BLOCK, columns * BLOCK, b"")


IMAGES = (image(2, 2, 3), image(10, 1, 2), image(12, 3, 1))


def sequence(first: int, count: int, *images: PlacedImage) -> ScheduledSequence:
    return ScheduledSequence(0, (), first, (0,) * count, 0, None, (), 0, prompt_images=images)


def test_tokens_of_images_have_rows_and_columns_and_text_goes_on_after_the_longer_side() -> None:
    times, rows, columns = token_positions(IMAGES, 0, 18, BLOCK).T.tolist()
    assert times == [0, 1, *[2] * 6, 5, 6, 7, 7, 9, 9, 9, 12, 13, 14]
    assert rows == [0, 1, 2, 2, 2, 3, 3, 3, 5, 6, 7, 7, 9, 10, 11, 12, 13, 14]
    assert columns == [0, 1, 2, 3, 4, 2, 3, 4, 5, 6, 7, 8, 9, 9, 9, 12, 13, 14]


def test_positions_do_not_depend_on_the_chunks() -> None:
    whole = token_positions(IMAGES, 0, 30, BLOCK)
    for first in range(30):
        for end in range(first + 1, 31):
            assert (token_positions(IMAGES, first, end - first, BLOCK) == whole[first:end]).all()
    assert (token_positions((), 7, 3, BLOCK) == np.arange(7, 10)[:, None]).all()


def test_each_pair_is_turned_by_the_position_of_its_axis() -> None:
    table = np.arange(20 * 8, dtype=np.float32).reshape(20, 8)
    positions = ImagePositions(table, (0, 1, 2, 1), BLOCK)
    assert positions.rotary([sequence(0, 5), sequence(3, 1)]) is None
    rows = positions.rotary([sequence(9, 2), sequence(3, 2, *IMAGES)])
    assert rows is not None
    assert (rows[:2] == table[9:11]).all(), "a text without images has the rows of its positions"
    for row, at in ((2, (2, 2, 3)), (3, (2, 2, 4))):
        assert rows[row].tolist() == [table[at[axis], column] for column, axis in enumerate((0, 1, 2, 1) * 2)]
