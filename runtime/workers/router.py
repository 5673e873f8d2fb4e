"""Chooses the engine for a request: the home of its conversation, unless that is saturated.

Pure and stateless: the choice depends only on the key, the members and their loads, so that all API servers choose the
same home. A request at another member costs a prefill, but its result is the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from hashlib import blake2b
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

NUM_ALTERNATIVES = 4  # members next in rank that take the requests of a saturated home
MAX_MORE_REQUESTS = 8  # requests that a home may have beyond the member with the fewest
MAX_MORE_WAIT_S = 2.0  # predicted wait that a home may have beyond the shortest


class MemberLoad(NamedTuple):
    """The load of a member, as far as the API server knows."""

    num_requests: int  # requests that have not ended
    predicted_wait_s: float = 0.0  # wait until the first token of a new request


class Router:
    """Rendezvous hashing among fixed members: every key has its own order of members, and its home is the first.

    When members change, make a new router. Only the keys of removed members get new homes, and a new member, among n in
    total, becomes the home of about one key in n.
    """

    def __init__(self, members: Iterable[str]) -> None:
        self.members = tuple(sorted(set(members)))
        self._hashes = np.array([_hash(member.encode()) for member in self.members], np.uint64)  # [members]

    def choose(self, key: bytes, loads: Mapping[str, MemberLoad]) -> str:
        """Choose one of the members in `loads`, which must have at least one member of this router.

        The choice is the key's home, or, if that is saturated, the least loaded of the next `NUM_ALTERNATIVES` members.
        If these are saturated, too, it is the least loaded of all members.
        """
        fewest = min(load.num_requests for load in loads.values())
        shortest_s = min(load.predicted_wait_s for load in loads.values())

        def is_saturated(member: str) -> bool:
            num_requests, wait_s = loads[member]
            return num_requests > fewest + MAX_MORE_REQUESTS or wait_s > shortest_s + MAX_MORE_WAIT_S

        ranked = [member for member in self._ranked(key) if member in loads]
        if not is_saturated(ranked[0]):
            return ranked[0]
        near = ranked[1 : NUM_ALTERNATIVES + 1]
        return min([member for member in near if not is_saturated(member)] or ranked, key=loads.__getitem__)

    def _ranked(self, key: bytes) -> list[str]:
        """Return all members in the order of this key."""
        return [self.members[index] for index in np.argsort(_mix(self._hashes ^ np.uint64(_hash(key)))).tolist()]


def _hash(data: bytes) -> int:
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little")


def _mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Hash each value with the finalizer of SplitMix64, a bijection."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
