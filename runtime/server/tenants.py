"""`Tenant`: who a connection belongs to, and how much it may ask at a time and per minute.

It must not know keys, sockets or requests, and never waits: what is too much is refused at once. One invariant: a
refusal changes nothing, and a wait that it names is exact: so much later one request of this tenant is let in.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Annotated

import msgspec

from ..errors import Overloaded, Unauthenticated

NS_PER_MINUTE = 60 * 10**9
NS_PER_MS = 10**6

Requests = Annotated[int, msgspec.Meta(ge=1, le=10**9)]


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """None: no limit. Both count GENERATE only."""

    max_concurrent_requests: Requests | None = None  # queued ones included
    requests_per_minute: Requests | None = None
    burst: Requests | None = None  # that may come at once; None: a minute's worth


class Tenant:
    """One per tenant and server, shared by the tenant's connections. `enter` before a request is submitted, and `leave`
    exactly once when it has ended, however it ended, also when the engine refused it.
    """

    def __init__(
        self, name: str, limits: Limits | None = None, clock_ns: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self.name = name
        self.limits = limits or Limits()
        self.revoked = False  # its keys are gone, its connections may not be
        self._clock_ns = clock_ns
        self._num_live = 0
        self._debt_until_ns = 0  # when all that was let in would be paid for at the steady rate

    def enter(self) -> None:
        """Count a request in. Raises Overloaded, with the wait where one is known, or Unauthenticated once revoked."""
        if self.revoked:
            raise Unauthenticated("this tenant's keys were revoked")
        limit = self.limits.max_concurrent_requests
        if limit is not None and self._num_live >= limit:
            raise Overloaded(f"{self._num_live} requests of this tenant are live, as many as it may have at a time")
        self._spend()
        self._num_live += 1

    def leave(self) -> None:
        self._num_live -= 1

    def _spend(self) -> None:
        """A token bucket, kept as the time at which it is full again (GCRA): no refilling, integers only."""
        rate = self.limits.requests_per_minute
        if rate is None:
            return
        price_ns = -(-NS_PER_MINUTE // rate)
        full_ns = price_ns * (self.limits.burst or rate)
        now = self._clock_ns()
        debt_ns = min(max(self._debt_until_ns - now, 0), full_ns)  # limits may have changed since
        missing_ns = debt_ns + price_ns - full_ns
        if missing_ns > 0:
            raise Overloaded(
                f"this tenant may send {rate} requests per minute", retry_after_ms=-(-missing_ns // NS_PER_MS)
            )
        self._debt_until_ns = now + debt_ns + price_ns
