import numpy as np
import numpy.typing as npt

from .ops import DType
from .pool import Pool

def read_bytes_per_s(memory: npt.NDArray[np.uint8], pool: Pool, isa: str | None = None) -> float:
    """Return the bytes per second at which all workers of `pool` together read `memory`.

    It is the median of several passes, at the best of several prefetch distances. To measure DRAM, `memory` should be
    far larger than the last-level cache. Raises ValueError if it has less than 256 B per worker.
    """

def peak_ops_per_s(dtype: DType, pool: Pool, isa: str | None = None) -> float:
    """Return the multiplications and additions per second of the level's dot product in `dtype` on all workers.

    It is the median of several passes of some milliseconds. Raises ValueError for an unknown dtype.
    """
