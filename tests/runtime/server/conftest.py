"""The server over fakes, closed after each test with nothing left."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest

from tests.support.server import FakeClock, FakeServer


@pytest.fixture
async def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    """Stop the event loop's time; the test moves it."""
    loop = asyncio.get_running_loop()
    clock = FakeClock(loop)
    monkeypatch.setattr(loop, "time", clock)
    return clock


@pytest.fixture
async def serve(clock: FakeClock, logs: object) -> AsyncIterator[Callable[..., FakeServer]]:
    """Make a server in memory with `serve(resume_timeout_ms=30)`. Afterwards no request is live and no task runs."""
    servers: list[FakeServer] = []

    def make(**settings: object) -> FakeServer:
        servers.append(FakeServer(**settings))
        return servers[-1]

    before = asyncio.all_tasks()
    yield make
    for server in servers:
        await server.close()
        assert len(server.requests) == 0, "a closed server left requests live"
    assert asyncio.all_tasks() <= before | {asyncio.current_task()}, "a closed server left tasks running"


@pytest.fixture
def server(serve: Callable[..., FakeServer]) -> FakeServer:
    return serve()
