"""The slots of sequences' states: what layers remember of all earlier tokens together, instead of keys and values.

A state changes in place, so a slot serves one sequence. Forks share a slot until one of them is about to write; that
sequence gets a copy. A slot can serve its sequence from each of the last `rollback` positions on, and from position 0,
where nothing of it is read. Must not import anything about the content of a state.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from .exceptions import OutOfStates

NO_STATE = -1  # slot of a sequence that has not computed any token
StateMemory = npt.NDArray[np.uint8]  # [slots, bytes of a state]
NO_MEMORY: StateMemory = np.empty((0, 0), np.uint8)  # memory of a model without states
CopyState = Callable[[int, int], None]  # (source slot, destination slot)


class NoStates:
    """The slots of a model without states: none."""

    num_slots = num_owned = num_copies = nbytes = 0
    rollback = 1 << 62  # a sequence may return to any position

    def free_slots(self) -> list[int]:
        """Return no slot."""
        return []

    def own(self, slot: int) -> int:
        """Return the slot that a sequence may write to: none."""
        return NO_STATE

    def share(self, slot: int) -> None:
        """Do nothing."""

    def release(self, slot: int) -> None:
        """Do nothing."""


class StatePool:
    """Slots with reference counts. There must be one for every sequence that runs at the same time."""

    def __init__(self, num_slots: int, rollback: int, copy: CopyState | None = None, nbytes: int = 0) -> None:
        """Make slots for states of `nbytes`. `copy` copies one; None where there is no memory, as in a simulation."""
        if num_slots < 1 or rollback < 0:
            raise ValueError(f"there must be slots and tokens to go back to, got {num_slots} and {rollback}")
        self.num_slots = num_slots
        self.rollback = rollback
        self.nbytes = nbytes
        self.num_copies = 0  # states that were copied because two sequences shared a slot
        self._copy = copy
        self._references = [0] * num_slots
        self._free = list(range(num_slots))[::-1]

    @property
    def num_owned(self) -> int:
        """Slots that some sequence has."""
        return self.num_slots - len(self._free)

    def free_slots(self) -> list[int]:
        """Return the slots that `own` takes, in order."""
        return self._free[::-1]

    def references(self, slot: int) -> int:
        """Return how many sequences have a slot."""
        return self._references[slot]

    def own(self, slot: int) -> int:
        """Return a slot with the same state that no other sequence has, and take the reference on `slot` for it.

        Raises OutOfStates, changing nothing.
        """
        if slot != NO_STATE and self._references[slot] == 1:
            return slot
        if not self._free:
            raise OutOfStates(f"all {self.num_slots} states are in use")
        own = self._free.pop()
        self._references[own] = 1
        if slot != NO_STATE:
            self.num_copies += 1
            if self._copy is not None:
                self._copy(slot, own)
            self.release(slot)
        return own

    def share(self, slot: int) -> None:
        """Take one more reference on a slot, if it is one."""
        if slot != NO_STATE:
            self._references[slot] += 1

    def release(self, slot: int) -> None:
        """Give back a reference on a slot, if it is one."""
        if slot != NO_STATE:
            self._references[slot] -= 1
            if not self._references[slot]:
                self._free.append(slot)
