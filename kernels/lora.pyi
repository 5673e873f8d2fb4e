from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

LoraPanels = tuple[str, npt.NDArray[Any], npt.NDArray[np.int32]]  # dtype, data [rows, 16], places [panels, 3]
LoraPairs = Sequence[tuple[LoraPanels, LoraPanels] | None]  # A and B for each target

class LoraTable:
    """The adapters of a program by slot, and the columns of its targets: the linear layers that adapters may change."""

    slots: int

    def __init__(self, slots: int, widths: Sequence[tuple[int, int, int]]) -> None:
        """Make a table of empty slots. `widths` has each target's inputs, ranks of all parts, and outputs."""

    def set(self, slot: int, adapter: LoraPairs | None) -> None:
        """Put an adapter into a slot; None empties it. No step may run meanwhile.

        A panel has 16 columns, and its place is the first element of K, the number of elements, and the first row in
        the data. Raises ValueError for a matrix that would lead outside its memory.
        """
