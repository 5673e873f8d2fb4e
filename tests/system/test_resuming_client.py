"""Resumable streams of the client: after a lost connection they continue without losing or repeating a token."""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import pytest
from quire.runtime.client import AsyncClient
from quire.runtime.common.errors import GenerationFailed, RequestNotFound, Unavailable
from quire.runtime.common.types import OutputChunk, SamplingParams, Usage, join_chunks
from quire.runtime.protocol.codec import encode
from quire.runtime.protocol.frames import Accepted, Done, Welcome

Serve = Callable[..., Awaitable[Any]]
Serving = Callable[..., AbstractAsyncContextManager[Any]]
Eventually = Callable[[Callable[[], bool]], Awaitable[None]]

ENDLESS = SamplingParams(max_tokens=1_000_000)


class Wire:
    """A TCP relay that can be cut."""

    def __init__(self, host: str, port: int) -> None:
        self.target = host, port
        self.address = ""
        self.num_connections = 0
        self.is_down = False  # new connections are closed at once
        self.cut_after = -1  # bytes from the server per connection; negative: never
        self._writers: list[asyncio.StreamWriter] = []
        self._relays: set[asyncio.Task[None]] = set()

    async def connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        self._writers.append(writer)
        if self.is_down:
            writer.transport.abort()
            return
        server_reader, server_writer = await asyncio.open_connection(*self.target)
        self._writers.append(server_writer)
        for source, sink, limit in ((reader, server_writer, -1), (server_reader, writer, self.cut_after)):
            relay = asyncio.create_task(self._relay(source, sink, limit))
            self._relays.add(relay)
            relay.add_done_callback(self._relays.discard)

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, limit: int) -> None:
        with contextlib.suppress(OSError):
            while limit and (data := await reader.read(limit if limit > 0 else 65536)):
                writer.write(data)
                limit -= len(data)
                await writer.drain()
            if not limit:
                await asyncio.sleep(0)
                writer.close()  # the bytes that were let through arrive
        if not limit:
            self.cut()

    def cut(self) -> None:
        for writer in self._writers:
            if not writer.is_closing():
                writer.transport.abort()
        self._writers.clear()


@asynccontextmanager
async def wire_to(address: str) -> AsyncIterator[Wire]:
    host, _, port = address.rpartition(":")
    wire = Wire(host, int(port))
    server = await asyncio.start_server(wire.connect, "127.0.0.1", 0)
    wire.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield wire
    finally:
        server.close()
        wire.cut()
        await server.wait_closed()


PROMPT = "This module provides"
KINDS = {
    "plain": SamplingParams(max_tokens=60, temperature=0.8, seed=3, ignore_eos=True, logprobs=1),
    "choices that stop": SamplingParams(max_tokens=60, temperature=0.9, seed=7, n=3, stop=("e ",)),
}


@pytest.mark.parametrize("params", KINDS.values(), ids=KINDS)
async def test_a_stream_over_connections_that_are_cut_is_whole(serving: Serving, params: SamplingParams) -> None:
    async with serving() as real:
        async with AsyncClient(real.address) as client:
            wanted = await client.complete(PROMPT, params)
        async with wire_to(real.address) as wire:
            for cut_after in (400, 600, 801):
                wire.cut_after = cut_after  # bytes; WELCOME and ACCEPTED need about 180
                before = wire.num_connections
                async with AsyncClient(wire.address) as client:
                    chunks = [chunk async for chunk in client.generate(PROMPT, params, resumable=True)]
                assert join_chunks(chunks) == wanted.outputs
                assert [chunk.usage is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
                assert wire.num_connections > before + 1


async def collect(client: AsyncClient, prompt: str, **options: Any) -> list[OutputChunk]:
    return [chunk async for chunk in client.generate(prompt, SamplingParams(max_tokens=8), resumable=True, **options)]


async def test_many_streams_resume_on_one_new_connection(system: Any, eventually: Eventually) -> None:
    async with wire_to(system.address) as wire, AsyncClient(wire.address) as client:
        accepted: list[Any] = []
        system.engine.submitting.clear()
        streams = [
            asyncio.create_task(collect(client, f"p{index}", on_accepted=accepted.append)) for index in range(20)
        ]
        await eventually(lambda: len(system.engine.requests) == 20)
        wire.cut()
        await eventually(lambda: wire.num_connections == 2)
        system.engine.submitting.set()
        for index, chunks in enumerate(await asyncio.gather(*streams)):
            assert "".join(chunk.text for chunk in chunks) == "".join(f" p{index}:{first}é日" for first in (0, 2, 4, 6))
        assert wire.num_connections == 2
        assert len(accepted) == len(system.engine.requests) == 20


async def test_many_cuts_change_no_byte_and_leave_no_request(serving: Serving) -> None:
    """Run streams of all kinds, some with keys, some left early, over a relay that is cut repeatedly."""
    chance = random.Random(11)
    several = [*KINDS.values(), SamplingParams(max_tokens=40, ignore_eos=True)]
    async with serving(max_num_seqs=8) as real, wire_to(real.address) as wire:
        async with AsyncClient(real.address) as client:
            wanted = [await client.complete(PROMPT, params) for params in several]

        async def user(client: AsyncClient, index: int) -> None:
            kind = index % len(several)
            options: dict[str, Any] = {"idempotency_key": f"key {kind}"} if chance.random() < 0.3 else {}
            leave_after = chance.randrange(1, 10) if chance.random() < 0.2 else None
            chunks = []
            async with contextlib.aclosing(client.generate(PROMPT, several[kind], resumable=True, **options)) as stream:
                async for chunk in stream:
                    chunks.append(chunk)
                    if len(chunks) == leave_after:
                        return
            assert join_chunks(chunks) == wanted[kind].outputs

        async def weather() -> None:
            while True:
                await asyncio.sleep(chance.uniform(0.01, 0.05))
                wire.cut()

        async with AsyncClient(wire.address) as client:
            storm = asyncio.create_task(weather())
            await asyncio.gather(*(user(client, index) for index in range(40)))
            storm.cancel()
        assert wire.num_connections > 3
        wire.cut()
        await real.idle()


async def test_a_stream_continues_when_the_server_is_reachable_again(
    system: Any, eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.runtime.client.stream.CREDIT_TOKENS", 2)
    async with wire_to(system.address) as wire, AsyncClient(wire.address) as client:
        stream = client.generate("hi", SamplingParams(max_tokens=8), resumable=True)
        first = await anext(stream)
        wire.is_down = True
        wire.cut()
        rest = asyncio.create_task(anext(stream))
        await eventually(lambda: wire.num_connections >= 3)
        wire.is_down = False
        assert (first.token_ids, (await rest).token_ids) == ((0, 1), (2, 3))
        assert [chunk.token_ids async for chunk in stream] == [(4, 5), (6, 7), ()]


async def test_leaving_a_resumed_stream_cancels_it(system: Any, eventually: Eventually) -> None:
    async with wire_to(system.address) as wire, AsyncClient(wire.address) as client:
        accepted: list[Any] = []
        system.engine.submitting.clear()
        stream = client.generate("hold", ENDLESS, resumable=True, on_accepted=accepted.append)
        first = asyncio.create_task(anext(stream))
        await eventually(lambda: bool(system.engine.requests))
        wire.cut()
        system.engine.submitting.set()
        assert (await first).token_ids == (0, 1)
        await stream.aclose()
        await eventually(lambda: not system.engine.live)
        assert (len(accepted), wire.num_connections) == (1, 2)


async def test_a_request_that_the_server_never_received_is_sent_again(system: Any, eventually: Eventually) -> None:
    async with wire_to(system.address) as wire, AsyncClient(wire.address) as client:
        await client.ping()
        wire.cut()
        wire.is_down = True
        collecting = asyncio.create_task(collect(client, "hi"))
        await asyncio.sleep(0)
        wire.is_down = False
        assert [chunk.token_ids for chunk in await collecting] == [(0, 1), (2, 3), (4, 5), (6, 7), ()]


async def test_a_stream_that_has_expired_goes_on_as_a_new_request(serve: Serve, eventually: Eventually) -> None:
    system = await serve(resume_timeout_ms=1)
    async with wire_to(system.address) as wire, AsyncClient(wire.address) as client:
        stream = client.generate("hold", ENDLESS, resumable=True)
        await anext(stream)
        wire.is_down = True
        wire.cut()
        rest = asyncio.create_task(anext(stream))
        await eventually(lambda: not system.engine.live)
        wire.is_down = False
        assert (await rest).token_ids == (2, 3)
        assert system.engine.requests[-1].generated == ((0, 1),)
        await stream.aclose()


async def test_a_key_whose_output_was_dropped_is_not_asked_for_again(serve: Serve) -> None:
    system = await serve(max_kept_bytes=14_000)
    async with AsyncClient(system.address) as client:
        await collect(client, "first", idempotency_key="k")
        for index in range(8):
            await collect(client, f"p{index}")
        with pytest.raises(RequestNotFound):
            await collect(client, "first", idempotency_key="k")


async def test_a_stream_that_is_not_resumable_ends_with_its_connection(system: Any) -> None:
    async with wire_to(system.address) as wire, AsyncClient(wire.address) as client:
        stream = client.generate("hold", ENDLESS)
        await anext(stream)
        wire.cut()
        with pytest.raises(Unavailable):
            await anext(stream)
        assert (await client.complete("hi", SamplingParams(max_tokens=1))).token_ids == (0,), "a new connection"


async def test_an_error_of_the_request_ends_the_resumed_stream(system: Any, eventually: Eventually) -> None:
    async with wire_to(system.address) as wire, AsyncClient(wire.address) as client:
        system.engine.submitting.clear()
        failing = asyncio.create_task(collect(client, "fail"))
        await eventually(lambda: bool(system.engine.requests))
        wire.cut()
        system.engine.submitting.set()
        with pytest.raises(GenerationFailed):
            await failing


async def test_the_client_gives_up_on_a_server_that_stays_away(system: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.runtime.client.stream.RESUME_FOR_S", 0.05)
    async with wire_to(system.address) as wire, AsyncClient(wire.address) as client:
        stream = client.generate("hold", ENDLESS, resumable=True)
        await anext(stream)
        wire.is_down = True
        wire.cut()
        with pytest.raises(Unavailable):
            await anext(stream)


async def test_the_client_gives_up_on_connections_that_break_after_welcome(
    system: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.runtime.client.stream.RESUME_FOR_S", 0.05)
    async with wire_to(system.address) as wire, AsyncClient(wire.address) as client:
        stream = client.generate("hold", ENDLESS, resumable=True)
        await anext(stream)
        wire.cut_after = 80
        wire.cut()
        with pytest.raises(Unavailable):
            await anext(stream)
        assert 2 <= wire.num_connections < 30


async def test_the_time_to_give_up_restarts_with_each_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection is lost three times before the first token, which may take longer than that time."""
    monkeypatch.setattr("quire.runtime.client.stream.RESUME_FOR_S", 0.0)
    num_connections = 0

    async def accept_and_leave(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_connections
        num_connections += 1
        await reader.read(1024)
        writer.write(encode(Welcome(1, (), 1 << 20, "m", "s")))
        await reader.read(1024)
        writer.write(encode(Accepted(1, 0, 1, 1, None)))
        if num_connections == 4:
            writer.write(encode(Done(1, "length", Usage(prompt_tokens=1, completion_tokens=0))))
            await reader.read()
        writer.close()

    server = await asyncio.start_server(accept_and_leave, "127.0.0.1", 0)
    async with AsyncClient(f"127.0.0.1:{server.sockets[0].getsockname()[1]}") as client:
        assert [chunk.finish_reason for chunk in await collect(client, "hi")] == ["length"]
    server.close()
    await server.wait_closed()


async def test_closing_the_client_ends_a_stream_that_is_reconnecting(system: Any, eventually: Eventually) -> None:
    async with wire_to(system.address) as wire:
        async with AsyncClient(wire.address) as client:
            stream = client.generate("hold", ENDLESS, resumable=True)
            await anext(stream)
            wire.is_down = True
            wire.cut()
            waiting = asyncio.create_task(anext(stream))
            await eventually(lambda: wire.num_connections >= 3)
        with pytest.raises(Unavailable, match="closed"):
            await waiting


async def test_a_silent_server_is_given_up(serve: Serve) -> None:
    """The server sends WELCOME and nothing more, not even PONG."""
    silent: list[asyncio.StreamWriter] = []

    async def greet_only(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        silent.append(writer)
        await reader.read(1024)
        writer.write(encode(Welcome(1, ("heartbeat",), 1 << 20, "m", "s", 10)))

    server = await asyncio.start_server(greet_only, "127.0.0.1", 0)
    async with AsyncClient(f"127.0.0.1:{server.sockets[0].getsockname()[1]}") as client:
        with pytest.raises(Unavailable, match=re.escape("the server sent nothing for 0.03 s")):
            await client.complete("hi")
    for writer in silent:
        writer.transport.abort()
    server.close()
    await server.wait_closed()
