"""What tenants may have: places in the queue and pages, and what they have now.

It must not know requests' states, nor decide who runs. The one invariant: a tenant's counts are the sums over its live
requests, and a tenant without any is forgotten.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """None: no limit but the others."""

    max_num_waiting: int = 1024
    max_num_waiting_per_tenant: int | None = None
    max_kv_pages_per_tenant: int | None = None  # of its running requests, each counted at its longest

    def __post_init__(self) -> None:
        given = (self.max_num_waiting, self.max_num_waiting_per_tenant, self.max_kv_pages_per_tenant)
        if any(limit is not None and limit < 1 for limit in given):
            raise ValueError(
                "max_num_waiting, max_num_waiting_per_tenant and max_kv_pages_per_tenant must be at least 1"
            )


class Tenants:
    """Counts by tenant."""

    def __init__(self, limits: QueueLimits) -> None:
        self.limits = limits
        self.num_waiting = 0
        self._queue: Counter[str] = Counter()
        self._pages: Counter[str] = Counter()
        self._num_seqs: Counter[str] = Counter()

    def waiting(self, tenant: str) -> int:
        return self._queue[tenant]

    def num_seqs(self, tenant: str) -> int:
        """Sequences that run."""
        return self._num_seqs[tenant]

    def queue(self, tenant: str, count: int) -> None:
        """So many more of its requests wait; fewer where negative."""
        self.num_waiting += count
        _add(self._queue, tenant, count)

    def run(self, tenant: str, num_seqs: int, pages: int) -> None:
        """So many more of its sequences run, which may come to hold so many pages; fewer where negative."""
        _add(self._num_seqs, tenant, num_seqs)
        _add(self._pages, tenant, pages)

    def limit_reached(self, tenant: str, count: int) -> str | None:
        """Which limit of the queue `count` more requests would break, in words."""
        limits = self.limits
        if self.num_waiting + count > limits.max_num_waiting:
            return f"{self.num_waiting} requests are waiting, the limit is {limits.max_num_waiting}"
        most = limits.max_num_waiting_per_tenant
        if most is not None and self._queue[tenant] + count > most:
            return f"{self._queue[tenant]} requests of this tenant are waiting, the limit is {most}"
        return None

    def has_quota(self, tenant: str, pages: int) -> bool:
        """Whether a request of at most `pages` fits its quota beside those that run."""
        most = self.limits.max_kv_pages_per_tenant
        return most is None or self._pages[tenant] + pages <= most


def _add(counts: Counter[str], tenant: str, amount: int) -> None:
    counts[tenant] += amount
    if not counts[tenant]:
        del counts[tenant]
