"""Towers of images of any size, as Qwen's: the patches of an image, their places, windows and rotations."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..config_json import ConfigTable
from ..encoder.spec import BertSpec
from ..rope import rotary_table
from ..spec import Rope
from .spec import CHANNELS, SQUARES_WRITTEN, Floats, InputRows, TowerInput, by_square, normalized

MAX_PATCH_SIZE = 1 << 10
MAX_SCALE = 16
MAX_SQUARES = 512  # squares merged at a time
MAX_AREA = 1 << 26  # pixels of an image after resizing
MAX_ASPECT_RATIO = 200  # ratio of the longer to the shorter edge of an image
ROPE = Rope(10_000.0)  # rotary embedding of rows, and of columns, each in half of a head

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ImageSizes:
    """The sizes to which a processor resizes images."""

    patch_size: int  # pixels of each side of a patch
    scale: int  # patches of each side of the square that becomes one token
    min_pixels: int
    max_pixels: int

    @property
    def block(self) -> int:
        """Side in pixels of the square that one token represents."""
        return self.patch_size * self.scale

    @property
    def max_tokens(self) -> int:
        """Upper bound of tokens per image.

        Each side has at least one block, so very long images may exceed `max_pixels`.
        """
        least, most = self.min_pixels // self.block**2 + 1, self.max_pixels // self.block**2
        enlarged = least + math.isqrt(MAX_ASPECT_RATIO * least) + math.isqrt(least) + 2  # each side up to one more
        return max(most, enlarged, math.isqrt(MAX_ASPECT_RATIO * self.max_pixels) // self.block + 1)


def read_sizes(processor: ConfigTable, max_tokens: int) -> ImageSizes:
    """Read the sizes from a processor's file; images are at most about `max_tokens` large."""
    size = processor.table("size")
    least = size.integer("shortest_edge", 1, MAX_AREA, 56 * 56)
    most = size.integer("longest_edge", 1, MAX_AREA, 28 * 28 * 1280)
    patch_size = processor.integer("patch_size", 1, MAX_PATCH_SIZE, 14)
    scale = processor.integer("merge_size", 1, MAX_SCALE, 2)
    limit = max_tokens * (patch_size * scale) ** 2
    return ImageSizes(
        patch_size,
        scale,
        min_pixels=min(processor.integer("min_pixels", 1, MAX_AREA, least), limit),
        max_pixels=min(processor.integer("max_pixels", 1, MAX_AREA, most), limit),
    )


@dataclass(frozen=True, slots=True)
class Merger:
    """The names of the tensors of two layers, with GELU in between, that turn each square of patches into a row."""

    up: str
    down: str
    layer: int = -1  # layer whose rows the merger takes; -1: the normed rows of the last layer, for the first merger
    norm: str | None = None  # norm of a square, before `up`


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamicVisionSpec:
    """A transformer over the patches of an image of any size, and layers that turn each square of patches into a row.

    The row and the column of a patch rotate its heads. Patches are computed window by window, and within a window
    square by square. In some layers a patch attends to its window only.
    """

    body: BertSpec
    sizes: ImageSizes
    frames: int  # frames of a video, per patch; an image repeats one frame
    window: int  # squares of each side of a window; 0: all layers see the whole image
    sees_all: tuple[bool, ...]  # one per layer
    hidden_out: int  # columns of the text model's embedding
    image_token_id: int  # id of the placeholder for a row
    rescale: float  # factor of pixels
    mean: tuple[float, ...]
    std: tuple[float, ...]
    patch_embedding: str  # names of tensors, without `.weight` and `.bias`
    patch_bias: bool
    mergers: tuple[Merger, ...]  # mergers, whose results are the columns of a row, side by side
    grid: int = 0  # learned positions per side, from which the positions of patches are interpolated; 0: none
    positions: str = ""  # name of their tensor
    whole_images: bool = False  # see `VisionSpec`
    square_rows: int = 1  # rows per square, as in `VisionSpec`: the rows of a square are side by side

    @property
    def out_size(self) -> int:
        """Columns of a row."""
        return len(self.mergers) * self.hidden_out

    @property
    def input_bytes(self) -> int:
        """Bytes of the largest image outside of its program: rotations, and the input of some squares."""
        columns = 2 * self.patch_columns + 3 * self.body.head_dim + (5 * self.body.hidden_size if self.grid else 0)
        return 4 * (self.num_patches * self.body.head_dim + SQUARES_WRITTEN * self.sizes.scale**2 * columns)

    @property
    def position_bytes(self) -> int:
        """Bytes of the learned positions, which are not a packed matrix."""
        return 4 * self.grid**2 * self.body.hidden_size

    @property
    def read_layers(self) -> tuple[int, ...]:
        """Layers whose rows the mergers after the first one take, in this order."""
        return tuple(merger.layer for merger in self.mergers[1:])

    @property
    def num_tokens(self) -> int:
        """Maximum number of rows of an image."""
        return self.sizes.max_tokens

    @property
    def num_patches(self) -> int:
        """Maximum number of patches of an image."""
        return self.num_tokens * self.sizes.scale**2

    @property
    def squares_at_once(self) -> int:
        """Squares of patches that a merger takes at a time."""
        return min(self.num_tokens, MAX_SQUARES)

    @property
    def num_windows(self) -> int:
        """Maximum number of windows of an image: an image that is one square high has the most per square."""
        return -(-self.num_tokens // self.window) if self.window else 1

    @property
    def patch_columns(self) -> int:
        """Values per patch."""
        return CHANNELS * self.frames * self.sizes.patch_size**2

    @property
    def square_columns(self) -> int:
        """Columns of a square of patches."""
        return self.sizes.scale**2 * self.body.hidden_size

    def input(self, pixels: npt.NDArray[np.uint8], learned: Floats | None = None) -> TowerInput:
        """Return the patches of an image whose sides are multiples of `sizes.block`, with their `learned` positions."""
        split = by_square(pixels, self.sizes.scale, self.sizes.patch_size)
        rows, columns = split.shape[:2]
        order, counts = self._windows(rows, columns)
        size = self.sizes.scale**2
        whole = np.array([0, len(order) * size], np.int32)
        windows = np.concatenate([[0], np.cumsum(counts * size)]).astype(np.int32)

        def input_rows(first: int, end: int) -> InputRows:
            down, across = np.divmod(order[first:end], columns)
            patches = normalized(split[down, across], self.rescale, self.mean, self.std)
            y, x = self._along(down, 1), self._along(across, 0)
            return InputRows(
                self._with_frames(patches),
                self._rotary(y, x, max(rows, columns)),
                None if learned is None else self._interpolated(learned, y, x, rows, columns),
            )

        row_starts = tuple(whole if sees_all else windows for sees_all in self.sees_all)
        return TowerInput(order, np.zeros(len(order) * size, np.int32), row_starts, input_rows)

    def _windows(self, rows: int, columns: int) -> tuple[Indices, Indices]:
        """Return the squares of an image by window, each window row by row; and the squares of each window."""
        if not self.window:
            return np.arange(rows * columns), np.array([rows * columns])
        down, across = np.arange(rows) // self.window, np.arange(columns) // self.window
        windows = (down[:, None] * (across[-1] + 1) + across).reshape(-1)
        return np.argsort(windows, kind="stable"), np.bincount(windows)

    def _along(self, squares: Indices, axis: int) -> Indices:
        """Return the row (axis 1) or column (axis 0) of each patch in squares with these rows or columns."""
        scale = self.sizes.scale
        inner = np.arange(scale)[:, None] if axis else np.arange(scale)
        patches = squares[:, None, None] * scale + inner
        return np.broadcast_to(patches, (len(squares), scale, scale)).reshape(-1)

    def _with_frames(self, patches: Floats) -> Floats:
        """Return patches [squares, scale, scale, channels, patch, patch], repeated for all frames, as rows."""
        still = patches.reshape(-1, CHANNELS, 1, self.sizes.patch_size**2)
        return np.tile(still, (self.frames, 1)).reshape(-1, self.patch_columns)

    def _rotary(self, y: Indices, x: Indices, squares: int) -> Floats:
        """Return the cosines and sines of patches in an image with at most `squares` along an edge."""
        table = rotary_table(ROPE, self.body.head_dim // 2, squares * self.sizes.scale)
        cos, sin = np.split(table, 2, axis=1)
        return np.concatenate([cos[y], cos[x], sin[y], sin[x]], axis=-1)

    def _interpolated(self, learned: Floats, y: Indices, x: Indices, rows: int, columns: int) -> Floats:
        """Return the positions of patches, interpolated from the four nearest of `learned` [grid * grid, hidden].

        The corners of an image with these rows and columns of squares are the corners of the grid.
        """
        scale = self.sizes.scale
        table = learned.reshape(self.grid, self.grid, self.body.hidden_size)
        top, bottom, below = (each[y] for each in _between(rows * scale, self.grid))
        left, right, after = (each[x] for each in _between(columns * scale, self.grid))
        down, across = below[:, None], after[:, None]
        out: Floats = table[top, left] * ((1 - down) * (1 - across)) + table[top, right] * ((1 - down) * across)
        out += table[bottom, left] * (down * (1 - across))
        out += table[bottom, right] * (down * across)
        return out


def _between(count: int, grid: int) -> tuple[Indices, Indices, Floats]:
    """Return the grid positions before and after each of `count` places, and the fraction between them."""
    step = np.float32((grid - 1) / max(count - 1, 1))
    index = np.arange(count, dtype=np.float32)
    places = np.where(index < count / 2, step * index, np.float32(grid - 1) - step * index[::-1])  # torch's formula
    before = np.minimum(places.astype(np.int64), grid - 1)
    return before, np.minimum(before + 1, grid - 1), (places - before).astype(np.float32)
