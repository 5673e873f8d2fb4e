"""A tenant's limits on requests at a time and per minute, on a clock that the test moves: exact counts and waits."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st
from quire.runtime.common.errors import Overloaded
from quire.runtime.common.types import Usage
from quire.runtime.server.tenancy.tenants import (
    FRAMES_PER_TURN,
    NS_PER_MINUTE,
    NS_PER_MS,
    Tenant,
    TenantLimits,
    TenantTotals,
    Turns,
)

NS_PER_S = 10**9


@dataclass
class FakeClock:
    now_ns: int = 10**15

    def __call__(self) -> int:
        return self.now_ns


def admitted(tenant: Tenant, attempts: int) -> int:
    """Return the number of accepted requests among `attempts`, each ended at once."""
    count = 0
    for _ in range(attempts):
        try:
            tenant.enter()
        except Overloaded:
            continue
        tenant.leave()
        count += 1
    return count


def wait_ms(tenant: Tenant) -> int | None:
    with pytest.raises(Overloaded) as refusal:
        tenant.enter()
    return refusal.value.retry_after_ms


def test_without_limits_every_request_is_accepted() -> None:
    assert admitted(Tenant("a"), 1000) == 1000


def test_as_many_at_a_time_as_allowed() -> None:
    tenant = Tenant("a", TenantLimits(max_concurrent_requests=2))
    tenant.enter()
    tenant.enter()
    assert wait_ms(tenant) is None  # no one can tell when a request ends
    tenant.leave()
    tenant.enter()
    assert wait_ms(tenant) is None


def test_a_minutes_worth_at_once_then_the_steady_rate() -> None:
    clock = FakeClock()
    tenant = Tenant("a", TenantLimits(requests_per_minute=60), clock)
    assert admitted(tenant, 100) == 60
    assert wait_ms(tenant) == 1000
    clock.now_ns += NS_PER_S // 4
    assert wait_ms(tenant) == 750
    clock.now_ns += 10 * NS_PER_S
    assert admitted(tenant, 100) == 10


def test_a_burst_smaller_than_a_minutes_worth() -> None:
    clock = FakeClock()
    tenant = Tenant("a", TenantLimits(requests_per_minute=600, burst=3), clock)
    assert admitted(tenant, 10) == 3
    assert wait_ms(tenant) == 100
    clock.now_ns += NS_PER_MINUTE
    assert admitted(tenant, 10) == 3


def test_a_request_refused_for_concurrency_does_not_count_for_the_rate() -> None:
    tenant = Tenant("a", TenantLimits(max_concurrent_requests=1, requests_per_minute=60, burst=2), FakeClock())
    tenant.enter()
    assert [wait_ms(tenant) for _ in range(5)] == [None] * 5
    tenant.leave()
    assert admitted(tenant, 5) == 1


def test_a_request_refused_for_the_rate_does_not_count_as_live() -> None:
    clock = FakeClock()
    tenant = Tenant("a", TenantLimits(max_concurrent_requests=1, requests_per_minute=60, burst=1), clock)
    assert admitted(tenant, 3) == 1
    clock.now_ns += NS_PER_S
    assert admitted(tenant, 3) == 1


def test_the_totals_are_the_sums_of_ended_requests() -> None:
    tenant = Tenant("a")
    for _ in range(4):
        tenant.enter()
    tenant.leave()
    for tokens in (1, 10):
        usage = Usage(
            prompt_tokens=tokens, completion_tokens=2 * tokens, cached_tokens=3 * tokens, recomputed_tokens=4 * tokens
        )
        tenant.leave(usage)
    assert tenant.totals == TenantTotals(
        live=1, requests=3, prompt_tokens=11, completion_tokens=22, cached_tokens=33, recomputed_tokens=44
    )


def test_new_limits_apply_from_the_next_request_and_old_requests_cost_at_most_their_burst() -> None:
    clock = FakeClock()
    tenant = Tenant("a", TenantLimits(requests_per_minute=1, burst=60), clock)
    assert admitted(tenant, 60) == 60  # an hour's worth
    tenant.change_limits(TenantLimits(requests_per_minute=60, burst=2))
    assert wait_ms(tenant) == 1000
    clock.now_ns += 2 * NS_PER_S
    assert admitted(tenant, 5) == 2


@given(
    rate=st.integers(1, 10_000),
    burst=st.none() | st.integers(1, 50),
    pauses=st.lists(st.integers(0, 3 * NS_PER_S), min_size=1, max_size=60),
)
def test_never_more_than_allowed_and_every_wait_is_exact(rate: int, burst: int | None, pauses: list[int]) -> None:
    clock = FakeClock()
    tenant = Tenant("a", TenantLimits(requests_per_minute=rate, burst=burst), clock)
    started = clock.now_ns
    for let_in, pause in enumerate(pauses, start=1):
        clock.now_ns += pause
        if admitted(tenant, 1) == 0:
            wait = wait_ms(tenant) or 0
            assert wait >= 1
            clock.now_ns += (wait - 1) * NS_PER_MS
            assert wait == 1 or wait_ms(tenant) == 1
            clock.now_ns += NS_PER_MS
            tenant.enter()
        assert let_in <= (burst or rate) + (clock.now_ns - started) * rate // NS_PER_MINUTE


# Turns of connections


async def test_connections_of_a_tenant_take_turns_and_other_tenants_do_not_wait() -> None:
    """A flood on many connections is handled one connection per turn of the event loop."""
    flood = Turns()
    other = Turns()
    order: list[str] = []

    async def connection(name: str, turns: Turns, grants: int) -> None:
        for _ in range(grants):
            assert await turns.wait() == FRAMES_PER_TURN
            order.append(name)

    async with asyncio.TaskGroup() as group:
        for name in "abc":
            group.create_task(connection(name, flood, 2))
        group.create_task(connection("other", other, 1))
    assert order.index("other") <= 2, "the other tenant waits for one turn only"
    order.remove("other")
    assert "".join(order) == "aabcbc"


async def test_callbacks_take_turns_with_those_that_wait() -> None:
    turns = Turns()
    order: list[str] = []
    for name in "ab":
        turns.call_soon(lambda name=name: order.append(name))
    assert order == []
    await turns.wait()
    assert order == ["a", "b"]


async def test_a_connection_that_ends_while_it_waits_takes_no_turn() -> None:
    turns = Turns()
    await turns.wait()
    ended = asyncio.create_task(turns.wait())
    waiting = asyncio.create_task(turns.wait())
    await asyncio.sleep(0)
    ended.cancel()
    assert await waiting == FRAMES_PER_TURN


async def test_what_comes_first_does_not_wait_for_the_rest() -> None:
    turns = Turns()
    order: list[str] = []

    async def take(name: str) -> None:
        await turns.wait(first=name.isupper())
        order.append(name)

    await asyncio.gather(*map(take, "abCD"))
    assert "".join(order) == "aCDb", "the first one finds a turn that is free"
