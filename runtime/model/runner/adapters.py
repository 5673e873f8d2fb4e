"""The adapters that a model runner has loaded, each in a slot of its program."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

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

    def __contains__(self, key: str) -> bool:
        return key in self._slots

    def pack(self, name: str, path: str) -> tuple[str, PackedAdapter | None]:
        """Read and pack an adapter; return its key, and its matrices unless it is loaded. Steps may run meanwhile.

        Raises ModelError for wrong files.
        """
        files = open_adapter(path)
        key = adapter_key(name, files.digest)
        if key in self._slots:
            return key, None
        return key, pack_adapter(self._layout, files, self._norms, self._pairs)

    def put(
        self, key: str, packed: PackedAdapter, kept: Collection[str] | None = None, leaving: Sequence[str] = ()
    ) -> list[str]:
        """Load a packed adapter in place of as few others as it needs, and return their keys.

        Others are those not in `kept`, which without it has all, last the adapters `leaving`, in order. Raises
        ConfigError if they leave too little room, and changes nothing then.
        """
        evicted: list[str] = []
        candidates = [] if kept is None else [each for each in self._slots if each not in kept and each not in leaving]
        candidates += [each for each in leaving if each in self._slots]
        slots, free_bytes = self._table.slots - len(self._slots), self._max_bytes - self.nbytes
        while not slots or free_bytes < packed.nbytes:
            if not candidates:
                raise self._too_full(key, packed, slots)
            evicted.append(candidates.pop(0))
            slots += 1
            free_bytes += self._loaded[evicted[-1]].nbytes
        for each in evicted:
            self.remove(each)
        slot = min(set(range(self._table.slots)) - set(self._slots.values()))
        self._table.set(slot, packed.pairs)
        self._slots[key] = slot
        self._loaded[key] = packed
        return evicted

    def load(self, name: str, path: str) -> str:
        """Load an adapter into free memory and return its key. Raises as `pack` and `put`."""
        key, packed = self.pack(name, path)
        if packed is not None:
            self.put(key, packed)
        return key

    def nbytes_of(self, key: str) -> int:
        """Return the bytes of a loaded adapter."""
        return self._loaded[key].nbytes

    def remove(self, key: str) -> None:
        """Free the slot and the memory of an adapter. Idempotent."""
        slot = self._slots.pop(key, None)
        if slot is not None:
            self._table.set(slot, None)
            del self._loaded[key]

    def _too_full(self, key: str, packed: PackedAdapter, slots: int) -> ConfigError:
        name = key.rpartition("@")[0]
        if not slots:
            return ConfigError(f"lora: {name} is one adapter more than the {self._table.slots} that were planned")
        return ConfigError(
            f"lora: {name} takes {packed.nbytes:,} bytes, and the other adapters {self.nbytes:,}; lora_memory is "
            f"{self._max_bytes:,} bytes"
        )

    def rows(self, keys: Sequence[str], counts: Sequence[int]) -> npt.NDArray[np.int32] | None:
        """Return the slot of each row's adapter, -1 for a row without one; None if no sequence has an adapter.

        Each sequence has an adapter by its key, or an empty text, and a count of rows.
        """
        if not any(keys):
            return None
        slots = [self._slots[key] if key else -1 for key in keys]
        return np.repeat(np.array(slots, np.int32), counts)
