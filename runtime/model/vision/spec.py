"""The description of a vision tower, which turns the pixels of an image into rows for the text model's embedding.

Every `VisionSpec` can be run: the readers of this package refuse all other values.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..encoder.spec import BertSpec

CHANNELS = 3
SQUARES_WRITTEN = 16  # squares of the input that are made at a time

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int32]


class InputRows(NamedTuple):
    """The inputs of a tower for some patches."""

    patches: Floats  # [patches, patch_columns]
    rotary: Floats | None = None  # [patches, head_dim]: cosines and sines; None: heads are not rotated
    positions: Floats | None = None  # [patches, hidden]: added to the embeddings of patches


@dataclass(frozen=True, slots=True)
class TowerInput:
    """An image as the first program of a tower takes it, by squares of patches in the order of computation."""

    places: npt.NDArray[np.int64]  # [squares]: which row of the image each square becomes
    token_ids: Ints  # [patches], of learned positions
    row_starts: tuple[Ints, ...]  # one per layer: the first patch of each attention group, and the end
    rows: Callable[[int, int], InputRows]  # returns the inputs of the squares [first, end)


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionSpec:
    """A transformer over the patches of a square image, and a matrix that turns each square of patches into a row.

    Patches are computed in the order of these squares; attention covers all of them, in any order. The matrix takes the
    rows of a square side by side or, with `mean_norm`, the RMS norm of their mean.
    """

    body: BertSpec  # transformer whose vocabulary is the learned positions
    image_size: int  # pixels of each side of an image
    patch_size: int  # pixels of each side of a patch; pixels beyond the last whole patch are not seen
    scale: int  # patches of each side of the square that becomes one row
    out_size: int  # columns of a row, as of the text model's embedding
    image_token_id: int  # id of the placeholder for a row
    rescale: float  # factor of pixels
    mean: tuple[float, ...]  # [channels]; subtracted from rescaled pixels
    std: tuple[float, ...]  # [channels]; divides the differences
    patch_embedding: str  # names of tensors, without `.weight`
    connector: str
    mean_norm: str | None = None
    rounds_positions: bool = False  # the learned position of a patch is found as `nearest_positions` does
    whole_images: bool = False  # the tokens of an image attend to each other in the text model

    @property
    def grid(self) -> int:
        """Patches of each side of an image."""
        return self.image_size // self.patch_size

    @property
    def num_patches(self) -> int:
        return self.grid**2

    @property
    def num_tokens(self) -> int:
        """Rows that an image becomes."""
        return self.num_patches // self.scale**2

    @property
    def input_bytes(self) -> int:
        """Bytes of an image outside of its program: the input of some squares, in two steps of normalization."""
        return 4 * SQUARES_WRITTEN * self.scale**2 * 2 * self.patch_columns

    @property
    def position_bytes(self) -> int:
        """Bytes of learned positions that are not a packed matrix: none."""
        return 0

    @property
    def read_layers(self) -> tuple[int, ...]:
        """Earlier layers whose rows also become rows of the image: none."""
        return ()

    @property
    def squares_at_once(self) -> int:
        """Squares of patches that become rows in one step: all."""
        return self.num_tokens

    @property
    def num_windows(self) -> int:
        """Groups of patches that attend to each other: all patches are one group."""
        return 1

    @property
    def patch_columns(self) -> int:
        """Values per patch."""
        return CHANNELS * self.patch_size**2

    @property
    def square_rows(self) -> int:
        """Rows of a square of patches that the matrix after the transformer takes, before their mean."""
        return 1 if self.mean_norm is None else self.scale**2

    @property
    def square_columns(self) -> int:
        """Columns of these rows."""
        return self.scale**2 * self.body.hidden_size // self.square_rows

    def input(self, pixels: npt.NDArray[np.uint8]) -> TowerInput:
        """Return the patches of an image [image_size, image_size, 3]."""
        row_start = np.array([0, self.num_patches], np.int32)
        squares = self.grid // self.scale
        seen = self.grid * self.patch_size
        split = by_square(pixels[:seen, :seen], self.scale, self.patch_size)

        def rows(first: int, end: int) -> InputRows:
            down, across = np.divmod(np.arange(first, end), squares)
            patches = normalized(split[down, across], self.rescale, self.mean, self.std)
            return InputRows(patches.reshape(-1, self.patch_columns))

        places = np.arange(self.num_tokens)
        return TowerInput(places, self.positions(), (row_start,) * self.body.num_layers, rows)

    def positions(self) -> Ints:
        """Return the learned position of each patch, in the order of computation, [num_patches]."""
        squares = self.grid // self.scale
        scale = self.scale
        along = nearest_positions(self.grid) if self.rounds_positions else np.arange(self.grid)
        table = along[:, None] * self.grid + along
        split = table.reshape(squares, scale, squares, scale)
        positions: Ints = split.transpose(0, 2, 1, 3).reshape(-1).astype(np.int32)
        return positions


def by_square(pixels: npt.NDArray[np.uint8], scale: int, patch_size: int) -> npt.NDArray[np.uint8]:
    """Return a view of an image, [rows of squares, columns of squares, scale, scale, channels, patch, patch]."""
    block = scale * patch_size
    rows, columns = pixels.shape[0] // block, pixels.shape[1] // block
    split = pixels.reshape(rows, scale, patch_size, columns, scale, patch_size, CHANNELS)
    return split.transpose(0, 3, 1, 4, 6, 2, 5)


def normalized(
    pixels: npt.NDArray[np.uint8], rescale: float, mean: tuple[float, ...], std: tuple[float, ...]
) -> Floats:
    """Return (pixels * rescale - mean) / std, f32 [..., channels, rows, columns]."""
    means, stds = (np.array(values, np.float32)[:, None, None] for values in (mean, std))
    result: Floats = pixels.astype(np.float32)
    result *= np.float32(rescale)
    result -= means
    result /= stds
    return result


def nearest_positions(grid: int) -> Ints:
    """Return the learned position along one side of each of `grid` patches, as the reference finds it, in f32.

    The reference compares the fraction of the side before a patch with the fractions before the positions. Both are
    equal in theory, but are rounded differently, so that in some grids a few patches get the position before their own.
    torch computes 16 bounds at a time, each from the rounded first one of its 8.
    """
    step = 1.0 / grid
    exact = step + step * np.arange(math.ceil((1.0 - step) / step))
    bounds = exact.astype(np.float32)
    whole = len(bounds) // 16 * 16
    bounds[:whole] = np.repeat(bounds[:whole:8].astype(np.float64), 8) + np.tile(np.arange(8) * step, whole // 8)
    before = np.minimum(np.arange(grid, dtype=np.float32) * np.float32(step), np.float32(1.0 - 1e-6))
    positions: Ints = np.searchsorted(bounds, before, side="right").astype(np.int32)
    return positions
