from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from .ops import WeightDtype

WeightDtypes = WeightDtype | Sequence[tuple[int, WeightDtype]]  # dtype of a matrix, or of each range of columns

GROUPS: tuple[int, ...]  # of q8: 0, or the number of blocks of 32 that share a scale, if inputs are rotated
# GGML's type -> the dtype that has the same weights; of IQ3_XXS if fp16 has half of its scales
GGML_DTYPES: dict[str, WeightDtype]
BLOCK_DTYPES: dict[str, WeightDtype]  # the same, with Q4_Z: Q4_0 with a byte for the zero point after the scale
BLOCK_TYPES: tuple[str, ...]  # all types of blocks: BLOCK_DTYPES, and those whose weights no dtype has

def packed_nbytes(out_features: int, in_features: int, dtype: WeightDtypes, group: int = 0) -> int:
    """Return the bytes of one matrix's packed tiles and scales, a multiple of 64. Both sizes are padded to 32.

    Raises ValueError for sizes and dtypes that `PackedMatrix` refuses.
    """

def column_ranges(out_features: int, dtype: WeightDtypes) -> tuple[tuple[int, WeightDtype], ...]:
    """Return the ranges of columns with one dtype each, neighbors of one dtype joined.

    Raises ValueError if their columns do not add up to `out_features`, for more than four ranges, for a range in bf16
    or f32 beside another range, and for a range before the last that is not a multiple of 32 columns.
    """

def widen_blocks(blocks: npt.NDArray[np.uint8], ggml_type: str) -> npt.NDArray[np.float32]:
    """Return rows of GGML blocks, [n, bytes], as f32 [n, weights], with GGML's formula.

    The type is one of BLOCK_TYPES. Raises ValueError for another one, and for rows of broken blocks.
    """

def largest_number(blocks: npt.NDArray[np.uint8], ggml_type: str) -> float:
    """Return the largest scale of rows of GGML blocks, or NaN; from Q3_K on in `ggml.h`, a bound of their weights.

    Raises ValueError as `widen_blocks`.
    """

class PackedMatrix:
    """A linear layer's weight in tile layout, in memory that the caller owns (64-byte aligned, zeroed).

    bf16 `[N/16][K/2][16][2]`, q8 `[N/16][K/4][16][4]` unsigned with fp16 scales `[N/16][K/32][16]` after it,
    f32 `[N/16][K][16]`; N and K padded to multiples of 32 with zeros. q4 `[N/16][K/32][4][16][4]` with the same scales
    as q8: byte (i, n, j) has w + 8 of K = 4i + j in its low half, and of K = 16 + 4i + j in its high half. q4_k, q5_k
    and q6_k have super-blocks of 256 along K (`simd/tiles.h`), so K is a multiple of 256; they take 4.5, 5.5 and 6.625
    bits per weight. mxfp4 has 4-bit codes in the order of q4 after a panel's exponents; K is a multiple of 32, and a
    weight takes 4.25 bits. q4_z is q4 with a zero point for each scale, and takes 4.75 bits.

    Ranges of columns may differ in dtype, as the parts of a fused QKV projection do in GGUF files: each range is packed
    as a matrix of its own, one after another.

    With a `group`, of q8 only, the inputs are rotated (`rotate` in `simd/tiles.h`) as the linear layer's input is, and
    each `group` blocks of 32 share a scale: `[N/16][K/32/group][16]`, rounded up.
    """

    out_features: int
    in_features: int
    dtype: WeightDtype  # dtype of the first columns
    ranges: tuple[tuple[int, WeightDtype], ...]  # (columns, dtype)
    nbytes: int
    input_order: npt.NDArray[np.int32] | None  # [in_features], the input that each column of `source` belongs to
    group: int  # blocks of 32 along K that share a scale, if the inputs are rotated; else 0
    def __init__(
        self,
        out_features: int,
        in_features: int,
        dtype: WeightDtypes,
        memory: npt.NDArray[np.uint8],
        input_order: npt.NDArray[np.int32] | None = None,
        group: int = 0,
        has_padding: bool = True,
    ) -> None:
        """Take the memory; write zeros of q8 and q4 to it if it `has_padding`: columns that no source will fill."""

    def fill(self, source: npt.NDArray[np.generic], start: int = 0, interleave: int | None = None) -> None:
        """Pack `source` [n, in_features] (float32, float16, or bf16 bits as uint16) into output columns from `start`.

        With `interleave` 0 or 1, row r goes to column `start + r // 16 * 32 + 16 * interleave + r % 16`: gate and up of
        one SwiGLU layer. q8 and q4 quantize by blocks of 32 along K with a scale in fp16. For q8 the scale is
        max|w| / 127 of a block or of a rotated group; for q4, whose values are -8 to 7, it is the best of 33 of
        either sign by squared error. Only `fill_blocks` fills matrices of other dtypes.
        """
    def fill_blocks(
        self, blocks: npt.NDArray[np.uint8], ggml_type: str, start: int = 0, interleave: int | None = None
    ) -> None:
        """Pack rows of GGML blocks, [n, bytes], into output columns as `fill` does.

        Columns in the dtype of BLOCK_DTYPES get the weights of the blocks, bit for bit. For columns in f32, bf16, q8 or
        q4, blocks of another type are widened to f32, a few rows at a time, and packed as `fill` packs f32. In q8,
        IQ4_XS and IQ2_XXS keep their numbers, and only their scales are rounded, to fp16.
        Raises ValueError for k-quants, mxfp4 and q4_z from another type, and if the rows are not `in_features`
        weights in whole blocks. Releases the GIL.
        """
    def unpack(self) -> npt.NDArray[np.float32]:
        """Return the matrix as the kernels see it, [out_features, in_features] rotated back. For tests."""
