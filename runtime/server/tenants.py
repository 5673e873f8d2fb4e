"""`Tenant`: who a connection belongs to, and how much it may ask at a time and per minute.

It must not know keys, sockets or requests, and never waits: what is too much is refused at once. One invariant: a
refusal changes nothing, and a wait that it names is exact: so much later one request of this tenant is let in.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Annotated

import msgspec

from ..common.errors import Overloaded, Unauthenticated

NS_PER_MINUTE = 60 * 10**9
NS_PER_MS = 10**6

Requests = Annotated[int, msgspec.Meta(ge=1, le=10**9)]


class TenantLimits(msgspec.Struct, frozen=True, kw_only=True):
    """None: no limit. Both count GENERATE only."""

    max_concurrent_requests: Requests | None = None  # queued ones included
    requests_per_minute: Requests | None = None
    burst: Requests | None = None  # that may come at once; None: a minute's worth


class Tenant:
    """One per tenant and server, shared by the tenant's connections. `enter` before a request is submitted, and `leave`
    exactly once when it has ended, however it ended, also when the engine refused it.
    """

    def __init__(
        self, name: str, limits: TenantLimits | None = None, clock_ns: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self.name = name
        self.revoked = False  # its keys are gone, its connections may not be
        self._limits = limits or TenantLimits()
        self._clock_ns = clock_ns
        self._num_live = 0
        self._full_at_ns = 0  # when the bucket is full again: the whole state of a token bucket, without refilling it

    @property
    def limits(self) -> TenantLimits:
        return self._limits

    def change_limits(self, limits: TenantLimits) -> None:
        """From the next request on. What the old limits had let in never costs more than the new ones' whole burst."""
        self._limits = limits
        self._full_at_ns = min(self._full_at_ns, self._clock_ns() + _price_ns(limits) * _burst(limits))

    def enter(self) -> None:
        """Count a request in. Raises Overloaded, with the wait where one is known, or Unauthenticated once revoked."""
        self._check_revoked()
        limit = self._limits.max_concurrent_requests
        if limit is not None and self._num_live >= limit:
            raise Overloaded(f"{self._num_live} requests of this tenant are live, as many as it may have at a time")
        self._spend()
        self._num_live += 1

    def replay(self) -> None:
        """Count a request that an earlier one answers: for the rate alone. Raises what `enter` raises."""
        self._check_revoked()
        self._spend()

    def leave(self) -> None:
        self._num_live -= 1

    def _check_revoked(self) -> None:
        if self.revoked:
            raise Unauthenticated("this tenant's keys were revoked")

    def _spend(self) -> None:
        """Take a request's price out of the bucket, if there is one, or say when there is enough in it."""
        if self._limits.requests_per_minute is None:
            return
        now_ns, price_ns = self._clock_ns(), _price_ns(self._limits)
        full_at_ns = max(self._full_at_ns, now_ns) + price_ns
        missing_ns = full_at_ns - now_ns - price_ns * _burst(self._limits)
        if missing_ns > 0:
            rate = self._limits.requests_per_minute
            wait_ms = -(-missing_ns // NS_PER_MS)
            raise Overloaded(f"this tenant may send {rate} requests per minute", retry_after_ms=wait_ms)
        self._full_at_ns = full_at_ns


def _price_ns(limits: TenantLimits) -> int:
    """Of one request: the time in which the bucket gains it. Rounded up, so that the rate is never exceeded."""
    return -(-NS_PER_MINUTE // limits.requests_per_minute) if limits.requests_per_minute else 0


def _burst(limits: TenantLimits) -> int:
    return limits.burst or limits.requests_per_minute or 0
