"""What is kept of resumable and keyed requests, for how long, and how much memory it may take."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import Any

import pytest
from quire.runtime.common.errors import Unavailable
from quire.runtime.common.types import SamplingParams
from quire.runtime.protocol.frames import Cancel, Credit, Done, Error, Frame, Generate, Resume, Tokens
from quire.runtime.server.tenants import Tenant, TenantLimits

from .fakes import FakeClock, FakePeer, FakeServer, chunk, settle

Serve = Callable[..., FakeServer]


def generate(request_id: int = 1, prompt: str = "hi", key: str | None = None, **fields: Any) -> Generate:
    return Generate(request_id, prompt, SamplingParams(), idempotency_key=key, **fields)


def resumable(request_id: int = 1, **fields: Any) -> Generate:
    return generate(request_id, resumable=True, **fields)


def names(frames: list[Frame]) -> list[str]:
    return [type(frame).__name__ for frame in frames]


def streamed(frames: list[Frame]) -> list[tuple[Any, ...]]:
    """Everything of TOKENS and DONE but the request's id."""
    return [
        tuple(getattr(frame, field) for field in frame.__struct_fields__ if field != "request_id")
        for frame in frames
        if isinstance(frame, Tokens | Done)
    ]


def is_error(frames: list[Frame], code: str) -> bool:
    (frame,) = frames
    return isinstance(frame, Error) and frame.code == code


async def resume(
    server: FakeServer, of: FakePeer, request_id: int = 1, next_index: int = 0
) -> tuple[FakePeer, list[Frame]]:
    """Resume a request of `of` on a new connection in its session."""
    peer = await server.connect(session=of.session)
    return peer, await peer.ask(Resume(request_id, next_index))


def assert_nothing_is_kept(server: FakeServer) -> None:
    replays = server.replays
    kept = replays.num_bytes, len(replays.buffers), len(replays.resume_index), len(replays.idempotency_index)
    assert kept == (0, 0, 0, 0)
    assert not replays.is_busy


# The same stream for each of its readers


async def test_readers_see_the_same_chunks_at_their_own_pace(server: FakeServer) -> None:
    early, slow, late = [await server.connect() for _ in range(3)]
    await early.ask(generate(1, key="k"))
    await slow.ask(generate(2, key="k", credit=1))
    chunks = [chunk(0), chunk(1, 2), chunk(3, 0, ""), chunk(3, 1, last=True)]
    await server.engine.last.put(*chunks[:2])
    seen = await early.received()
    assert names(await slow.received()) == ["Tokens"]
    await server.engine.last.put(*chunks[2:])
    seen += await early.received()
    assert names(seen) == ["Tokens", "Tokens", "Tokens", "Done"]
    assert len(server.requests) == 0, "the request has ended, whatever its readers have read"
    assert streamed(await late.ask(generate(3, key="k"))) == streamed(seen)
    assert streamed(await slow.ask(Credit(2, 100))) == streamed(seen[1:])
    assert len(server.engine.generations) == 1


async def test_resumed_after_the_last_token_there_is_still_an_end(server: FakeServer) -> None:
    peer = await server.connect()
    await peer.ask(resumable())
    await server.engine.last.put(chunk(0, 2), chunk(2, 1, last=True))
    await peer.leave()
    again, frames = await resume(server, peer, next_index=3)
    assert names(frames) == ["Accepted", "Done"]
    assert is_error(await again.ask(Resume(1, 1)), "INVALID_ARGUMENT")
    assert names(await again.ask(Resume(1, 2))) == ["Accepted", "Tokens", "Done"]


async def test_a_bug_is_logged_once_and_reported_as_one(
    server: FakeServer, logs: list[MutableMapping[str, Any]]
) -> None:
    peer = await server.connect()
    await peer.ask(resumable())
    await server.engine.last.put(UnicodeDecodeError("utf-8", b"", 0, 1, "a bug"))
    (frame,) = await peer.received()
    assert isinstance(frame, Error)
    assert frame.message == "an internal error ended this request; see the server's log"
    assert [log["event"] for log in logs if log["log_level"] == "error"] == ["request failed"]


# For how long


async def test_resume_stops_the_time_to_resume(serve: Serve, clock: FakeClock) -> None:
    server = serve(resume_timeout_ms=1000)
    peer = await server.connect()
    await peer.ask(resumable())
    for _ in range(3):
        await peer.leave()
        await clock.advance(0.9)
        peer, frames = await resume(server, peer)
        assert names(frames) == ["Accepted"]
        await clock.advance(5)
        assert not server.engine.last.is_cancelled, "a connection has it"
    await server.engine.last.put(chunk(0))
    assert names(await peer.received()) == ["Tokens"]
    await peer.leave()
    await clock.advance(0.9)
    assert not server.engine.last.is_cancelled
    await clock.advance(0.1)
    assert server.engine.last.is_cancelled
    assert is_error((await resume(server, peer))[1], "NOT_FOUND")
    assert server.metric('quire_cancelled_total{cause="disconnect"}') == 1


async def test_the_connection_that_had_it_before_does_not_start_the_time_to_resume(
    serve: Serve, clock: FakeClock
) -> None:
    """It may be half open, and be found lost long after another has resumed."""
    server = serve(resume_timeout_ms=1000)
    first = await server.connect()
    await first.ask(resumable())
    second, frames = await resume(server, first)
    assert names(frames) == ["Accepted"]
    assert is_error(await first.received(), "CANCELLED")
    await first.leave()
    await clock.advance(5)
    await server.engine.last.put(chunk(0, last=True))
    assert names(await second.received()) == ["Tokens", "Done"]


async def test_an_ended_stream_can_be_resumed_for_as_long(serve: Serve, clock: FakeClock) -> None:
    server = serve(resume_timeout_ms=1000)
    peer = await server.connect()
    await peer.ask(resumable())
    await server.engine.last.put(chunk(0, last=True))
    for _ in range(3):
        await clock.advance(0.9)
        peer, frames = await resume(server, peer)
        assert names(frames) == ["Accepted", "Tokens", "Done"]
    await clock.advance(1)
    assert is_error((await resume(server, peer))[1], "NOT_FOUND")
    assert server.replays.num_bytes == 0


async def test_a_key_is_known_for_its_window_from_the_end(serve: Serve, clock: FakeClock) -> None:
    server = serve(idempotency_window_ms=1000)
    peer = await server.connect()
    await peer.ask(generate(1, key="k"))
    await clock.advance(5)
    await server.engine.last.put(chunk(0, last=True))
    await peer.received()
    for _ in range(3):
        await clock.advance(0.3)
        assert names(await peer.ask(generate(1, key="k"))) == ["Accepted", "Tokens", "Done"]
    assert len(server.engine.generations) == 1
    await clock.advance(0.1)
    assert names(await peer.ask(generate(1, key="k"))) == ["Accepted"]
    assert len(server.engine.generations) == 2


async def test_a_cancelled_request_does_not_answer_its_key(server: FakeServer) -> None:
    """Neither before the engine has ended it, nor afterwards."""
    peer = await server.connect()
    await peer.ask(generate(1, key="k"))
    peer.send(Cancel(1), generate(2, key="k"))
    await settle()
    assert [each.is_cancelled for each in server.engine.generations] == [True, False]
    assert names(await peer.received()) == ["Accepted", "Done"]
    await server.engine.last.put(chunk(0, last=True))
    assert names(await peer.ask(generate(3, key="k"))) == ["Tokens", "Done", "Accepted", "Tokens", "Done"]
    assert len(server.engine.generations) == 2


async def test_a_request_that_the_engine_cancelled_does_not_answer_its_key(server: FakeServer) -> None:
    peer = await server.connect()
    await peer.ask(generate(1, key="k"))
    await server.engine.last.put(chunk(0, last=True, reason="cancelled"))
    assert names(await peer.ask(generate(2, key="k"))) == ["Tokens", "Done", "Accepted"]
    assert len(server.engine.generations) == 2


async def test_one_reader_cancels_for_itself_and_the_last_one_for_all(server: FakeServer) -> None:
    peers = [await server.connect() for _ in range(2)]
    for peer in peers:
        await peer.ask(generate(1, key="k"))
    assert is_error(await peers[0].ask(Cancel(1)), "CANCELLED")
    assert not server.engine.last.is_cancelled
    assert names(await peers[1].ask(Cancel(1))) == ["Done"]
    assert server.engine.last.is_cancelled


async def test_a_request_cancelled_after_its_end_is_done(server: FakeServer) -> None:
    peer = await server.connect()
    await peer.ask(resumable(credit=0))
    await server.engine.last.put(chunk(0, last=True))
    (done,) = await peer.ask(Cancel(1))
    assert isinstance(done, Done)
    assert done.finish_reason == "length"
    assert server.metric('quire_cancelled_total{cause="client"}') == 0
    assert is_error(await peer.ask(Resume(1, 0)), "NOT_FOUND")


async def test_cancel_leaves_the_request_to_those_that_may_resume_it(server: FakeServer) -> None:
    lost, peer = [await server.connect() for _ in range(2)]
    await lost.ask(resumable(5, key="k"))
    await lost.leave()
    await peer.ask(generate(1, key="k"))
    assert is_error(await peer.ask(Cancel(1)), "CANCELLED")
    assert not server.engine.last.is_cancelled
    assert names((await resume(server, lost, 5))[1]) == ["Accepted"]


# How much


async def test_a_replay_counts_for_the_rate_and_not_as_a_live_request(serve: Serve) -> None:
    server = serve(tenant=Tenant("ann", TenantLimits(max_concurrent_requests=1, requests_per_minute=2)))
    peer = await server.connect()
    assert names(await peer.ask(generate(1, key="k"), generate(2, key="k"))) == ["Accepted", "Accepted"]
    assert is_error(await peer.ask(generate(3, key="k")), "RESOURCE_EXHAUSTED")
    assert len(server.requests) == 1


async def test_a_stream_over_the_limit_holds_no_more_than_is_unread(serve: Serve) -> None:
    server = serve(max_kept_bytes=10_000)
    peer = await server.connect()
    await peer.ask(resumable(1, key="k", credit=1))
    (buffer,) = server.replays.buffers
    await server.engine.last.put(*(chunk(index, text="x" * 1000) for index in range(20)))
    assert is_error((await resume(server, peer))[1], "NOT_FOUND")
    for num_read in range(1, 20):
        assert buffer.num_chunks <= 20 - num_read
        await peer.ask(Credit(1, 1))
    await server.engine.last.put(chunk(20, last=True))
    assert names(await peer.ask(Credit(1, 1)))[-1] == "Done"
    assert buffer.num_chunks == 0
    assert server.replays.num_bytes == 0


async def test_a_stream_over_the_limit_that_no_one_reads_is_cancelled(serve: Serve) -> None:
    server = serve(max_kept_bytes=10_000)
    peer = await server.connect()
    await peer.ask(resumable())
    await peer.leave()
    assert not server.engine.last.is_cancelled
    await server.engine.last.put(*(chunk(index, text="x" * 1000) for index in range(20)))
    assert server.engine.last.is_cancelled


async def test_streams_without_a_chunk_take_memory_too(serve: Serve) -> None:
    server = serve(max_kept_bytes=20_000)
    peer = await server.connect()
    for index in range(10):
        await peer.ask(resumable(index))
        await server.engine.last.put(Unavailable("gone"))
        assert is_error(await peer.received(), "UNAVAILABLE")
        assert 0 < server.replays.num_bytes <= 20_000
    assert names(await peer.ask(Resume(9, 0))) == ["Accepted", "Error"]
    assert is_error(await peer.ask(Resume(0, 0)), "NOT_FOUND")


@pytest.mark.parametrize("ended", [True, False])
async def test_each_id_that_may_be_resumed_takes_memory(serve: Serve, ended: bool) -> None:
    server = serve(max_kept_bytes=20_000)
    first = await server.connect()
    await first.ask(resumable(0, key="k"))
    await server.engine.last.put(chunk(0, last=ended))
    for index in range(1, 40):
        peer = await server.connect()
        await peer.ask(resumable(index, key="k"))
        await peer.leave()
        assert server.replays.num_bytes <= 20_000
    assert len(server.engine.generations) > 1, "the first was not kept for ever"


@pytest.mark.parametrize("again", ["retried", "resumed"])
async def test_a_stream_that_is_read_again_goes_after_those_that_are_not(serve: Serve, again: str) -> None:
    server = serve(max_kept_bytes=20_000)
    peer = await server.connect()
    for index in range(2):
        await peer.ask(resumable(index, key=f"k{index}"))
        await server.engine.last.put(chunk(0, last=True))
    slow = await server.connect(session=peer.session)
    frames = await slow.ask(generate(0, key="k0", credit=0) if again == "retried" else Resume(0, 0, 0))
    assert names(frames) == ["Accepted"]
    await peer.ask(resumable(2, key="k2"))
    await server.engine.last.put(chunk(0, text="x" * 8000, last=True))
    assert names(await peer.ask(generate(3, key="k0")))[-1] == "Done"
    assert len(server.engine.generations) == 3
    assert names(await peer.ask(generate(4, key="k1")))[-1] == "Accepted", "this one was let go"


async def test_nothing_is_left_when_everything_has_expired(serve: Serve, clock: FakeClock) -> None:
    server = serve(resume_timeout_ms=1000, idempotency_window_ms=2000)
    peer = await server.connect()
    for index in range(4):
        await peer.ask(resumable(index, key=f"k{index}"))
        await server.engine.last.put(chunk(0), chunk(1, last=True) if index % 2 else Unavailable("gone"))
        assert names(await peer.received()) == ["Tokens", "Tokens", "Done"] if index % 2 else ["Tokens", "Error"]
    assert server.replays.num_bytes > 0
    await clock.advance(2)
    assert_nothing_is_kept(server)


async def test_a_stream_that_ended_in_an_error_does_not_hold_its_prompt(server: FakeServer) -> None:
    """The frames of a traceback would."""
    peer = await server.connect()
    await peer.ask(resumable())
    (buffer,) = server.replays.buffers
    await server.engine.last.put(Unavailable("gone"))
    assert buffer.error is not None
    assert buffer.error.__traceback__ is None
    assert is_error(await peer.received(), "UNAVAILABLE")


async def test_closing_lets_go_of_everything(server: FakeServer) -> None:
    peer = await server.connect()
    for index in range(3):
        await peer.ask(resumable(index, key=f"k{index}"))
    await server.engine.generations[0].put(chunk(0, last=True))
    await server.replays.close()
    assert_nothing_is_kept(server)
    assert len(server.requests) == 0
