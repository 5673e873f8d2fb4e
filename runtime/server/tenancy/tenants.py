"""`Tenant`: the owner of connections, with its limits on requests, its totals for STATS, and its turns.

A request beyond a limit is refused immediately, and the refusal changes nothing. The retry time in the refusal is
exact: after it, one request of this tenant is accepted. Must not import keys, sockets or requests.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Annotated

import msgspec

from ...common.errors import Overloaded
from ...common.types import Usage

FRAMES_PER_TURN = 32  # frames of one connection or stream
FRAMES_PER_REQUEST = 8  # cost in frames of a frame that begins a request
NS_PER_MINUTE = 60 * 10**9
NS_PER_MS = 10**6

Requests = Annotated[int, msgspec.Meta(ge=1, le=10**9)]


class TenantLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits and rights of one tenant; None: no limit. The limits count GENERATE only."""

    max_concurrent_requests: Requests | None = None  # queued ones included
    requests_per_minute: Requests | None = None
    burst: Requests | None = None  # requests that may arrive at once; None: `requests_per_minute`
    operator: bool = False  # the answer to STATS has the totals of all tenants


class TenantTotals(msgspec.Struct):
    """The use of a tenant's requests since the server started; its own answer to STATS. Integers."""

    live: int = 0  # requests that have not ended
    requests: int = 0  # requests that have ended
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0  # prompt tokens found in the prefix cache
    recomputed_tokens: int = 0


class Turns:
    """The turns in which one connection of a tenant handles frames, or one of its streams sends waiting output.

    Even if a tenant floods many connections with frames or replays, another tenant's frame waits for one turn only. The
    operator port's connections take turns in the same way.
    """

    def __init__(self) -> None:
        self._is_taken = False  # the turn of the event loop is taken
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._waiting_first: deque[asyncio.Future[None]] = deque()

    async def wait(self, *, first: bool = False) -> int:
        """Wait for the caller's turn, and return the number of frames that it may handle or send.

        With `first`, the caller precedes all callers without it.
        """
        loop = asyncio.get_running_loop()
        if self._is_taken:
            turn = loop.create_future()
            (self._waiting_first if first else self._waiting).append(turn)
            await turn
        else:
            self._is_taken = True
            loop.call_soon(self._next_turn)
        return FRAMES_PER_TURN

    def call_soon(self, callback: Callable[[], object]) -> None:
        """Call `callback` when its turn comes, in a later turn of the event loop."""
        loop = asyncio.get_running_loop()
        turn = loop.create_future()
        turn.add_done_callback(lambda _: callback())
        self._waiting.append(turn)
        if not self._is_taken:
            self._is_taken = True
            loop.call_soon(self._next_turn)

    def _next_turn(self) -> None:
        while waiting := self._waiting_first or self._waiting:
            if not (turn := waiting.popleft()).done():  # done: its connection has ended
                turn.set_result(None)
                asyncio.get_running_loop().call_soon(self._next_turn)
                return
        self._is_taken = False


class Tenant:
    """One tenant of a server, shared by the tenant's connections.

    Call `enter` before a request is submitted, and `leave` once when it has ended in any way, including a refusal by
    the engine.
    """

    def __init__(
        self, name: str, limits: TenantLimits | None = None, clock_ns: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self.name = name
        self.revoked = False  # the keys were removed; open connections are refused every request
        self.totals = TenantTotals()
        self.frame_turns = Turns()
        self.output_turns = Turns()
        self._limits = limits or TenantLimits()
        self._clock_ns = clock_ns
        self._full_at_ns = 0  # time when the token bucket is full again: its whole state, which needs no refilling

    @property
    def limits(self) -> TenantLimits:
        return self._limits

    def change_limits(self, limits: TenantLimits) -> None:
        """Apply `limits` from the next request on. Earlier requests cost at most the whole new burst."""
        self._limits = limits
        self._full_at_ns = min(self._full_at_ns, self._clock_ns() + _price_ns(limits) * _burst(limits))

    def enter(self) -> None:
        """Count a request. Raises Overloaded, with the wait if it is known."""
        limit = self._limits.max_concurrent_requests
        num_live = self.totals.live
        if limit is not None and num_live >= limit:
            raise Overloaded(f"{num_live} requests of this tenant are live, as many as it may have at a time")
        self.charge_rate()
        self.totals.live += 1

    def charge_rate(self) -> None:
        """Count a request for the rate only. Raises Overloaded, with the wait."""
        if self._limits.requests_per_minute is None:
            return
        # Take the price of one request out of the token bucket.
        now_ns = self._clock_ns()
        price_ns = _price_ns(self._limits)
        full_at_ns = max(self._full_at_ns, now_ns) + price_ns
        missing_ns = full_at_ns - now_ns - price_ns * _burst(self._limits)
        if missing_ns > 0:
            rate = self._limits.requests_per_minute
            wait_ms = -(-missing_ns // NS_PER_MS)
            raise Overloaded(f"this tenant may send {rate} requests per minute", retry_after_ms=wait_ms)
        self._full_at_ns = full_at_ns

    def leave(self, usage: Usage | None = None) -> None:
        """Record the end of a request; `usage` is None if it ended in an error."""
        totals = self.totals
        totals.live -= 1
        totals.requests += 1
        if usage is not None:
            totals.prompt_tokens += usage.prompt_tokens
            totals.completion_tokens += usage.completion_tokens
            totals.cached_tokens += usage.cached_tokens
            totals.recomputed_tokens += usage.recomputed_tokens


def _price_ns(limits: TenantLimits) -> int:
    """Return the time in which the bucket gains one request, rounded up so that the rate is never exceeded."""
    return -(-NS_PER_MINUTE // limits.requests_per_minute) if limits.requests_per_minute else 0


def _burst(limits: TenantLimits) -> int:
    return limits.burst or limits.requests_per_minute or 0
