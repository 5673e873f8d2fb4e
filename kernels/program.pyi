from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from .ops import Op, Region
from .pool import Pool

class PageLayout(Protocol):
    """What a program must know of the KV cache; `pager.layout.KVLayout` fits."""

    @property
    def page_layers(self) -> int: ...
    @property
    def group_windows(self) -> tuple[int, ...]: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def padded_head_dim(self) -> int: ...
    @property
    def dtype(self) -> str: ...
    @property
    def page_size(self) -> int: ...
    @property
    def page_bytes(self) -> int: ...
    @property
    def layer_page_bytes(self) -> int: ...
    @property
    def head_bytes(self) -> int: ...

def scratch_nbytes(head_dim: int, workers: int) -> int:
    """Bytes of the workers' scratch a program allocates besides its arena."""

class Program:
    """A list of ops bound to an arena, the KV pages and a pool. ValueError where any size does not fit."""

    isa: str
    def __init__(
        self,
        ops: Sequence[Op],
        arena_bytes: int,
        kv_memory: npt.NDArray[np.uint8],
        kv_layout: PageLayout,
        num_pages: int,
        pool: Pool,
        *,
        max_rows: int,
        max_samples: int,
        max_sequences: int,
        vocab_size: int,
        isa: str | None = None,
    ) -> None: ...
    def run(
        self,
        token_ids: npt.NDArray[np.int32],
        row_start: npt.NDArray[np.int32],
        first_position: npt.NDArray[np.int32],
        page_ids: npt.NDArray[np.int32],
        page_start: npt.NDArray[np.int32],
        sample_rows: npt.NDArray[np.int32],
    ) -> None:
        """One step over `token_ids` [rows], all int32. Sequence i of n owns rows row_start[i]..row_start[i+1], from
        position first_position[i] on, and in layer group g the pages page_ids[page_start[g*n+i]..page_start[g*n+i+1]].

        A page is -1 where a group with a window has given it back, before the first tile of 64 tokens that the
        sequence's first row sees. ValueError for any array that would lead outside. The GIL is released meanwhile.
        """

    def op_seconds(self) -> list[float]:
        """Seconds spent in each op of the list since this was last asked, the wait for the slowest worker included."""

    def view(self, region: Region) -> npt.NDArray[Any]: ...
