from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from .lora import LoraTable
from .ops import Op, Region
from .pool import Pool

class PageGroup(Protocol):
    """Layers that share pages."""

    @property
    def window(self) -> int: ...
    @property
    def heads(self) -> tuple[int, int]: ...
    @property
    def layers(self) -> tuple[int, ...]: ...

class PageLayout(Protocol):
    """The attributes of a KV cache's layout that a program reads. `pager.layout.KVLayout` has them."""

    @property
    def groups(self) -> Sequence[PageGroup]: ...
    @property
    def group_windows(self) -> tuple[int, ...]: ...
    @property
    def head_dims(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> str: ...
    @property
    def page_size(self) -> int: ...
    @property
    def page_bytes(self) -> int: ...
    @property
    def page_stride(self) -> int: ...
    def padded(self, head_dim: int) -> int: ...
    def head_bytes(self, head_dim: int) -> int: ...
    def offset(self, group: int, slot: int, num_pages: int) -> int: ...

def scratch_nbytes(workers: int, ops: Sequence[Op]) -> int:
    """Return the bytes of the workers' scratch, which a program allocates besides its arena."""

class Program:
    """A list of ops bound to an arena, the KV pages and a pool. ValueError if a size does not fit."""

    def __init__(
        self,
        ops: Sequence[Op],
        arena_bytes: int,
        kv_memory: npt.NDArray[np.uint8] | None,
        kv_layout: PageLayout | None,
        num_pages: int,
        pool: Pool,
        *,
        max_rows: int,
        max_samples: int,
        max_sequences: int,
        vocab_size: int,
        isa: str | None = None,
        num_states: int | None = None,
        lora: LoraTable | None = None,
    ) -> None:
        """Allocate `num_states` slots for the states of sequences, or else `max_sequences` of them.

        `lora` has the adapters of `LoraShrink` and `Linear`.
        """

    @property
    def states(self) -> npt.NDArray[np.uint8]:
        """The memory of the states, [slots, bytes]; a program without recurrent ops has 0 bytes in each."""

    def run(
        self,
        token_ids: npt.NDArray[np.int32],
        row_start: npt.NDArray[np.int32],
        first_position: npt.NDArray[np.int32],
        page_ids: npt.NDArray[np.int32],
        page_start: npt.NDArray[np.int32],
        sample_rows: npt.NDArray[np.int32],
        given_of: npt.NDArray[np.int32] | None = None,
        given: npt.NDArray[np.float32] | None = None,
        rotary: npt.NDArray[np.float32] | None = None,
        last_seen: npt.NDArray[np.int32] | None = None,
        state_slots: npt.NDArray[np.int32] | None = None,
        first: int = 0,
        end: int | None = None,
        adapters: npt.NDArray[np.int32] | None = None,
    ) -> None:
        """Run one step over `token_ids` [rows], or its ops [first, end). The GIL is released meanwhile.

        All arrays of integers are int32. Sequence i of n owns rows row_start[i]..row_start[i+1], from position
        first_position[i] on, and in layer group g the pages page_ids[page_start[g*n+i]..page_start[g*n+i+1]]. A group
        with a window may have -1 for released pages before the first tile of 64 tokens that the sequence's first row
        sees. Row r has row given_of[r] of `given` in place of the embedding of its token, unless that is -1. With
        `rotary` [rows, rotary_dim], the heads of row r are rotated by row r of it, else by the table's row for the
        position. Row r sees tokens up to position last_seen[r]: its own or a later position among the sequence's rows,
        never before that of the previous row. Without `last_seen`, a row sees no later token. The state of sequence i
        is in slot state_slots[i], by default in slot i; a sequence at position 0 reads nothing of its state. Row r has
        the adapter in slot adapters[r], or none with -1. Raises
        ValueError for an array that would lead outside the program's memory, and for a range that the program does not
        have.
        """

    def run_texts(
        self,
        token_ids: npt.NDArray[np.int32],
        row_start: npt.NDArray[np.int32],
        type_ids: npt.NDArray[np.int32] | None = None,
        first: int = 0,
        end: int | None = None,
        rotary: npt.NDArray[np.float32] | None = None,
        part: tuple[int, int, int] = (0, 1, 1),
    ) -> None:
        """Run the ops [first, end) over whole texts: `token_ids` [rows], `type_ids` [rows] (none: all 0).

        The program has no KV cache (`kv_layout` None). Text i owns rows row_start[i]..row_start[i+1], from position 0
        on; every text has a row of the samples. `rotary` is as in `run`. Ranges of ops in order, with the same arrays,
        give the same bits as all ops at once. With `part` (b, e, n), one op computes the parts b to e of n equal ones.
        Parts in order, all before the next op, give the same bits, too. Raises ValueError for an array that would lead
        outside the program's memory, and for a part of several ops or of an op that has none.
        """

    def choose(self, choices: Mapping[str, str]) -> None:
        """Replace functions of the program's level: a name of `isa.EQUAL_FUNCTIONS` -> the level of its function.

        Functions without a choice are those of the program's level. Raises ValueError for another name, and for a level
        that this machine lacks.
        """

    def op_seconds(self) -> list[float]:
        """Return the seconds spent in each op since the last call, the wait for the slowest worker included."""

    def view(self, region: Region) -> npt.NDArray[Any]:
        """Return a region's data plane [rows, padded columns] as an array that shares the arena's memory."""
