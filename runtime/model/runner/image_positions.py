"""M-RoPE: the positions of tokens in time, height and width, and the resulting cosines and sines of a step's rows.

The positions of a token depend only on the places and sizes of the images in its prompt.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ....scheduler import PlacedImage, ScheduledSequence
from ..rope import Table

Floats = npt.NDArray[np.float32]


class ImagePositions:
    """The rotation of heads in a step with images: one of a token's positions rotates each pair of dimensions."""

    def __init__(self, table: Table, axes: Sequence[int], block: int) -> None:
        """Take the rotary `table` of single positions, and the axis of each pair: 0 time, 1 height, 2 width.

        `block`: side in pixels of the square that one token represents.
        """
        self._table = table
        self._block = block
        self._columns = [np.flatnonzero(np.tile(axes, 2) == axis) for axis in range(3)]

    def rotary(self, sequences: Sequence[ScheduledSequence]) -> Floats | None:
        """Return the cosines and sines of the rows of a step, [rows, rotary_dim]; None if no prompt has images."""
        if not any(sequence.prompt_images for sequence in sequences):
            return None
        positions = np.concatenate(
            [
                token_positions(each.prompt_images, each.first_position, len(each.token_ids), self._block)
                for each in sequences
            ]
        )
        rows = np.empty((len(positions), self._table.shape[1]), np.float32)
        for axis, columns in enumerate(self._columns):
            rows[:, columns] = self._table[positions[:, axis, None], columns]
        return rows


def token_positions(images: Sequence[PlacedImage], first: int, count: int, block: int) -> npt.NDArray[np.int64]:
    """Return the positions in time, height and width of the tokens from `first` on, [count, 3].

    The tokens of an image share one time. Their height and width are this time plus the row or the column of their
    square. After an image of r x c squares, the text continues max(r, c) positions later.
    """
    positions = np.repeat(np.arange(first, first + count)[:, None], 3, axis=1)
    shift = 0  # offset of positions after the images so far: an image has more tokens than positions
    for image in images:
        if image.position >= first + count:
            break
        rows, columns = image.height // block, image.width // block
        if image.end > first:
            begin, end = max(image.position - first, 0), min(image.end - first, count)
            squares = np.arange(begin, end) + first - image.position
            positions[begin:end] = image.position + shift
            positions[begin:end, 1] += squares // columns
            positions[begin:end, 2] += squares % columns
        shift += max(rows, columns) - image.tokens
        after = max(image.end - first, 0)
        positions[after:] = np.arange(first + after, first + count)[:, None] + shift
    return positions
