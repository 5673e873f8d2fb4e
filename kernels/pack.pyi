import numpy as np
import numpy.typing as npt

from .ops import WeightDtype

def packed_nbytes(out_features: int, in_features: int, dtype: WeightDtype) -> int:
    """Return the bytes of one matrix's packed tiles and scales, a multiple of 64. Both sizes are padded to 32."""

class PackedMatrix:
    """A linear layer's weight in tile layout, in memory that the caller owns (64-byte aligned, zeroed).

    bf16 `[N/16][K/2][16][2]`, q8 `[N/16][K/4][16][4]` unsigned with fp16 scales `[N/16][K/32][16]` behind it,
    f32 `[N/16][K][16]`; N and K padded to multiples of 32 with zeros. q4 `[N/16][K/32][4][16][4]` with the same scales
    as q8: byte (i, n, j) has w + 8 of K = 4i + j in its low half, and of K = 16 + 4i + j in its high half.
    """

    out_features: int
    in_features: int
    dtype: WeightDtype
    nbytes: int
    def __init__(
        self, out_features: int, in_features: int, dtype: WeightDtype, memory: npt.NDArray[np.uint8]
    ) -> None: ...
    def fill(self, source: npt.NDArray[np.generic], start: int = 0, interleave: int | None = None) -> None:
        """Pack `source` [n, in_features] (float32, float16, or bf16 bits as uint16) into output columns from `start`.

        With `interleave` 0 or 1, row r goes to column `start + r // 16 * 32 + 16 * interleave + r % 16`: gate and up of
        one SwiGLU layer. q8 and q4 quantise by blocks of 32 along K with a scale in fp16. For q8 the scale is
        max|w| / 127; for q4, whose values are -8 to 7, it is the best of 33 of either sign by squared error.
        """
    def unpack(self) -> npt.NDArray[np.float32]:
        """Return the matrix as the kernels see it, [out_features, in_features] without padding. For tests."""
