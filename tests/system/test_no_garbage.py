"""Ended objects of the server are freed at once: a garbage collection stalls every stream for as long as it takes."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import ssl
import struct
import types
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import uvloop
from quire.runtime.common.config import EngineConfig
from quire.runtime.common.server_config import ServerConfig
from quire.runtime.engine import Engine, LocalEngine
from quire.runtime.server import Server

from .conftest import RawClient, raw_client

TLS = Path(__file__).resolve().parents[1] / "data" / "tls"
SETTINGS = {
    "port": 0,
    "operator_port": 0,
    "openai_port": 0,
    "tls_cert": str(TLS / "cert.pem"),
    "tls_key": str(TLS / "key.pem"),
    "credit_timeout_ms": 50,
    "resume_timeout_ms": 50,
    "idempotency_window_ms": 50,
}
RUNTIME = str(Path(__file__).resolve().parents[2] / "runtime")
PROMPT = "This module provides"


@dataclass
class Site:
    """A real server with TLS on a real engine."""

    server: Server
    engine: LocalEngine
    trust: ssl.SSLContext

    def __post_init__(self) -> None:
        self.num_tasks = len(asyncio.all_tasks())

    async def client(self) -> RawClient:
        return await raw_client(self.server.address, ssl=self.trust)

    async def plain(self, address: str) -> RawClient:
        """Return a connection that sends nothing yet, without TLS."""
        return await raw_client(address, hello=False)

    async def idle(self) -> None:
        """Wait until no request, connection or task of one is left, and nothing is kept."""
        assert self.server._context is not None
        replays = self.server._context.replays
        async with asyncio.timeout(60):
            while replays.logs or self.server.num_connections or len(asyncio.all_tasks()) > self.num_tasks:
                await asyncio.sleep(0.002)


def generate(
    client: RawClient,
    request_id: int,
    prompt: str = PROMPT,
    *,
    credit: int | None = None,
    key: str | None = None,
    resumable: bool = False,
    **params: object,
) -> None:
    client.send("GENERATE", request_id, prompt, params, None, 0, None, None, credit, key, resumable)


async def ended_requests(site: Site) -> None:
    client = await site.client()
    for params in ({}, {"n": 2, "logprobs": 2}, {"best_of": 3, "n": 2}, {"beam_width": 2}, {"stop": ["e"]}):
        generate(client, 1, max_tokens=8, **params)
        assert (await client.until("DONE", "ERROR"))[-1][0] == "DONE"
    client.writer.close()


async def refused_requests(site: Site) -> None:
    client = await site.client()
    for key in (None, "a key"):
        for prompt, params in (("", {}), (PROMPT, {"n": 10**6}), ("x " * 10_000, {}), (PROMPT, {"max_tokens": 10**6})):
            generate(client, 1, prompt, key=key, **params)
            assert (await client.receive())[0] == "ERROR"
    client.send("TOKENIZE", 1, "x" * 10**5)
    assert (await client.receive())[0] in ("ERROR", "TOKENIZED")
    client.writer.close()


async def cancelled_requests(site: Site) -> None:
    client = await site.client()
    for kept in (False, True):
        generate(client, 1, resumable=kept, max_tokens=500, ignore_eos=True)
        await client.until("TOKENS")
        client.send("CANCEL", 1)
        await client.until("DONE")
    client.writer.close()


async def lost_connections(site: Site) -> None:
    """One connection is closed, the other one is reset."""
    for option in (struct.pack("ii", 0, 0), struct.pack("ii", 1, 0)):
        client = await site.client()
        generate(client, 1, max_tokens=500, ignore_eos=True)
        await client.until("TOKENS")
        client.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, option)
        client.writer.transport.abort()


async def slow_readers(site: Site) -> None:
    client = await site.client()
    for kept in (False, True):
        generate(client, 1, credit=1, resumable=kept, max_tokens=8, ignore_eos=True)
        assert (await client.until("ERROR"))[-1][2] == "DEADLINE_EXCEEDED"
    client.writer.close()


async def kept_streams(site: Site) -> None:
    """One is resumed, one is answered by an earlier one, and one expires while it runs."""
    client = await raw_client(site.server.address, False, ssl=site.trust)
    client.send("HELLO", [1])
    session = (await client.receive())[5]
    for request_id in (1, 2):
        generate(client, request_id, resumable=True, key="a key", max_tokens=8, ignore_eos=True)
        await client.until("DONE")
    generate(client, 3, resumable=True, max_tokens=500, ignore_eos=True)
    await client.until("TOKENS")
    client.writer.transport.abort()
    again = await raw_client(site.server.address, False, ssl=site.trust)
    again.send("HELLO", [1], None, [], 4 << 20, session)
    again.send("RESUME", 3, 0)
    again.send("RESUME", 1, 0)
    await again.until("DONE")
    again.writer.transport.abort()


async def breaches(site: Site) -> None:
    for hello in (True, False):
        client = await raw_client(site.server.address, hello, ssl=site.trust)
        client.send("FROB")
        assert (await client.receive())[0] == "ERROR"
        client.writer.close()


async def failed_handshakes(site: Site) -> None:
    """End one connection in silence, send bytes that are not TLS, and reset one."""
    for sent, option in ((b"", 0), (b"GET / HTTP/1.1\r\n\r\n", 0), (b"\x16\x03\x01", 1)):
        client = await site.plain(site.server.address)
        client.writer.write(sent)
        client.writer.get_extra_info("socket").setsockopt(
            socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", option, 0)
        )
        if b"GET" in sent:
            await client.reader.read()
        client.writer.close()


async def operator_requests(site: Site) -> None:
    for sent in (b"GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n" * 2, b"\x00\r\n\r\n", b"GET /readyz HT"):
        client = await site.plain(site.server.operator_address)
        client.writer.write(sent)
        if not sent.endswith(b"HT"):
            assert (await client.reader.read(5)) == b"HTTP/"
        client.writer.close()


async def http_calls(site: Site) -> None:
    """Make calls that end, are streamed, are refused, are not HTTP, whose client leaves, and which have no route."""
    for fields, expected in (
        ('"max_tokens": 3', b"HTTP/1.1 200"),
        ('"max_tokens": 3, "n": 2, "logprobs": 2, "stream": true', b"HTTP/1.1 200"),
        ('"max_tokens": -1', b"HTTP/1.1 400"),
        ("x", b"HTTP/1.1 400"),
        ('"max_tokens": 500, "ignore_eos": true, "stream": true', b"HTTP/1.1 200"),
        ("", b"HTTP/1.1 400"),
    ):
        client = await raw_client(site.server.openai_address, False, ssl=site.trust)
        body = f'{{"prompt": "{PROMPT}", {fields}}}'.encode()
        kind = b"content-type: application/json\r\n"
        head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n%bcontent-length: %d\r\n\r\n" % (kind, len(body))
        client.writer.write(head + body if fields else b"\x00\r\n\r\n")
        answer = await client.reader.read(500)
        assert answer.startswith(expected), answer
        client.writer.transport.abort()
    client = await raw_client(site.server.openai_address, False, ssl=site.trust)
    client.writer.write(b"GET /no/such/path HTTP/1.1\r\nhost: localhost\r\n\r\n")
    assert (await client.reader.read(500)).startswith(b"HTTP/1.1 404")
    client.writer.transport.abort()


SCENES = (
    ended_requests,
    refused_requests,
    cancelled_requests,
    lost_connections,
    slow_readers,
    kept_streams,
    breaches,
    failed_handshakes,
    operator_requests,
    http_calls,
)


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.__name__)
def test_nothing_waits_for_the_garbage_collector(scene: Callable[[Site], Awaitable[None]]) -> None:
    uvloop.run(_play(scene))


async def _play(scene: Callable[[Site], Awaitable[None]]) -> None:
    engine = await Engine.start(EngineConfig(kv_cache_memory=8 << 20))
    server = Server()
    try:
        await server.start(engine, ServerConfig(**SETTINGS))  # type: ignore[arg-type]
        site = Site(server, engine, ssl.create_default_context(cafile=TLS / "cert.pem"))
        await scene(site)  # fills caches
        await site.idle()
        with _collecting() as found:
            for _ in range(3):
                await scene(site)
                await site.idle()
        assert found == []
    finally:
        await server.close()
        await engine.close()


@contextlib.contextmanager
def _collecting() -> Iterator[list[str]]:
    """Collect the garbage of the context; afterwards the list describes the server's objects in it."""
    found: list[str] = []
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        yield found
        gc.collect()
        found += sorted(filter(None, map(_description, gc.garbage)))
    finally:
        gc.set_debug(0)
        gc.enable()
        gc.garbage.clear()


def _description(value: object) -> str | None:
    """Describe an object of the server; return None for other objects."""
    if isinstance(value, types.FrameType):
        return f"frame {value.f_code.co_qualname}" if value.f_code.co_filename.startswith(RUNTIME) else None
    name = type(value).__module__
    if isinstance(value, types.FunctionType):
        name = value.__module__
    if name.startswith("quire."):
        return f"{type(value).__name__} {getattr(value, '__qualname__', '')}".strip()
    return None
