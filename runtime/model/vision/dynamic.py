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
from .spec import CHANNELS, Floats, TowerInput, normalised

MAX_PATCH_SIZE = 1 << 10
MAX_SCALE = 16
MAX_SQUARES = 512  # that are merged at a time
MAX_AREA = 1 << 26  # pixels of an image after resizing
MAX_RATIO = 200  # of the longer to the shorter edge of an image
ROPE = Rope(10_000.0)  # of rows, and of columns, each in half of a head


@dataclass(frozen=True, slots=True)
class ImageSizes:
    """The sizes to which a processor resizes images."""

    patch_size: int  # pixels of each side of a patch
    scale: int  # patches of each side of the square that becomes one token
    min_pixels: int
    max_pixels: int

    @property
    def block(self) -> int:
        """Pixels of each side of what one token stands for."""
        return self.patch_size * self.scale

    @property
    def max_tokens(self) -> int:
        """The most tokens of an image: no side has less than one, so long images may exceed `max_pixels`."""
        least, most = self.min_pixels // self.block**2 + 1, self.max_pixels // self.block**2
        enlarged = least + math.isqrt(MAX_RATIO * least) + math.isqrt(least) + 2  # each side up to one more
        return max(most, enlarged, math.isqrt(MAX_RATIO * self.max_pixels) // self.block + 1)


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
    """Two layers that make a row of each square of patches, with GELU between them; names of tensors."""

    up: str
    down: str
    layer: int = -1  # whose rows they take; -1: those of the last layer, normed, as the first merger does
    norm: str | None = None  # of a square, before `up`


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamicVisionSpec:
    """A transformer over the patches of an image of any size, and layers that make a row of each square of patches.

    Heads are rotated by the row and the column of a patch. Patches are computed window by window, those of a square one
    after another. In some layers a patch sees its window only.
    """

    body: BertSpec
    sizes: ImageSizes
    frames: int  # of a video that a patch has: those of an image are equal
    window: int  # squares of each side of a window; 0: all layers see the whole image
    sees_all: tuple[bool, ...]  # one per layer
    hidden_out: int  # columns of the text model's embedding
    image_token_id: int  # of the placeholder that stands for a row
    rescale: float  # as in `VisionSpec`
    mean: tuple[float, ...]
    std: tuple[float, ...]
    patch_embedding: str  # names of tensors, without `.weight` and `.bias`
    patch_bias: bool
    mergers: tuple[Merger, ...]  # what they make are the columns of a row, side by side
    grid: int = 0  # learned positions of each side, between which those of patches are interpolated; 0: there are none
    positions: str = ""  # name of their tensor
    whole_images: bool = False  # as in `VisionSpec`
    square_rows: int = 1  # as in `VisionSpec`: the rows of a square are side by side

    @property
    def out_size(self) -> int:
        """Columns of a row."""
        return len(self.mergers) * self.hidden_out

    @property
    def input_bytes(self) -> int:
        """Bytes that `input` takes for an image of the most patches: copies of pixels, rotations and positions."""
        still = self.patch_columns // self.frames
        columns = (
            3 * still + self.patch_columns + 2 * self.body.head_dim + (2 * self.body.hidden_size if self.grid else 0)
        )
        return 4 * self.num_patches * columns

    @property
    def position_bytes(self) -> int:
        """Bytes of the learned positions."""
        return 4 * self.grid**2 * self.body.hidden_size

    @property
    def num_tokens(self) -> int:
        """Rows of an image, at most."""
        return self.sizes.max_tokens

    @property
    def num_patches(self) -> int:
        """Patches of an image, at most."""
        return self.num_tokens * self.sizes.scale**2

    @property
    def squares_at_once(self) -> int:
        """Squares of patches that a merger takes at a time."""
        return min(self.num_tokens, MAX_SQUARES)

    @property
    def num_windows(self) -> int:
        """Windows of an image, at most: an image that is one square high has the most, for its squares."""
        return -(-self.num_tokens // self.window) if self.window else 1

    @property
    def patch_columns(self) -> int:
        """Numbers of a patch."""
        return CHANNELS * self.frames * self.sizes.patch_size**2

    @property
    def square_columns(self) -> int:
        """Columns of a square of patches."""
        return self.sizes.scale**2 * self.body.hidden_size

    def input(self, pixels: npt.NDArray[np.uint8], learned: Floats | None = None) -> TowerInput:
        """Return the patches of an image whose sides are multiples of `sizes.block`, with their `learned` positions."""
        scale, block = self.sizes.scale, self.sizes.block
        rows, columns = pixels.shape[0] // block, pixels.shape[1] // block
        order, counts = self._windows(rows, columns)
        num_patches = len(order) * scale**2
        whole = np.array([0, num_patches], np.int32)
        windows = np.concatenate([[0], np.cumsum(counts * scale**2)]).astype(np.int32)
        return TowerInput(
            patches=self._patches(pixels, rows, columns, order),
            token_ids=np.zeros(num_patches, np.int32),
            row_starts=tuple(whole if sees_all else windows for sees_all in self.sees_all),
            rotary=self._rotary(rows, columns)[order].reshape(num_patches, self.body.head_dim),
            order=np.argsort(order),
            positions=None
            if learned is None
            else self._interpolated(learned, rows, columns)[order].reshape(num_patches, -1),
        )

    def _windows(self, rows: int, columns: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return the squares of an image by window, each window row by row; and the squares of each window."""
        if not self.window:
            return np.arange(rows * columns), np.array([rows * columns])
        down, across = np.arange(rows) // self.window, np.arange(columns) // self.window
        windows = (down[:, None] * (across[-1] + 1) + across).reshape(-1)
        return np.argsort(windows, kind="stable"), np.bincount(windows)

    def _patches(self, pixels: npt.NDArray[np.uint8], rows: int, columns: int, order: npt.NDArray[np.int64]) -> Floats:
        """Return the normalised patches of the squares in `order`, f32 [patches, patch_columns]."""
        scale, patch = self.sizes.scale, self.sizes.patch_size
        values = normalised(pixels, self.rescale, self.mean, self.std)
        split = values.reshape(rows, scale, patch, columns, scale, patch, CHANNELS)
        still = split.transpose(0, 3, 1, 4, 6, 2, 5).reshape(rows * columns, scale**2, CHANNELS, 1, patch**2)[order]
        return np.tile(still, (self.frames, 1)).reshape(-1, self.patch_columns)

    def _rotary(self, rows: int, columns: int) -> Floats:
        """Return the cosines and sines of the patches, f32 [squares, patches of a square, head_dim]."""
        scale, head_dim = self.sizes.scale, self.body.head_dim
        table = rotary_table(ROPE, head_dim // 2, max(rows, columns) * scale)
        shape = (rows, columns, scale, scale)
        inner = np.arange(scale)
        down = np.broadcast_to((np.arange(rows)[:, None] * scale + inner)[:, None, :, None], shape)
        across = np.broadcast_to((np.arange(columns)[:, None] * scale + inner)[None, :, None, :], shape)
        cos, sin = np.split(table, 2, axis=1)
        turned = [cos[down], cos[across], sin[down], sin[across]]
        return np.concatenate(turned, axis=-1).reshape(rows * columns, scale**2, head_dim)

    def _interpolated(self, learned: Floats, rows: int, columns: int) -> Floats:
        """Return the position of each patch between the four next to it of `learned` [grid * grid, hidden].

        The corners of the image are those of the grid. The result is f32 [squares, patches of a square, hidden].
        """
        scale, hidden = self.sizes.scale, self.body.hidden_size
        table = learned.reshape(self.grid, self.grid, hidden)
        left, right, after = _between(columns * scale, self.grid)
        x = after[:, None]
        out = np.empty((rows * scale, columns * scale, hidden), np.float32)
        for row, (top, bottom, y) in enumerate(zip(*_between(rows * scale, self.grid), strict=True)):
            above, below = table[top], table[bottom]
            out[row] = above[left] * ((1 - y) * (1 - x)) + above[right] * ((1 - y) * x)
            out[row] += below[left] * (y * (1 - x))
            out[row] += below[right] * (y * x)
        squares = out.reshape(rows, scale, columns, scale, hidden).transpose(0, 2, 1, 3, 4)
        return squares.reshape(rows * columns, scale**2, hidden)


def _between(count: int, grid: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], Floats]:
    """Return for `count` places along a `grid` the positions before and after each, and how far it is between them."""
    step, index = np.float32((grid - 1) / max(count - 1, 1)), np.arange(count, dtype=np.float32)
    places = np.where(index < count / 2, step * index, np.float32(grid - 1) - step * index[::-1])  # as in torch
    before = np.minimum(places.astype(np.int64), grid - 1)
    return before, np.minimum(before + 1, grid - 1), (places - before).astype(np.float32)
