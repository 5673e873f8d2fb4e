"""Numbers in the layouts of other tools: integers of 4 or 8 bits in int32 words, least significant first, and codes.

Words are [rows, words per row], with any strides: a row is an output, even where the tensor stores outputs side by
side. All functions release the GIL, and raise ValueError for arrays that do not fit together.
"""

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.int32]
Octets = npt.NDArray[np.uint8]
Scales = npt.NDArray[np.float32]

def join_blocks(
    words: Words, scales: npt.NDArray[np.uint16], zeros: Octets, groups: npt.NDArray[np.int32], ggml_type: str
) -> Octets:
    """Return rows of blocks of 32 numbers, [rows, bytes], in Q4_0, Q4_Z or Q8_0.

    `groups` has the group of each block; `scales`, the bits of fp16, and `zeros` are [rows, groups]. Q4_0 and Q8_0
    have no place for zero points, which are 8 and 128.
    """

def join_mxfp4(words: Words, exponents: Octets) -> Octets:
    """Return rows of MXFP4 blocks, [rows, bytes]: each has 4 words, and an exponent of `exponents` [rows, blocks]."""

def widen_words(words: Words, bits: int, scales: Scales, zeros: Octets, groups: npt.NDArray[np.int32]) -> Scales:
    """Return `(number - zero) * scale` of each number, [rows, inputs].

    `groups` has the group of each input; `scales` and `zeros` are [rows, groups].
    """

def reorder_words(words: Words, bits: int, order: npt.NDArray[np.int32]) -> Words:
    """Return words in which number i of a row is number `order[i]` of `words`. Each word must be full of numbers."""

def widen_codes(codes: Octets, values: Scales, scales: Scales, size: int) -> Scales:
    """Return `values[code] * scale` of each code, [rows, columns]; each `size` columns of a row share a scale."""

def inputs_in_words(words: Words) -> Words:
    """Convert AWQ's words [inputs, outputs / 8] to GPTQ's: [inputs / 8, outputs], with 8 inputs per word.

    Inputs up to a multiple of 8 are 0.
    """
