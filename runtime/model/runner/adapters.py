"""The adapters that a model runner has loaded, each in a slot of its program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from ....kernels.lora import LoraTable
from ....kernels.ops import LoraShrink, Op
from ...common.errors import ConfigError
from ..lora import LoraLayout, PackedAdapter, adapter_key, open_adapter, pack_adapter
from ..weights.packing import Vector
from ..weights.paired_rows import Pairs


class Adapters:
    """Loaded adapters by key, a name and the digest of its files, within the bytes that are planned for them.

    No step may run during a change.
    """

    def __init__(
        self, layout: LoraLayout, table: LoraTable, ops: Sequence[Op], pairs: Mapping[str, Pairs], max_bytes: int
    ) -> None:
        self._layout = layout
        self._table = table
        self._pairs = pairs
        self._max_bytes = max_bytes
        self._slots: dict[str, int] = {}
        self._loaded: dict[str, PackedAdapter] = {}
        norms: dict[int, Vector | None] = {
            op.target: None if op.normed is None else op.normed.weight for op in ops if isinstance(op, LoraShrink)
        }
        self._norms = [norms[target] for target in range(len(layout.plans))]

    @property
    def nbytes(self) -> int:
        """The bytes of all loaded adapters."""
        return sum(each.nbytes for each in self._loaded.values())

    def load(self, name: str, path: str) -> str:
        """Load an adapter into a free slot and return its key.

        Raises ConfigError without a free slot, or memory for it, and ModelError for wrong files.
        """
        files = open_adapter(path)
        key = adapter_key(name, files.digest)
        if key in self._slots:
            return key
        free = set(range(self._table.slots)) - set(self._slots.values())
        packed = pack_adapter(self._layout, files, self._norms, self._pairs)
        if not free:
            raise ConfigError(f"lora: {name} is one adapter more than the {self._table.slots} that were planned")
        if self.nbytes + packed.nbytes > self._max_bytes:
            raise ConfigError(
                f"lora: {name} takes {packed.nbytes:,} bytes, and the other adapters {self.nbytes:,}; lora_memory is "
                f"{self._max_bytes:,} bytes"
            )
        slot = min(free)
        self._table.set(slot, packed.pairs)
        self._slots[key] = slot
        self._loaded[key] = packed
        return key

    def rows(self, keys: Sequence[str], counts: Sequence[int]) -> npt.NDArray[np.int32] | None:
        """Return the slot of each row's adapter, -1 for a row without one; None if no sequence has an adapter.

        Each sequence has an adapter by its key, or an empty text, and a count of rows.
        """
        if not any(keys):
            return None
        slots = [self._slots[key] if key else -1 for key in keys]
        return np.repeat(np.array(slots, np.int32), counts)
