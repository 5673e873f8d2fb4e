"""One block of memory for packed weights.

It must not know what is put there. The one invariant: the block starts on a 2 MiB boundary and reads as zero.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ....pager import OutOfMemory, map_memory
from ...common.errors import ModelError


def map_block(nbytes: int) -> npt.NDArray[np.uint8]:
    """`nbytes` bytes, given back when the last view is gone. Raises ModelError when the system has none."""
    try:
        return map_memory(nbytes)
    except OutOfMemory as error:
        raise ModelError(f"the weights do not fit: {error}; try weights q8") from error
