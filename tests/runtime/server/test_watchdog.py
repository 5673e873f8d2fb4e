"""The watchdog on a clock of its own: what is due when, and that a process which slept blames nobody."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from quire.runtime.common.config import ServerConfig
from quire.runtime.server.watchdog import Watchdog


class Loop(asyncio.SelectorEventLoop):
    """Its time is what the test says."""

    now = 1000.0

    def time(self) -> float:
        return self.now


class Scene:
    def __init__(self, loop: Loop, **settings: Any) -> None:
        self.loop = loop
        self.pings: list[float] = []
        self.bites: list[str] = []
        self.idle_since: float | None = loop.now
        heartbeat = settings.pop("heartbeat", False)
        self.dog = Watchdog(
            ServerConfig(**settings),
            heartbeat=heartbeat,
            idle_since=lambda: self.idle_since,
            ping=lambda: self.pings.append(loop.now - 1000),
            on_timeout=lambda reason: self.bites.append(f"{loop.now - 1000:g}: {reason}"),
        )

    async def advance(self, seconds: float, tick: float = 0.5) -> None:
        end = self.loop.now + seconds
        while self.loop.now < end:
            self.loop.now += tick
            for _ in range(2):
                await asyncio.sleep(0)


@pytest.fixture
def scene() -> Callable[..., None]:
    def play(script: Callable[[Scene], Any], **settings: Any) -> None:
        async def run() -> None:
            loop = asyncio.get_running_loop()
            assert isinstance(loop, Loop)
            scene = Scene(loop, **settings)
            await script(scene)
            scene.dog.stop()

        with asyncio.Runner(loop_factory=Loop) as runner:
            runner.run(run())

    return play


def test_heartbeats_are_asked_for_twice(scene: Callable[..., None]) -> None:
    async def silence(scene: Scene) -> None:
        await scene.advance(60)
        assert scene.pings == [10, 20]
        assert scene.bites == ["30: the client sent nothing for 30000 ms, not even PONG"]

    scene(silence, heartbeat=True, heartbeat_ms=10_000)


def test_whatever_comes_is_a_sign_of_life(scene: Callable[..., None]) -> None:
    async def answers(scene: Scene) -> None:
        for _ in range(10):
            await scene.advance(12)
            scene.dog.received(1, inside_frame=False)
        assert scene.pings == [10, 22, 34, 46, 58, 70, 82, 94, 106, 118]
        assert scene.bites == []

    scene(answers, heartbeat=True, heartbeat_ms=10_000)


def test_who_slept_asks_first(scene: Callable[..., None]) -> None:
    """The whole process stood still for a minute: the peer's answers may be waiting to be read."""

    async def sleeps(scene: Scene) -> None:
        await scene.advance(60, tick=60)
        assert (scene.pings, scene.bites) == ([60], [])

    scene(sleeps, heartbeat=True, heartbeat_ms=10_000)


def test_idleness_begins_with_the_end_of_the_last_request(scene: Callable[..., None]) -> None:
    async def works(scene: Scene) -> None:
        scene.idle_since = None
        await scene.advance(95)
        scene.idle_since = scene.loop.now
        await scene.advance(29)
        assert scene.bites == []
        await scene.advance(2)
        assert scene.bites == ["125: this connection was idle for 30000 ms; open another one"]

    scene(works, idle_timeout_ms=30_000)


def test_a_frame_has_its_time_from_its_own_first_byte(scene: Callable[..., None]) -> None:
    async def frames(scene: Scene) -> None:
        scene.dog.received(0, inside_frame=True)
        await scene.advance(8)
        scene.dog.received(1, inside_frame=True)
        await scene.advance(8)
        scene.dog.received(0, inside_frame=True)
        assert scene.bites == []
        await scene.advance(4)
        assert scene.bites == ["18: a frame must be complete within 10000 ms of its first byte"]

    scene(frames, frame_timeout_ms=10_000)


def test_stopped_it_does_nothing(scene: Callable[..., None]) -> None:
    async def stopped(scene: Scene) -> None:
        scene.dog.received(0, inside_frame=True)
        scene.dog.stop()
        await scene.advance(1000, tick=100)
        assert (scene.pings, scene.bites) == ([], [])

    scene(stopped, heartbeat=True)
