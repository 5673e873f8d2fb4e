"""Clients with several servers: a stream continues at another one, without losing, repeating or changing a byte."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from quire.runtime.client import AsyncClient
from quire.runtime.common.errors import ConfigError, DeadlineExceeded, Overloaded, ProtocolError, Unavailable
from quire.runtime.common.types import OutputChunk, SamplingParams, StructuredOutputs, join_chunks
from quire.runtime.protocol.codec import encode
from quire.runtime.protocol.frames import FEATURES, Accepted, Tokens, Welcome

from .test_resuming_client import ENDLESS, Wire, wire_to

Serve = Callable[..., Awaitable[Any]]
Serving = Callable[..., AbstractAsyncContextManager[Any]]
Eventually = Callable[[Callable[[], bool]], Awaitable[None]]

NODE_CLIENT = Path(__file__).parents[2] / "deploy" / "clients" / "node"
PROMPT = "This module provides"
KINDS = {
    "sampled": SamplingParams(max_tokens=40, temperature=0.8, seed=3, ignore_eos=True, logprobs=1),
    "penalties": SamplingParams(max_tokens=40, temperature=0.9, seed=5, repetition_penalty=1.2, frequency_penalty=0.3),
    "samples that stop": SamplingParams(max_tokens=40, temperature=0.9, seed=7, n=3, stop=("e ",)),
    "best of": SamplingParams(max_tokens=12, temperature=0.9, seed=9, n=2, best_of=3),
    "beams": SamplingParams(max_tokens=10, n=2, beam_width=3),
    "a grammar": SamplingParams(
        max_tokens=30, temperature=1.0, seed=2, structured_outputs=StructuredOutputs(regex="[a-z]{3}( [a-z]{4})*")
    ),
}


@asynccontextmanager
async def wires_to(*systems: Any) -> AsyncIterator[list[Wire]]:
    async with wire_to(systems[0].address) as first, wire_to(systems[-1].address) as second:
        yield [first, second]


def switch(wires: list[Wire], to: int) -> None:
    """Make one server reachable, and cut all connections to the other one."""
    wires[to].is_down = False
    wires[1 - to].is_down = True
    wires[1 - to].cut()


async def test_streams_of_all_kinds_go_on_at_the_other_server(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.runtime.client.stream.CREDIT_TOKENS", 8)  # less than any output, including skipped ones
    async with serving() as one, serving() as other, wires_to(one, other) as wires:
        async with AsyncClient(one.address) as client:
            wanted = {name: await client.complete(PROMPT, params) for name, params in KINDS.items()}
        async with AsyncClient([wire.address for wire in wires]) as client:
            for name, params in KINDS.items():
                for every in (1, 7):
                    chunks: list[OutputChunk] = []
                    async for chunk in client.generate(PROMPT, params):
                        chunks.append(chunk)
                        if len(chunks) % every == 0:
                            switch(wires, to=wires[0].is_down is False)
                    assert join_chunks(chunks) == wanted[name].outputs, name
                    usage = chunks[-1].usage
                    assert usage is not None
                    assert usage.completion_tokens == wanted[name].usage.completion_tokens
                    assert usage.prompt_tokens == wanted[name].usage.prompt_tokens
        for wire in wires:
            wire.cut()
        await one.idle()
        await other.idle()


async def test_a_seed_that_the_server_drew_goes_along(serve: Serve) -> None:
    one, other = await serve(), await serve()
    accepted: list[Accepted] = []
    async with wires_to(one, other) as wires, AsyncClient([wire.address for wire in wires]) as client:
        stream = client.generate("hold", ENDLESS, on_accepted=accepted.append)
        assert (await anext(stream)).token_ids == (0, 1)
        switch(wires, to=1)
        assert (await anext(stream)).token_ids == (2, 3)
        await stream.aclose()
    (request,) = other.engine.requests
    assert (request.generated, request.ended) == (((0, 1),), ())
    assert request.sampling_params.seed == accepted[0].seed is not None


async def test_the_cache_key_of_a_stream_goes_along(serve: Serve) -> None:
    one, other = await serve(), await serve()
    async with wires_to(one, other) as wires, AsyncClient([wire.address for wire in wires]) as client:
        stream = client.generate("hold", ENDLESS, prompt_cache_key="a conversation")
        await anext(stream)
        switch(wires, to=1)
        await anext(stream)
        await stream.aclose()
    keys = [request.prompt_cache_key for system in (one, other) for request in system.engine.requests]
    assert keys == ["a conversation"] * 2


async def test_a_server_that_does_not_know_cache_keys_gets_none(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    known = tuple(feature for feature in FEATURES if feature != "cache_key")
    monkeypatch.setattr("quire.runtime.server.msgpack.connection.FEATURES", known)
    system = await serve()
    async with AsyncClient(system.address) as client:
        await client.complete("hi", SamplingParams(max_tokens=2), prompt_cache_key="a")
    raw = await system.raw()
    raw.send("GENERATE", 1, "hi", {}, None, 0, None, None, None, None, False, None, None, [], "a")
    assert "cache_key" in (await raw.receive())[3]
    assert [request.prompt_cache_key for request in system.engine.requests] == [""]


@pytest.mark.parametrize("key", ["x" * 257, 5, None])
async def test_a_cache_key_is_a_text_of_limited_length(key: object, serve: Serve) -> None:
    system = await serve()
    raw = await system.raw(hello=False)
    raw.send("HELLO", [1], None, ["cache_key"])
    assert (await raw.receive())[2] == ["cache_key"]
    raw.send("GENERATE", 1, "hi", {}, None, 0, None, None, None, None, False, None, None, [], key)
    assert (await raw.receive())[:3] == ["ERROR", 1, "INVALID_ARGUMENT"]
    assert system.engine.requests == []


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
@pytest.mark.skipif(not (NODE_CLIENT / "node_modules").is_dir(), reason="msgpackr is not installed")
async def test_the_node_client_sends_the_cache_key(serve: Serve) -> None:
    system = await serve()
    program = f"""
        import {{ Client }} from "{NODE_CLIENT / "quire.mjs"}";
        const client = await Client.connect("{system.address}");
        for await (const _ of client.generate("hi", {{ max_tokens: 2 }}, {{ promptCacheKey: "a" }}));
        for await (const _ of client.generate("hi", {{ max_tokens: 2 }}, {{}}));
        client.close();
    """
    node = await asyncio.create_subprocess_exec("node", "--input-type=module", "--eval", program)
    assert await node.wait() == 0
    assert [request.prompt_cache_key for request in system.engine.requests] == ["a", ""]


async def test_a_request_of_which_nothing_was_received_is_sent_as_it_was(serve: Serve, eventually: Eventually) -> None:
    one, other = await serve(), await serve()
    one.engine.submitting.clear()
    async with wires_to(one, other) as wires, AsyncClient([wire.address for wire in wires]) as client:
        answering = asyncio.create_task(client.complete("hi", SamplingParams(max_tokens=2), idempotency_key="k"))
        await eventually(lambda: bool(one.engine.requests))
        switch(wires, to=1)
        assert (await answering).token_ids == (0, 1)
        assert other.engine.requests[0].generated is None


async def test_what_is_left_of_the_deadline_goes_along(serve: Serve) -> None:
    one, other = await serve(), await serve()
    async with wires_to(one, other) as wires, AsyncClient([wire.address for wire in wires]) as client:
        stream = client.generate("hold", ENDLESS, deadline_ms=600_000)
        await anext(stream)
        switch(wires, to=1)
        await anext(stream)
        await stream.aclose()
        assert 0 < other.engine.requests[0].deadline_ms < 600_000


async def test_a_deadline_ends_the_search_for_a_server(serve: Serve) -> None:
    one, other = await serve(), await serve()
    async with wires_to(one, other) as wires, AsyncClient([wire.address for wire in wires]) as client:
        stream = client.generate("hold", ENDLESS, deadline_ms=50)
        await anext(stream)
        wires[1].is_down = True
        switch(wires, to=1)
        wires[1].is_down = True
        with pytest.raises(DeadlineExceeded):
            await anext(stream)


async def test_a_request_under_which_servers_are_lost_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.runtime.client.stream.LAST_RETRY_S", 0.01)
    num_requests = 0

    async def accept_and_leave(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_requests
        await reader.read(1024)
        writer.write(encode(Welcome(1, ("continue",), 1 << 20, "m", "s")))
        if await reader.read(1024):
            num_requests += 1
            writer.write(encode(Accepted(1, 0, 1, 1, seed=7)))
        writer.close()

    server = await asyncio.start_server(accept_and_leave, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with AsyncClient([f"127.0.0.1:{port}", f"localhost:{port}"]) as client:
        with pytest.raises(Unavailable):
            await client.complete("hi")
    assert num_requests == 6
    server.close()
    await server.wait_closed()


async def test_a_server_that_leaves_out_tokens_is_found_out() -> None:
    async def skip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1024)
        writer.write(encode(Welcome(1, (), 1 << 20, "m", "s")))
        if await reader.read(1024):
            answers = (Accepted(1, 0, 1, 1, seed=7), Tokens(1, 0, (5,), "a"), Tokens(1, 3, (6,), "b"))
            writer.writelines([encode(answer) for answer in answers])
        await reader.read(1024)
        writer.close()

    server = await asyncio.start_server(skip, "127.0.0.1", 0)
    async with AsyncClient(f"127.0.0.1:{server.sockets[0].getsockname()[1]}") as client:
        stream = client.generate("hi")
        assert (await anext(stream)).token_ids == (5,)
        with pytest.raises(ProtocolError, match="begins at 3, after 1 tokens"):
            await anext(stream)
    server.close()
    await server.wait_closed()


async def test_a_server_of_another_model_does_not_go_on(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.runtime.client.stream.RESUME_FOR_S", 0.05)
    one, other = await serve(), await serve()
    other.engine.fingerprint = "another"
    async with wires_to(one, other) as wires, AsyncClient([wire.address for wire in wires]) as client:
        stream = client.generate("hold", ENDLESS)
        await anext(stream)
        switch(wires, to=1)
        with pytest.raises(Unavailable, match="another build or model"):
            await anext(stream)
        assert (await client.complete("hi", SamplingParams(max_tokens=2))).token_ids == (0, 1), "a new request"


async def test_streams_leave_a_server_that_shuts_down(serve: Serve) -> None:
    one, other = await serve(), await serve()
    async with AsyncClient([one.address, other.address]) as client:
        stream = client.generate("hold", ENDLESS)
        await anext(stream)
        await one.server.close()
        assert (await anext(stream)).token_ids == (2, 3)
        await stream.aclose()


async def test_the_first_server_that_answers_is_used_and_a_full_queue_is_an_answer(serve: Serve) -> None:
    system = await serve()
    async with AsyncClient(["127.0.0.1:1", system.address]) as client:
        await client.ping()
        with pytest.raises(Overloaded):
            await client.complete("full", SamplingParams(max_tokens=2))


@pytest.mark.parametrize("address", [[], [7], {"a:1": 2}, 7, ["a"]], ids=str)
def test_addresses_are_texts(address: Any) -> None:
    with pytest.raises(ConfigError, match="address"):
        AsyncClient(address)


async def test_no_server_at_all_is_named_with_every_address() -> None:
    with pytest.raises(Unavailable, match=r"none of 2 servers.*127\.0\.0\.1:1.*127\.0\.0\.1:2"):
        async with AsyncClient(["127.0.0.1:1", "127.0.0.1:2"]):
            pass
