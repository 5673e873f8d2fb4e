"""The watchdog on a clock that the test moves: when it pings and when it ends a connection."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from quire.runtime.common.server_config import ServerConfig
from quire.runtime.server.msgpack.watchdog import Watchdog

from tests.support.server import FakeClock


class Watched:
    """A watchdog, and its actions with their times, in seconds from its start."""

    def __init__(self, clock: FakeClock, heartbeat: bool, **settings: Any) -> None:
        self.clock = clock
        self.started = clock.now
        self.pings: list[float] = []
        self.ends: list[str] = []
        self.idle_since: float | None = clock.now
        self.watchdog = Watchdog(
            ServerConfig(**settings),
            heartbeat=heartbeat,
            idle_since=lambda: self.idle_since,
            ping=lambda: self.pings.append(self.now),
            on_timeout=lambda reason: self.ends.append(f"{self.now:g}: {reason}"),
        )

    @property
    def now(self) -> float:
        return round(self.clock.now - self.started, 6)

    async def advance(self, seconds: float, step: float = 0.5) -> None:
        await self.clock.advance(seconds, step)


Watch = Callable[..., Watched]


@pytest.fixture
async def watch(clock: FakeClock) -> AsyncIterator[Watch]:
    watched: list[Watched] = []

    def start(heartbeat: bool = False, **settings: Any) -> Watched:
        watched.append(Watched(clock, heartbeat, **settings))
        return watched[-1]

    yield start
    for each in watched:
        each.watchdog.stop()


async def test_two_pings_before_a_silent_connection_ends(watch: Watch) -> None:
    watched = watch(heartbeat=True, heartbeat_ms=10_000)
    await watched.advance(60)
    assert watched.pings == [10, 20]
    assert watched.ends == ["30: the client sent nothing for 30000 ms, not even PONG"]


async def test_any_frame_ends_the_silence(watch: Watch) -> None:
    watched = watch(heartbeat=True, heartbeat_ms=10_000)
    for _ in range(10):
        await watched.advance(12)
        watched.watchdog.received(1, inside_frame=False)
    assert watched.pings == [10, 22, 34, 46, 58, 70, 82, 94, 106, 118]
    assert watched.ends == []


async def test_after_a_pause_of_the_process_the_client_is_pinged_first(watch: Watch) -> None:
    """The process was suspended for a minute: the client's answers may wait to be read."""
    watched = watch(heartbeat=True, heartbeat_ms=10_000)
    await watched.advance(60, step=60)
    assert (watched.pings, watched.ends) == ([60], [])


async def test_the_idle_time_begins_with_the_end_of_the_last_request(watch: Watch) -> None:
    watched = watch(idle_timeout_ms=30_000)
    watched.idle_since = None
    await watched.advance(95)
    watched.idle_since = watched.clock.now
    await watched.advance(29)
    assert watched.ends == []
    await watched.advance(2)
    assert watched.ends == ["125: this connection was idle for 30000 ms; open another one"]


async def test_the_time_of_a_frame_begins_with_its_own_first_byte(watch: Watch) -> None:
    watched = watch(frame_timeout_ms=10_000)
    watched.watchdog.received(0, inside_frame=True)
    await watched.advance(8)
    watched.watchdog.received(1, inside_frame=True)
    await watched.advance(8)
    watched.watchdog.received(0, inside_frame=True)
    assert watched.ends == []
    await watched.advance(4)
    assert watched.ends == ["18: a frame must be complete within 10000 ms of its first byte"]


async def test_a_stopped_watchdog_does_nothing(watch: Watch) -> None:
    watched = watch(heartbeat=True)
    watched.watchdog.received(0, inside_frame=True)
    watched.watchdog.stop()
    await watched.advance(1000, step=100)
    assert (watched.pings, watched.ends) == ([], [])
