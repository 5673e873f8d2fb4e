"""Readers of an output: the chunks of clients that cancel, grant credit, or read a long output again."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from quire.runtime.common.types import OutputChunk, SamplingParams
from quire.runtime.engine.facade import GenerateRequest
from quire.runtime.protocol.frames import Cancel, Credit, Resume
from quire.runtime.server.requests.output_log import OutputLog
from quire.runtime.server.requests.output_reader import READER_BYTES, OutputReader, Pace

from tests.support.server import FakeClock, FakeServer, chunk, generate, names


async def test_no_progress_follows_a_cancel(server: FakeServer) -> None:
    peer = await server.connect(features=("progress",))
    await peer.ask(generate())
    generation = server.engine.last
    generation.note_prefill(1)
    assert names(await peer.received()) == ["Progress"]
    generation.cancel = lambda: None  # type: ignore[method-assign]  # The engine is computing a step.
    assert await peer.ask(Cancel(1)) == []
    generation.note_prefill(2)
    assert await peer.received() == []
    await generation.put(chunk(0, 0, "", last=True, reason="cancelled"))
    assert names(await peer.received()) == ["Done"]


async def test_a_reader_counts_as_memory_while_it_waits_for_credit(server: FakeServer) -> None:
    peer = await server.connect()
    await peer.ask(generate(credit=1))
    for index in range(3):
        await server.engine.last.put(chunk(2 * index), chunk(2 * index + 1))
        assert names(await peer.received()) == ["Tokens"]
        assert server.unsent_bytes() > READER_BYTES
        assert names(await peer.ask(Credit(1, 2))) == ["Tokens"]
        assert server.unsent_bytes() == 0


async def test_a_client_must_take_a_share_of_the_waiting_tokens_and_not_of_all(
    serve: Callable[..., FakeServer], clock: FakeClock
) -> None:
    server = serve(credit_timeout_ms=1000)
    peer = await server.connect()
    await peer.ask(generate(credit=64))
    await server.engine.last.put(chunk(0, 64), chunk(64), chunk(65))
    assert names(await peer.received()) == ["Tokens"]
    await clock.advance(0.9)
    assert names(await peer.ask(Credit(1, 1))) == ["Tokens"]
    await clock.advance(0.9)
    assert await peer.received() == []
    await clock.advance(0.1)
    assert names(await peer.received()) == ["Error"]


async def test_long_chunks_take_more_of_a_turn(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    peer = await server.connect()
    await peer.ask(generate(resumable=True))
    for index in range(4):
        await server.engine.last.put(chunk(index, text="x" * 20_000, last=index == 3))
    await peer.received()
    turns = server.tenant.output_turns
    call_soon = turns.call_soon
    taken = []

    def counted(callback: Callable[[], object]) -> None:
        taken.append(callback)
        call_soon(callback)

    monkeypatch.setattr(turns, "call_soon", counted)
    assert names(await peer.ask(Resume(1, 0))) == ["Accepted", *["Tokens"] * 4, "Done"]
    assert len(taken) == 2


async def test_a_stream_continues_once_the_client_reads_again(server: FakeServer) -> None:
    peer = await server.connect()
    await peer.ask(generate())
    peer.writer.stop_reading()
    chunks = [chunk(index, text="x" * 100_000, last=index == 9) for index in range(10)]
    await server.engine.last.put(*chunks)
    assert await peer.received() == []
    num_sent = bytes(peer.writer.transport.waiting + peer.connection._send_buffer._unsent).count(b"TOKENS")
    assert 0 < num_sent < 9
    peer.writer.read_again()
    assert names(await peer.received()) == [*["Tokens"] * 10, "Done"]


async def test_a_muted_reader_reads_to_the_end_without_writing(server: FakeServer) -> None:
    peer = await server.connect()
    live = server.requests.submit(server.tenant, 1, GenerateRequest(prompt="hi", sampling_params=SamplingParams()))
    reader = OutputReader(OutputLog(live), Pace(peer.connection._send_buffer, server.tenant.output_turns))
    assert await reader.accepted() is None
    written: list[OutputChunk] = []
    reader.start(written.append, lambda: None)
    await server.engine.last.put(chunk(0))
    reader.mute()
    last = chunk(1, last=True)
    await server.engine.last.put(last)
    assert written == [chunk(0)]
    assert (reader.is_over, reader.failure, reader.usage) == (True, None, last.usage)
    reader.end()
