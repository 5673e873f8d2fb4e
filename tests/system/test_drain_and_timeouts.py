"""A draining server, and the ends of connections that are idle, silent, slow with a frame or too many."""

from __future__ import annotations

import asyncio
import struct
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from quire.runtime.client import AsyncClient
from quire.runtime.common.errors import Unavailable
from quire.runtime.common.types import SamplingParams
from structlog.testing import capture_logs

from tests.support.http_client import connection

Serve = Callable[..., Awaitable[Any]]
Eventually = Callable[[Callable[[], bool]], Awaitable[None]]

LONG = {"max_tokens": 1_000_000}
HEARTBEAT = ["heartbeat"]


async def greet(system: Any, features: list[str], session: str | None = None) -> tuple[Any, list[Any]]:
    client = await system.raw(hello=False)
    client.send("HELLO", [1], None, features, 1 << 20, session)
    return client, await client.receive()


# Draining


async def test_a_draining_server_refuses_new_requests_and_finishes_live_ones(system: Any) -> None:
    client, _ = await greet(system, [])
    client.send("GENERATE", 4, "hold", LONG)
    await client.until("TOKENS")
    draining = asyncio.create_task(system.server.drain(30))
    goaway = await client.receive()
    assert goaway[:2] == ["GOAWAY", 4]
    assert 0 < goaway[2] <= 30_000
    client.send("GENERATE", 5, "hi")
    refusal = await client.receive()
    assert (refusal[:3], refusal[4]) == (["ERROR", 5, "UNAVAILABLE"], True)
    assert 'quire_admission_rejections_total{reason="unavailable"} 1.0' in system.metrics()
    assert not draining.done()
    client.send("CANCEL", 4)
    assert (await client.receive())[:3] == ["DONE", 4, "cancelled"]
    await draining
    client.send("PING", 1)
    assert await client.receive() == ["PONG", 1], "connections stay until close"


async def test_requests_that_outlast_the_drain_end_in_a_retryable_error(system: Any, eventually: Eventually) -> None:
    client, welcome = await greet(system, [])
    client.send("GENERATE", 1, "hold", LONG)
    client.send("GENERATE", 2, "hold", LONG, None, 0, None, None, None, None, True)
    client.send("GENERATE", 3, "endless", LONG, None, 0, None, None, 0)
    system.engine.submitting.clear()
    client.send("GENERATE", 4, "hi")
    await eventually(lambda: len(system.engine.requests) == 4)
    await system.server.drain(0.02)
    errors: dict[int, list[Any]] = {}
    while len(errors) < 4:
        frame = await client.receive()
        if frame[0] == "ERROR":
            errors[frame[1]] = frame[2:]
    wanted = ["UNAVAILABLE", "the server shut down before this request ended; try again", True]
    assert errors == dict.fromkeys((1, 2, 3, 4), wanted)
    await eventually(lambda: not system.engine.live and not system.server.live_requests())
    assert 'quire_cancelled_total{cause="shutdown"} 4.0' in system.metrics()
    again, _ = await greet(system, [], welcome[5])
    again.send("RESUME", 2, 0)
    assert (await again.until("ERROR"))[-1][2] in ("UNAVAILABLE", "NOT_FOUND")


async def test_the_log_says_what_a_drain_did_not_wait_for(system: Any, eventually: Eventually) -> None:
    first, _ = await greet(system, [])
    first.send("GENERATE", 1, "hold", LONG)
    first.send("GENERATE", 2, "hold", LONG, None, 0, None, None, None, None, True)
    second, _ = await greet(system, [])
    second.send("GENERATE", 1, "hi", {"max_tokens": 4}, None, 0, None, None, 2, None, True)
    await second.until("TOKENS")
    second.writer.transport.abort()
    await eventually(lambda: system.server.num_connections == 1 and len(system.server.live_requests()) == 2)
    with capture_logs() as logs:
        await system.server.drain(0.02)
    cut = {"requests_of_connections": 2, "resumable_or_stored_requests": 1, "clients_that_may_resume": 1}
    wanted = {"event": "the drain was cut", "log_level": "warning", "timeout_s": 0.02, **cut}
    assert next(line for line in logs if line["event"] != "draining") == wanted


async def test_a_lost_connection_may_resume_while_draining(system: Any, eventually: Eventually) -> None:
    client, welcome = await greet(system, [])
    client.send("GENERATE", 1, "hold", LONG, None, 0, None, None, None, None, True)
    await client.until("TOKENS")
    draining = asyncio.create_task(system.server.drain(30))
    await client.receive()
    client.writer.transport.abort()
    await eventually(lambda: system.server.num_connections == 0)
    again, _ = await greet(system, [], welcome[5])
    assert (await again.receive())[0] == "GOAWAY"
    again.send("RESUME", 1, 2)
    assert (await again.receive())[0] == "ACCEPTED"
    assert not draining.done()
    again.send("CANCEL", 1)
    await again.until("DONE")
    await draining


async def test_draining_waits_for_a_lost_client_that_may_resume(system: Any, eventually: Eventually) -> None:
    """The stream ends while its client is disconnected."""
    client, welcome = await greet(system, [])
    client.send("GENERATE", 1, "hi", {"max_tokens": 4}, None, 0, None, None, 2, None, True)
    await client.until("TOKENS")
    client.writer.transport.abort()
    await eventually(lambda: system.server.num_connections == 0 and not system.server.live_requests())
    draining = asyncio.create_task(system.server.drain(30))
    again, _ = await greet(system, [], welcome[5])
    assert (await again.receive())[0] == "GOAWAY"
    assert not draining.done()
    again.send("RESUME", 1, 2)
    assert [frame[0] for frame in await again.until("DONE")] == ["ACCEPTED", "TOKENS", "DONE"]
    await draining


async def test_draining_waits_until_every_frame_is_sent(serve: Serve, eventually: Eventually) -> None:
    """The frames exceed the socket's buffers, and the client reads nothing until the request has ended."""
    system = await serve(max_outgoing_bytes=64 << 20)
    system.engine.text_bytes = 1_000_000
    client, _ = await greet(system, [])
    client.send("GENERATE", 1, "hi", {"max_tokens": 32})
    await eventually(lambda: any(connection.unsent_bytes for connection in system.server._connections))
    draining = asyncio.create_task(system.server.drain(30))
    await asyncio.sleep(0)
    await system.raw()
    assert not draining.done()
    frames = await client.until("DONE")
    assert sum(len(frame[4]) for frame in frames if frame[0] == "TOKENS") == 16_000_000
    await draining


async def test_draining_does_not_wait_for_a_client_that_received_the_end(system: Any) -> None:
    client, _ = await greet(system, [])
    client.send("GENERATE", 1, "hi", {"max_tokens": 4}, None, 0, None, None, None, None, True)
    await client.until("DONE")
    client.writer.transport.abort()
    async with asyncio.timeout(60):
        await system.server.drain(600)


async def test_a_draining_server_is_not_ready(system: Any) -> None:
    await system.server.drain(0)

    def status() -> int:
        with (
            pytest.raises(urllib.error.HTTPError) as refusal,
            urllib.request.urlopen(f"http://{system.server.operator_address}/readyz"),
        ):
            pass
        refusal.value.close()
        return refusal.value.code

    assert await asyncio.to_thread(status) == 503


async def test_an_http_connection_ends_with_its_answer_while_draining(system: Any) -> None:
    async with connection(system) as client:
        assert (await client.ask("GET", "/version")).status == 200
        await system.server.drain(0)
        assert (await client.ask("GET", "/version")).headers["connection"] == "close"
        assert await client.is_closed()


async def test_a_client_opens_another_connection_after_goaway(system: Any) -> None:
    """The other connection reaches the same server, which refuses. The running stream continues."""
    async with AsyncClient(system.address) as client:
        running = client.generate("hi", SamplingParams(max_tokens=4))
        first = await anext(running)
        draining = asyncio.create_task(system.server.drain(30))
        await client.ping()
        with pytest.raises(Unavailable, match="shutting down"):
            await client.complete("ho")
        rest = [chunk async for chunk in running]
        assert first.token_ids + tuple(token for chunk in rest for token in chunk.token_ids) == (0, 1, 2, 3)
        await draining


# Timeouts


async def test_an_idle_connection_is_closed(serve: Serve) -> None:
    system = await serve(idle_timeout_ms=50)
    client, _ = await greet(system, [])
    assert await client.receive() == [
        *["ERROR", None, "UNAVAILABLE", "this connection was idle for 50 ms; open another one", True]
    ]
    assert await client.receive() == []


async def test_a_frame_that_takes_too_long_ends_the_connection(serve: Serve, eventually: Eventually) -> None:
    """Bytes keep coming, but too slowly."""
    system = await serve(frame_timeout_ms=60)
    client, _ = await greet(system, [])
    client.send("GENERATE", 1, "hold", LONG)
    await client.until("TOKENS")
    client.writer.write(struct.pack(">I", 1000))
    ticks = asyncio.create_task(drip(client))
    error = await client.receive()
    assert error[:3] == ["ERROR", None, "INVALID_ARGUMENT"]
    assert "complete within 60 ms" in error[3]
    await eventually(lambda: not system.engine.live)
    ticks.cancel()


async def drip(client: Any) -> None:
    while True:
        client.writer.write(b"x")
        await asyncio.sleep(0.01)


async def test_a_connection_that_does_not_answer_pings_is_closed(serve: Serve, eventually: Eventually) -> None:
    system = await serve(heartbeat_ms=20)
    client, welcome = await greet(system, HEARTBEAT)
    assert (welcome[2], welcome[6]) == (["heartbeat"], 20)
    client.send("GENERATE", 1, "hold", LONG)
    frames = await client.until("ERROR")
    assert [frame[0] for frame in frames].count("PING") >= 2
    assert frames[-1][1:4] == [None, "UNAVAILABLE", "the client sent nothing for 60 ms, not even PONG"]
    assert await client.receive() == []
    await eventually(lambda: not system.engine.live)


async def test_a_connection_that_answers_pings_stays_open(serve: Serve) -> None:
    system = await serve(heartbeat_ms=20)
    client, _ = await greet(system, HEARTBEAT)
    for _ in range(10):
        assert await client.receive() == ["PING", 1]
        client.send("PONG", 1)


async def test_the_client_answers_pings_while_it_waits(serve: Serve) -> None:
    system = await serve(heartbeat_ms=20)
    async with AsyncClient(system.address) as client:
        running = client.generate("hold", SamplingParams(max_tokens=9))
        await anext(running)
        await asyncio.sleep(0.15)
        assert system.server.num_connections == 1
        await client.ping()
        await running.aclose()


# Too many connections


async def test_connections_far_beyond_the_limit_are_closed_without_an_error(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.runtime.server.server.MAX_REFUSALS", 1)
    system = await serve(max_connections=1)
    first = await system.raw()
    second = await system.raw(hello=False)
    third = await system.raw(hello=False)
    assert await third.receive() == []
    assert (await second.receive())[:3] == ["ERROR", None, "RESOURCE_EXHAUSTED"]
    first.send("PING", 1)
    assert await first.receive() == ["PONG", 1]
