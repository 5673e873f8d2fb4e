from typing import Any

import numpy as np
import numpy.typing as npt

from .pool import Pool

MAX_TOP_LOGPROBS: int
ROW: np.dtype[np.void]
ADJUSTMENT: np.dtype[np.void]

def sampler_nbytes(stride: int, max_rows: int, workers: int) -> int:
    """Return the bytes that a sampler allocates: weights and a heap per worker, results per row."""

class Sampler:
    """Samples up to `max_rows` rows of logits of one vocabulary, `stride` (a multiple of 32) apart."""

    def __init__(self, vocab_size: int, stride: int, max_rows: int, pool: Pool, isa: str | None = None) -> None: ...
    def sample(
        self,
        logits: npt.NDArray[np.float32],
        maxima: npt.NDArray[np.float32],
        rows: npt.NDArray[Any],
        adjustments: npt.NDArray[Any],
        masks: npt.NDArray[np.int32] | None = None,
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32], npt.NDArray[np.int32], npt.NDArray[np.float32]]:
        """Draw one token per row of `logits` [rows, stride]; `rows` has dtype ROW, `adjustments` ADJUSTMENT.

        `maxima` [rows, at least vocab_size / 32 rounded up] holds the maximum of each 32 logits of the vocabulary, NaN
        if one is NaN. With it a greedy row reads one block of its logits instead of all.

        `masks` [masks, vocab_size / 32 rounded up] has a bit for each token, the lowest first; the `mask` of a
        row counts them from 1 on. The logits of a row with a mask are minus infinity afterwards where a token is not
        allowed; all other logits are left as they were.

        Returns views that the next call overwrites: token ids [rows] (-1: the logits are not finite, or no
        token is allowed), natural-log probabilities of the raw distribution [rows], and the top alternatives' ids and
        logprobs [rows, 32].
        """

def philox(counter: list[int], key: list[int]) -> list[int]:
    """Run the raw generator, for known-answer tests: four and two uint32 in, four out."""
