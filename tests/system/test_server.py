"""The server on real sockets: streams, breaches of the protocol, cancelled requests and slow readers."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from quire.runtime.common.errors import ConfigError
from quire.runtime.common.server_config import ServerConfig
from quire.runtime.server import Server

Serve = Callable[..., Awaitable[Any]]
Eventually = Callable[[Callable[[], bool]], Awaitable[None]]

LONG = {"max_tokens": 1_000_000}


# One conversation


async def test_a_request_from_hello_to_done(serve: Serve) -> None:
    system = await serve(served_model_name="demo")
    client = await system.raw(hello=False)
    client.send("HELLO", [1, 9], None, [], 100_000)
    welcome = await client.receive()
    assert (welcome[:5], welcome[6:]) == (["WELCOME", 1, [], 100_000, "demo"], [])
    client.send("GENERATE", 7, "hi", {"max_tokens": 3}, 5000, -1, 9000)
    frames = await client.until("DONE")
    assert frames[:-1] == [
        ["ACCEPTED", 7, 1, 2, 3, 4.5],
        ["TOKENS", 7, 0, [0, 1], " hi:0é日"],
        ["TOKENS", 7, 2, [2], " hi:2é日"],
    ]
    assert frames[-1][:3] == ["DONE", 7, "length"]
    assert frames[-1][3]["completion_tokens"] == 3
    (request,) = system.engine.requests
    assert (request.prompt, request.deadline_ms, request.priority, request.pin_ms) == ("hi", 5000, -1, 9000)


async def test_ping_is_answered(system: Any) -> None:
    client = await system.raw()
    client.send("PING", 2**64 - 1)
    assert await client.receive() == ["PONG", 2**64 - 1]


async def test_the_id_of_an_ended_request_is_free(system: Any) -> None:
    client = await system.raw()
    for _ in range(20):
        client.send("GENERATE", 1, "again", {"max_tokens": 1})
        assert (await client.until("DONE", "ERROR"))[-1][0] == "DONE"


# Failures that end one request only


@pytest.mark.parametrize(
    ("prompt", "code", "message", "retry_after_ms"),
    [
        ("full", "RESOURCE_EXHAUSTED", "the queue is full", 250),
        ("fail", "INTERNAL", "the logits are NaN", None),
        ("crash", "INTERNAL", "an internal error ended this request; see the server's log", None),
        ("bug", "INTERNAL", "an internal error ended this request; see the server's log", None),
    ],
)
async def test_a_failing_request_ends_in_one_error(
    system: Any, prompt: str, code: str, message: str, retry_after_ms: int | None
) -> None:
    client = await system.raw()
    client.send("GENERATE", 1, prompt, {"max_tokens": 9})
    error = (await client.until("ERROR"))[-1]
    assert error == ["ERROR", 1, code, message, *([True, retry_after_ms] if retry_after_ms else [])]
    client.send("PING", 1)
    assert await client.receive() == ["PONG", 1]


async def test_a_generate_that_does_not_fit_the_schema_ends_only_its_request(system: Any) -> None:
    client = await system.raw()
    client.send("GENERATE", 5, "x", {"temprature": 1.0})
    error = await client.receive()
    assert error[:3] == ["ERROR", 5, "INVALID_ARGUMENT"]
    assert "temprature" in error[3]
    client.send("GENERATE", 5, "hi", {"max_tokens": 1})
    assert (await client.until("DONE"))[-1][1] == 5


@pytest.mark.parametrize("body", [["again"], ["again", {"temprature": 1}]], ids=["valid", "malformed"])
async def test_a_live_id_is_refused_and_its_request_goes_on(system: Any, body: list[object]) -> None:
    client = await system.raw()
    client.send("GENERATE", 3, "hold", LONG)
    await client.until("TOKENS")
    client.send("GENERATE", 3, *body)
    refusal = await client.receive()
    assert refusal[:3] == ["ERROR", 3, "ALREADY_EXISTS"]
    assert len(system.engine.live) == 1
    client.send("CANCEL", 3)
    assert (await client.receive())[:3] == ["DONE", 3, "cancelled"]


async def test_too_many_requests_on_one_connection_are_refused(serve: Serve) -> None:
    system = await serve(max_requests_per_connection=1)
    client = await system.raw()
    client.send("GENERATE", 1, "hold", LONG)
    await client.until("TOKENS")
    client.send("GENERATE", 2, "hi")
    assert (await client.receive())[:3] == ["ERROR", 2, "RESOURCE_EXHAUSTED"]


@pytest.mark.parametrize(
    "body",
    [
        ["hi", {}, None, 0, None, "tenant"],
        ["hi", {"tenant": "another"}],
        [{"prompt": "hi", "tenant": "another"}],
    ],
    ids=["one field more", "among the params", "a map"],
)
async def test_no_field_of_a_request_sets_its_tenant(system: Any, body: list[object]) -> None:
    """The tenant salts the prefix cache, so it comes from the connection only."""
    client = await system.raw()
    client.send("GENERATE", 1, *body)
    assert (await client.receive())[:3] == ["ERROR", 1, "INVALID_ARGUMENT"]
    client.send("GENERATE", 2, "hi", {"max_tokens": 1})
    await client.until("DONE")
    assert [request.tenant for request in system.engine.requests] == [""]


async def test_choices_end_one_by_one(system: Any) -> None:
    client = await system.raw()
    client.send("GENERATE", 1, "hi", {"max_tokens": 2, "n": 2})
    assert (await client.until("DONE"))[1:-1] == [
        ["TOKENS", 1, 0, [0, 1], " hi:0é日"],
        ["TOKENS", 1, 2, [], "", None, 0, "length"],
        ["TOKENS", 1, 0, [0, 1], "choice 1", None, 1, None, -1.5],
    ]


# Cancelling


async def test_cancel_ends_the_request_as_cancelled(system: Any) -> None:
    client = await system.raw()
    client.send("GENERATE", 1, "hold", LONG)
    await client.until("TOKENS")
    client.send("CANCEL", 1)
    assert (await client.receive())[:3] == ["DONE", 1, "cancelled"]
    client.send("CANCEL", 1)
    client.send("CANCEL", 99)
    client.send("PING", 4)
    assert await client.receive() == ["PONG", 4]


async def test_cancel_before_the_engine_has_accepted(system: Any, eventually: Eventually) -> None:
    system.engine.submitting.clear()
    client = await system.raw()
    client.send("GENERATE", 1, "hold", LONG)
    client.send("CANCEL", 1)
    client.send("PING", 1)
    assert await client.receive() == ["PONG", 1]
    system.engine.submitting.set()
    assert [frame[0] for frame in await client.until("DONE")] == ["ACCEPTED", "DONE"]


@pytest.mark.parametrize("prompt", ["hold", "endless"])
async def test_a_lost_connection_cancels_its_requests(system: Any, eventually: Eventually, prompt: str) -> None:
    client = await system.raw()
    for request_id in range(5):
        client.send("GENERATE", request_id, prompt, LONG)
    await eventually(lambda: len(system.engine.live) == 5)
    client.writer.transport.abort()
    await eventually(lambda: not system.engine.live)


# Breaches of the protocol close their connection only


def framed(payload: bytes) -> bytes:
    return len(payload).to_bytes(4, "big") + payload


BREACHES = {
    "oversized": (b"\xff\xff\xff\xff", "declares 4294967295 bytes"),
    "garbage": (framed(b"\xc1\xc1\xc1"), "not one msgpack value"),
    "truncated value": (framed(b"\x93\x01"), "not one msgpack value"),
    "nested": (framed(b"\x91" * 10_000), "within limits"),
    "unknown type": (framed(b"\x92\xa4FROB\x01"), "unknown frame type 'FROB'"),
    "second HELLO": (framed(b"\x92\xa5HELLO\x91\x01"), "HELLO came twice"),
    "unreadable id": (framed(b"\x92\xa8GENERATE\xa1x"), "GENERATE does not fit"),
}


@pytest.mark.parametrize(("data", "message"), BREACHES.values(), ids=BREACHES)
async def test_a_breach_is_answered_then_closed(system: Any, eventually: Eventually, data: bytes, message: str) -> None:
    client = await system.raw()
    client.send("GENERATE", 1, "hold", LONG)
    await client.until("TOKENS")
    client.writer.write(data)
    error = await client.receive()
    assert error[:3] == ["ERROR", None, "INVALID_ARGUMENT"]
    assert message in error[3]
    assert await client.receive() == []
    await eventually(lambda: not system.engine.live)


async def test_breaches_do_not_change_the_streams_of_other_connections(system: Any) -> None:
    """Compare the bytes of one stream, with and without hostile connections."""

    async def collect() -> list[list[Any]]:
        client = await system.raw()
        client.send("GENERATE", 1, "quiet", {"max_tokens": 200, "logprobs": 1})
        return await client.until("DONE")

    async def attack(data: bytes) -> None:
        client = await system.raw()
        client.send("GENERATE", 1, "noise", {"max_tokens": 50})
        client.writer.write(data)
        while await client.receive():
            pass

    alone = await collect()
    crowded = asyncio.create_task(collect())
    await asyncio.gather(*(attack(data) for data, _ in BREACHES.values()))
    assert await crowded == alone


async def test_frames_before_hello_have_the_smallest_limit(system: Any) -> None:
    client = await system.raw(hello=False)
    client.writer.write((65537).to_bytes(4, "big"))
    assert "limit is 65536" in (await client.receive())[3]


@pytest.mark.parametrize(
    ("first", "message"),
    [
        (["PING", 1], "first frame must be HELLO"),
        (["GENERATE", 1, "x", {"bad": 1}], "first frame must be HELLO"),
        (["HELLO", [2, 3]], "speaks protocol version 1"),
        (["HELLO"], "HELLO does not fit"),
    ],
)
async def test_the_first_frame_must_be_a_hello_of_a_known_version(system: Any, first: list[Any], message: str) -> None:
    client = await system.raw(hello=False)
    client.send(*first)
    error = await client.receive()
    assert error[:3] == ["ERROR", None, "INVALID_ARGUMENT"]
    assert message in error[3]
    assert await client.receive() == []


async def test_a_connection_without_hello_ends_after_the_timeout(serve: Serve) -> None:
    client = await (await serve(handshake_timeout_ms=20)).raw(hello=False)
    client.writer.write(b"\x00\x00")
    assert "no HELLO within 20 ms" in (await client.receive())[3]
    assert await client.receive() == []


async def test_connections_beyond_the_limit_are_refused(serve: Serve, eventually: Eventually) -> None:
    system = await serve(max_connections=1)
    first = await system.raw()
    second = await system.raw(hello=False)
    second.send("HELLO", [1])
    assert (await second.receive())[:3] == ["ERROR", None, "RESOURCE_EXHAUSTED"]
    first.send("PING", 1)
    assert await first.receive() == ["PONG", 1]


# Slow readers


async def stuck_reader(system: Any) -> Any:
    client = await system.raw(limit=1024)
    client.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.reader._transport.pause_reading()
    return client


@pytest.mark.parametrize(
    "limits",
    [
        {"max_outgoing_bytes": 200_000, "max_frame_bytes": 64 << 10},
        {"write_timeout_ms": 500, "max_outgoing_bytes": 1 << 30},
    ],
    ids=["by bytes", "by time"],
)
async def test_a_slow_reader_loses_its_connection_only(
    serve: Serve, eventually: Eventually, limits: dict[str, int]
) -> None:
    system = await serve(**limits)
    system.engine.text_bytes = 20_000
    stuck = await stuck_reader(system)
    stuck.send("GENERATE", 1, "flood", {"max_tokens": 4000})
    await eventually(lambda: bool(system.engine.live))
    healthy = await system.raw()
    healthy.send("GENERATE", 1, "hi", {"max_tokens": 20})
    assert len(await healthy.until("DONE")) == 12
    stuck.send("GENERATE", 2, "hold", LONG)
    await eventually(lambda: not system.engine.live)
    healthy.send("PING", 1)
    assert await healthy.receive() == ["PONG", 1]


async def test_closing_does_not_wait_for_a_client_that_never_reads(
    serve: Serve, eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.runtime.server.server.CLOSE_TIMEOUT_S", 3600.0)
    system = await serve(max_outgoing_bytes=1 << 30)
    system.engine.text_bytes = 1_000_000
    stuck = await stuck_reader(system)
    stuck.send("GENERATE", 1, "flood", {"max_tokens": 64})
    await eventually(lambda: any(connection.unsent_bytes for connection in system.server._connections))
    async with asyncio.timeout(60):
        await system.server.close()
    assert system.server.num_connections == 0


# Authentication and addresses


@pytest.mark.parametrize(
    ("hello", "message"),
    [(["HELLO", [1]], "a valid token is required"), (["HELLO", [1], "wrong é"], "the token is not valid")],
)
async def test_a_token_is_required_when_set(serve: Serve, hello: list[Any], message: str) -> None:
    system = await serve(token="secret é")
    client = await system.raw(hello=False)
    client.send(*hello)
    assert await client.receive() == ["ERROR", None, "UNAUTHENTICATED", message]
    assert await client.receive() == []
    allowed = await system.raw(hello=False)
    allowed.send("HELLO", [1], "secret é")
    assert (await allowed.receive())[0] == "WELCOME"


async def test_an_address_off_loopback_requires_a_token() -> None:
    from_outside = ServerConfig(host="0.0.0.0", port=0, operator_port=0, openai_port=0)
    with pytest.raises(ConfigError, match="requires `token`"):
        await Server().start(None, from_outside)  # type: ignore[arg-type]


async def test_an_address_off_loopback_is_allowed_with_a_token(serve: Serve) -> None:
    assert (await serve(host="0.0.0.0", token="x")).address.startswith("0.0.0.0:")


@pytest.mark.parametrize("settings", [{"host": "no such host"}, {"host": "192.0.2.1", "token": "x"}])
async def test_an_address_that_cannot_be_used_is_a_config_error(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        await Server().start(None, ServerConfig(port=0, operator_port=0, openai_port=0, **settings))  # type: ignore[arg-type]


async def test_a_taken_port_is_a_config_error(system: Any) -> None:
    port = int(system.address.rpartition(":")[2])
    with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}"):
        await Server().start(system.engine, ServerConfig(port=port, operator_port=0, openai_port=0))


# Unix sockets


async def test_a_unix_socket_is_private_and_removed(serve: Serve, socket_path: Path) -> None:
    system = await serve(uds=str(socket_path))
    assert system.address == f"unix:{socket_path}"
    assert stat.S_IMODE(os.lstat(socket_path).st_mode) == 0o600
    client = await system.raw()
    client.send("GENERATE", 1, "hi", {"max_tokens": 1})
    assert (await client.until("DONE"))[-1][1] == 1
    client.writer.close()
    await system.server.close()
    with pytest.raises(FileNotFoundError):
        os.lstat(socket_path)


async def test_a_stale_socket_file_is_replaced(serve: Serve, socket_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(socket_path))
    system = await serve(uds=str(socket_path))
    await system.raw()


async def test_a_socket_in_use_is_left_alone(serve: Serve, socket_path: Path) -> None:
    first = await serve(uds=str(socket_path))
    with pytest.raises(ConfigError, match="another server is listening"):
        await Server().start(first.engine, ServerConfig(uds=str(socket_path), operator_port=0, openai_port=0))
    await first.raw()


def test_a_file_that_is_no_socket_is_left_alone(socket_path: Path) -> None:
    socket_path.write_text("precious")
    with pytest.raises(ConfigError, match="is not a socket"):
        asyncio.run(Server().start(None, ServerConfig(uds=str(socket_path), operator_port=0, openai_port=0)))  # type: ignore[arg-type]
    assert socket_path.read_text() == "precious"


async def test_a_path_too_long_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot listen on unix socket"):
        await Server().start(None, ServerConfig(uds=str(tmp_path / ("x" * 200)), operator_port=0, openai_port=0))  # type: ignore[arg-type]


# Closing the server


async def test_closing_the_server_ends_every_connection(system: Any) -> None:
    client = await system.raw()
    client.send("GENERATE", 1, "hold", LONG)
    await client.until("TOKENS")
    closing = asyncio.create_task(system.server.close())
    leaving = ["UNAVAILABLE", "the server is shutting down", True]
    assert await client.receive() == ["ERROR", 1, *leaving]
    assert await client.receive() == ["ERROR", None, *leaving]
    assert await client.receive() == []
    client.writer.close()
    await closing
    await system.server.close()
