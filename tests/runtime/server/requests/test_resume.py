"""Resumable requests and idempotency keys: the output of a reader, and the time and memory for kept output."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from quire.runtime.common.errors import Overloaded, Unavailable
from quire.runtime.common.types import Delta, SamplingParams
from quire.runtime.protocol.frames import Cancel, Credit, Done, Error, Frame, Generate, Resume, Tokens
from quire.runtime.server.requests.indexes import StoredIndex, ToStore
from quire.runtime.server.requests.output_log import CHUNK_BYTES, ENTRY_BYTES, LOG_BYTES, MAX_READERS, encode_chunk
from quire.runtime.server.tenancy.tenants import Tenant, TenantLimits

from tests.support.server import FakeClock, FakePeer, FakeServer, chunk, generate, names, settle

Serve = Callable[..., FakeServer]


def resumable(request_id: int = 1, **fields: Any) -> Generate:
    return generate(request_id, resumable=True, **fields)


def streamed(frames: list[Frame]) -> list[tuple[Any, ...]]:
    """Return every field of TOKENS and DONE except the request's id."""
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
    kept = replays.num_bytes, len(replays.logs), len(replays.resume_index), len(replays.idempotency_index)
    assert kept == (0, 0, 0, 0)
    assert (replays.num_running, replays.resume_index.num_awaited) == (0, 0)


# Several readers of one stream


async def test_readers_receive_the_same_chunks_at_their_own_pace(server: FakeServer) -> None:
    early, slow, late = [await server.connect() for _ in range(3)]
    await early.ask(generate(1, idempotency_key="k"))
    await slow.ask(generate(2, idempotency_key="k", credit=1))
    chunks = [chunk(0), chunk(1, 2), chunk(3, 0, ""), chunk(3, 1, last=True)]
    await server.engine.last.put(*chunks[:2])
    seen = await early.received()
    assert names(await slow.received()) == ["Tokens"]
    await server.engine.last.put(*chunks[2:])
    seen += await early.received()
    assert names(seen) == ["Tokens", "Tokens", "Tokens", "Done"]
    assert len(server.requests) == 0, "the request has ended, however much its readers have read"
    assert streamed(await late.ask(generate(3, idempotency_key="k"))) == streamed(seen)
    assert streamed(await slow.ask(Credit(2, 100))) == streamed(seen[1:])
    assert len(server.engine.generations) == 1


async def test_a_stream_resumed_after_its_last_token_still_ends(server: FakeServer) -> None:
    peer = await server.connect()
    await peer.ask(resumable())
    await server.engine.last.put(chunk(0, 2), chunk(2, 1, last=True))
    await peer.leave()
    again, frames = await resume(server, peer, next_index=3)
    assert names(frames) == ["Accepted", "Done"]
    assert is_error(await again.ask(Resume(1, 1)), "INVALID_ARGUMENT")
    assert names(await again.ask(Resume(1, 2))) == ["Accepted", "Tokens", "Done"]


async def test_a_chat_resumed_after_its_last_token_does_not_get_its_last_deltas_again(server: FakeServer) -> None:
    peer = await server.connect()
    await peer.ask(resumable())
    last = msgspec.structs.replace(chunk(0, last=True), deltas=(Delta("arguments", "}"),))
    await server.engine.last.put(last)
    assert [frame.deltas for frame in await peer.received() if isinstance(frame, Tokens)] == [last.deltas]
    await peer.leave()
    _, frames = await resume(server, peer, next_index=1)
    assert names(frames) == ["Accepted", "Done"]


async def test_a_bug_is_logged_once_and_reported_as_an_internal_error(
    server: FakeServer, logs: list[MutableMapping[str, Any]]
) -> None:
    peer = await server.connect()
    await peer.ask(resumable())
    await server.engine.last.put(UnicodeDecodeError("utf-8", b"", 0, 1, "a bug"))
    (frame,) = await peer.received()
    assert isinstance(frame, Error)
    assert frame.message == "an internal error ended this request; see the server's log"
    assert [log["event"] for log in logs if log["log_level"] == "error"] == ["request failed"]


# Timeouts


async def test_resume_cancels_the_expiry_timer(serve: Serve, clock: FakeClock) -> None:
    server = serve(resume_timeout_ms=1000)
    peer = await server.connect()
    await peer.ask(resumable())
    for _ in range(3):
        await peer.leave()
        await clock.advance(0.9)
        peer, frames = await resume(server, peer)
        assert names(frames) == ["Accepted"]
        await clock.advance(5)
        assert not server.engine.last.is_cancelled, "a connection reads it"
    await server.engine.last.put(chunk(0))
    assert names(await peer.received()) == ["Tokens"]
    await peer.leave()
    await clock.advance(0.9)
    assert not server.engine.last.is_cancelled
    await clock.advance(0.1)
    assert server.engine.last.is_cancelled
    assert is_error((await resume(server, peer))[1], "NOT_FOUND")
    assert server.metric('quire_cancelled_total{cause="disconnect"}') == 1


async def test_a_client_that_was_cut_is_awaited_while_it_may_resume(serve: Serve, clock: FakeClock) -> None:
    server = serve(resume_timeout_ms=1000)
    for credit, is_awaited in ((0, True), (9, False)):  # the client with credit has received the end
        peer = await server.connect()
        await peer.ask(resumable(credit=credit))
        await server.engine.last.put(chunk(0, last=True))
        await peer.leave()
        assert server.replays.resume_index.num_awaited == is_awaited
        await clock.advance(1)
        assert server.replays.resume_index.num_awaited == 0


async def test_a_reader_that_waits_for_credit_is_cancelled_when_another_takes_its_stream_over(
    serve: Serve, clock: FakeClock
) -> None:
    server = serve(credit_timeout_ms=1000)
    first = await server.connect()
    await first.ask(resumable(credit=1))
    await server.engine.last.put(chunk(0), chunk(1))
    assert names(await first.received()) == ["Tokens"]
    second, frames = await resume(server, first)
    assert names(frames) == ["Accepted", "Tokens", "Tokens"]
    assert is_error(await first.received(), "CANCELLED")
    await clock.advance(5)
    assert not server.engine.last.is_cancelled
    await server.engine.last.put(chunk(2, last=True))
    assert names(await second.received()) == ["Tokens", "Done"]


async def test_the_end_of_an_earlier_reader_does_not_start_the_expiry_timer(serve: Serve, clock: FakeClock) -> None:
    """A half-open connection may be found lost long after another one has resumed its request."""
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


async def test_an_ended_stream_can_be_resumed_until_the_timeout(serve: Serve, clock: FakeClock) -> None:
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


async def test_a_key_is_remembered_for_its_window_after_the_end(serve: Serve, clock: FakeClock) -> None:
    server = serve(idempotency_window_ms=1000)
    peer = await server.connect()
    await peer.ask(generate(1, idempotency_key="k"))
    await clock.advance(5)
    await server.engine.last.put(chunk(0, last=True))
    await peer.received()
    for _ in range(3):
        await clock.advance(0.3)
        assert names(await peer.ask(generate(1, idempotency_key="k"))) == ["Accepted", "Tokens", "Done"]
    assert len(server.engine.generations) == 1
    await clock.advance(0.1)
    assert names(await peer.ask(generate(1, idempotency_key="k"))) == ["Accepted"]
    assert len(server.engine.generations) == 2


async def test_a_cancelled_request_does_not_answer_its_key(server: FakeServer) -> None:
    """Check both before and after the engine has ended it."""
    peer = await server.connect()
    await peer.ask(generate(1, idempotency_key="k"))
    peer.send(Cancel(1), generate(2, idempotency_key="k"))
    await settle()
    assert [each.is_cancelled for each in server.engine.generations] == [True, False]
    assert sorted(names(await peer.received())) == ["Accepted", "Done"]
    await server.engine.last.put(chunk(0, last=True))
    assert names(await peer.ask(generate(3, idempotency_key="k"))) == ["Tokens", "Done", "Accepted", "Tokens", "Done"]
    assert len(server.engine.generations) == 2


async def test_a_request_that_is_being_cancelled_does_not_answer_its_key(server: FakeServer) -> None:
    peer = await server.connect()
    await peer.ask(generate(1, idempotency_key="k"))
    server.engine.last.cancel = lambda: None  # type: ignore[method-assign]  # a step has it
    await peer.ask(Cancel(1))
    assert names(await peer.ask(generate(2, idempotency_key="k"))) == ["Accepted"]
    assert len(server.engine.generations) == 2


async def test_a_retry_may_have_less_time_and_another_priority(server: FakeServer) -> None:
    peer = await server.connect()
    for request_id in (1, 2):
        fields = {"deadline_ms": 5000 - request_id, "priority": request_id, "pin_ms": request_id}
        assert names(await peer.ask(generate(request_id, idempotency_key="k", **fields))) == ["Accepted"]
    assert len(server.engine.generations) == 1


async def test_a_key_does_not_answer_another_chat(server: FakeServer) -> None:
    peer = await server.connect()
    for request_id, content, answer in ((1, "hi", "Accepted"), (2, "ho", "Error"), (3, "hi", "Accepted")):
        chat = generate(request_id, None, messages=({"role": "user", "content": content},), idempotency_key="k")
        assert names(await peer.ask(chat)) == [answer]
    assert len(server.engine.generations) == 1


async def test_a_request_that_the_engine_cancelled_does_not_answer_its_key(server: FakeServer) -> None:
    peer = await server.connect()
    await peer.ask(generate(1, idempotency_key="k"))
    await server.engine.last.put(chunk(0, last=True, reason="cancelled"))
    assert names(await peer.ask(generate(2, idempotency_key="k"))) == ["Tokens", "Done", "Accepted"]
    assert len(server.engine.generations) == 2


async def test_only_the_last_reader_cancels_the_request(server: FakeServer) -> None:
    peers = [await server.connect() for _ in range(2)]
    for peer in peers:
        await peer.ask(generate(1, idempotency_key="k"))
    assert is_error(await peers[0].ask(Cancel(1)), "CANCELLED")
    assert not server.engine.last.is_cancelled
    assert names(await peers[1].ask(Cancel(1))) == ["Done"]
    assert server.engine.last.is_cancelled


async def test_a_request_cancelled_after_its_end_finishes_normally(server: FakeServer) -> None:
    peer = await server.connect()
    await peer.ask(resumable(credit=0))
    await server.engine.last.put(chunk(0, last=True))
    (done,) = await peer.ask(Cancel(1))
    assert isinstance(done, Done)
    assert done.finish_reason == "length"
    assert server.metric('quire_cancelled_total{cause="client"}') == 0
    assert is_error(await peer.ask(Resume(1, 0)), "NOT_FOUND")


async def test_a_request_that_another_client_may_resume_is_not_cancelled(server: FakeServer) -> None:
    lost, peer = [await server.connect() for _ in range(2)]
    await lost.ask(resumable(5, idempotency_key="k"))
    await lost.leave()
    await peer.ask(generate(1, idempotency_key="k"))
    assert is_error(await peer.ask(Cancel(1)), "CANCELLED")
    assert not server.engine.last.is_cancelled
    assert names((await resume(server, lost, 5))[1]) == ["Accepted"]


# Memory and limits


async def test_a_replay_counts_for_the_rate_and_not_as_a_live_request(serve: Serve) -> None:
    server = serve(tenant=Tenant("ann", TenantLimits(max_concurrent_requests=1, requests_per_minute=2)))
    peer = await server.connect()
    assert names(await peer.ask(generate(1, idempotency_key="k"), generate(2, idempotency_key="k"))) == [
        "Accepted",
        "Accepted",
    ]
    assert is_error(await peer.ask(generate(3, idempotency_key="k")), "RESOURCE_EXHAUSTED")
    assert len(server.requests) == 1


def small(request_id: int, **fields: Any) -> Generate:
    """Return a request that reserves 5056 bytes, and 1024 more if it is resumable."""
    return msgspec.structs.replace(generate(request_id, **fields), params=SamplingParams(max_tokens=10))


async def end(server: FakeServer, peer: FakePeer, frame: Generate, text: str = "x") -> list[Frame]:
    """Run one request of one token, and return what `peer` received."""
    frames = await peer.ask(frame)
    if names(frames) == ["Accepted"]:
        await server.engine.last.put(chunk(0, text=text, last=True))
        frames += await peer.received()
    return frames


async def test_a_tenant_cannot_displace_the_output_of_another(serve: Serve, clock: FakeClock) -> None:
    """Tenant a keeps ended streams busy with a trickle of credit, as many as it can."""
    server = serve(tenants=["a", "b"], max_kept_bytes=100_000)
    bystander = await server.connect(token="b")
    before = await end(server, bystander, small(1, resumable=True, idempotency_key="k"))
    await bystander.leave()
    peer = await server.connect(token="a")
    refusals = 0
    for index in range(1000):
        frames = await end(server, peer, small(index, resumable=True, idempotency_key=f"k{index}", credit=0))
        refusals += is_error(frames[-1:], "RESOURCE_EXHAUSTED")
        peer.send(Credit(index, 1))
    assert refusals
    assert server.replays.num_bytes <= 100_000
    again = await server.connect(token="b", session=bystander.session)
    num_requests = len(server.engine.generations)
    assert streamed(await again.ask(Resume(1, 0))) == streamed(before)
    assert streamed(await again.ask(small(2, idempotency_key="k"))) == streamed(before)
    assert len(server.engine.generations) == num_requests, "the retry is not run again"


async def test_a_tenant_loses_its_own_output_that_was_longest_unused(serve: Serve) -> None:
    server = serve(max_kept_bytes=30_000)
    peer = await server.connect()
    for index in range(3):
        assert names(await end(server, peer, small(index, resumable=True), "x" * 4000))[-1] == "Done"
    assert names(await peer.ask(Resume(0, 0))) == ["Accepted", "Tokens", "Done"], "used last"
    assert names(await end(server, peer, small(3, resumable=True)))[-1] == "Done"
    assert is_error(await peer.ask(Resume(1, 0)), "NOT_FOUND")
    for index in (0, 2, 3):
        assert names(await peer.ask(Resume(index, 0))) == ["Accepted", "Tokens", "Done"]


async def test_a_request_whose_output_was_dropped_is_not_run_again(serve: Serve, clock: FakeClock) -> None:
    """The idempotency key of the request is kept for the whole window."""
    server = serve(max_kept_bytes=20_000, idempotency_window_ms=1000)
    peer = await server.connect()
    for index in range(2):
        assert names(await end(server, peer, small(index, idempotency_key=f"k{index}"), "x" * 8000))[-1] == "Done"
    assert is_error(await peer.ask(small(2, idempotency_key="k0")), "NOT_FOUND")
    assert len(server.engine.generations) == 2
    assert names(await peer.ask(small(3, idempotency_key="k1")))[-1] == "Done"
    await clock.advance(1)
    assert names(await peer.ask(small(2, idempotency_key="k0"))) == ["Accepted"]
    assert len(server.engine.generations) == 3


async def test_a_request_is_refused_when_its_promise_cannot_be_kept(serve: Serve) -> None:
    """Running requests count with their maximum output; other requests are accepted."""
    server = serve(max_kept_bytes=15_000)
    peer = await server.connect()
    for index in range(2):
        assert names(await peer.ask(small(index, resumable=True))) == ["Accepted"]
    for fields in ({"resumable": True}, {"idempotency_key": "k"}):
        (refusal,) = await peer.ask(small(9, **fields))
        assert isinstance(refusal, Error)
        assert (refusal.code, refusal.retryable) == ("RESOURCE_EXHAUSTED", True)
        assert "hold 12160 bytes, and a tenant's share of `max_kept_bytes` is 15000" in refusal.message
    assert server.metric('quire_admission_rejections_total{reason="resource_exhausted"}') == 2
    assert names(await peer.ask(small(3))) == ["Accepted"]
    await server.engine.generations[1].put(chunk(0, last=True))
    await peer.received()
    assert names(await peer.ask(small(4, resumable=True))) == ["Accepted"]


async def test_a_request_that_can_never_be_kept_is_refused_for_good(serve: Serve) -> None:
    server = serve(max_kept_bytes=15_000)
    peer = await server.connect()
    params = SamplingParams(max_tokens=50, n=2, logprobs=5)
    (refusal,) = await peer.ask(Generate(1, "hi", params, resumable=True))
    assert isinstance(refusal, Error)
    assert (refusal.code, refusal.retryable) == ("RESOURCE_EXHAUSTED", False)
    assert f"takes up to {4096 + 1024 + 100 * (96 + 20 + 16 * 5)} bytes" in refusal.message
    assert names(await peer.ask(Generate(1, "hi", params))) == ["Accepted"]


async def test_a_refused_request_drops_nothing(serve: Serve) -> None:
    server = serve(max_kept_bytes=10_000)
    peer = await server.connect()
    assert names(await end(server, peer, small(0, resumable=True)))[-1] == "Done"
    server.engine.refusal = Overloaded("the queue is full")
    assert is_error(await peer.ask(small(1, resumable=True)), "RESOURCE_EXHAUSTED")
    assert names(await peer.ask(Resume(0, 0))) == ["Accepted", "Tokens", "Done"]


async def test_a_request_with_unusually_long_text_drops_ended_ones_and_ends_beyond_the_share(serve: Serve) -> None:
    server = serve(max_kept_bytes=30_000)
    peer, lost = [await server.connect() for _ in range(2)]
    assert names(await end(server, peer, small(0, resumable=True), "x" * 10_000))[-1] == "Done"
    await lost.ask(small(1, resumable=True))
    await lost.leave()
    await server.engine.last.put(chunk(0, text="x" * 15_000))
    assert is_error(await peer.ask(Resume(0, 0)), "NOT_FOUND")
    assert not server.engine.last.is_cancelled
    await server.engine.last.put(chunk(1, text="x" * 15_000))
    assert server.engine.last.is_cancelled
    assert len(server.requests) == 0
    (_, frames) = await resume(server, lost)
    assert names(frames) == ["Accepted", "Tokens", "Tokens", "Error"]
    assert is_error(frames[-1:], "RESOURCE_EXHAUSTED")


async def test_a_request_with_unusually_long_text_drops_as_many_ended_ones_as_it_needs(serve: Serve) -> None:
    server = serve(max_kept_bytes=30_000)
    peer = await server.connect()
    for index in range(2):
        assert names(await end(server, peer, small(index, resumable=True), "x" * 5_000))[-1] == "Done"
    await peer.ask(small(2, resumable=True))
    await server.engine.last.put(chunk(0, text="x" * 20_000))
    assert names(await peer.received()) == ["Tokens"]
    assert not server.engine.last.is_cancelled
    for index in range(2):
        assert is_error(await peer.ask(Resume(index, 0)), "NOT_FOUND")


async def test_a_request_whose_last_text_is_too_long_ends_once_and_in_an_error(serve: Serve) -> None:
    server = serve(max_kept_bytes=30_000)
    peer = await server.connect()
    await peer.ask(small(1, resumable=True))
    await server.engine.last.put(chunk(0, text="x" * 30_000, last=True))
    assert names(await peer.received()) == ["Tokens", "Done"]
    (log,) = server.replays.logs
    assert (log.finish_reason, log.error and log.error.code) == (None, "RESOURCE_EXHAUSTED")
    _, frames = await resume(server, peer, next_index=1)
    assert names(frames) == ["Accepted", "Error"]


async def test_an_ended_log_counts_each_of_its_chunks(server: FakeServer) -> None:
    peer = await server.connect()
    await peer.ask(small(1, resumable=True))
    chunks = [chunk(0), chunk(1, last=True)]
    await server.engine.last.put(*chunks)
    num_bytes = sum(len(encode_chunk(each)) + CHUNK_BYTES for each in chunks)
    assert server.replays.num_bytes == LOG_BYTES + ENTRY_BYTES + num_bytes


async def test_streams_without_chunks_count_as_memory(serve: Serve) -> None:
    server = serve(max_kept_bytes=20_000)
    peer = await server.connect()
    for index in range(10):
        await peer.ask(small(index, resumable=True))
        await server.engine.last.put(Unavailable("gone"))
        assert is_error(await peer.received(), "UNAVAILABLE")
        assert 0 < server.replays.num_bytes <= 20_000
    assert names(await peer.ask(Resume(9, 0))) == ["Accepted", "Error"]
    assert is_error(await peer.ask(Resume(0, 0)), "NOT_FOUND")


@pytest.mark.parametrize("ended", [True, False])
async def test_each_resumable_id_counts_as_memory(serve: Serve, ended: bool) -> None:
    server = serve(max_kept_bytes=20_000)
    first = await server.connect()
    await first.ask(small(0, resumable=True, idempotency_key="k"))
    await server.engine.last.put(chunk(0, last=ended))
    for index in range(1, 40):
        peer = await server.connect()
        frames = await peer.ask(small(index, resumable=True, idempotency_key="k"))
        await peer.leave()
        assert server.replays.num_bytes <= 20_000
    assert is_error(frames, "RESOURCE_EXHAUSTED"), "the ids of one request fill the share"
    assert len(server.engine.generations) == 1


@pytest.mark.parametrize("again", ["retried", "resumed"])
async def test_output_that_is_being_read_is_not_dropped(serve: Serve, again: str) -> None:
    server = serve(max_kept_bytes=20_000)
    peer = await server.connect()
    for index in range(2):
        assert names(await end(server, peer, small(index, resumable=True, idempotency_key=f"k{index}")))[-1] == "Done"
    slow = await server.connect(session=peer.session)
    frames = await slow.ask(small(0, idempotency_key="k0", credit=0) if again == "retried" else Resume(0, 0, 0))
    assert names(frames) == ["Accepted"]
    frames = await end(server, peer, small(2, resumable=True, idempotency_key="k2"), "x" * 6000)
    assert names(frames)[-1] == "Done"
    assert names(await peer.ask(small(3, idempotency_key="k0")))[-1] == "Done"
    assert is_error(await peer.ask(small(4, idempotency_key="k1")), "NOT_FOUND"), "this one was dropped"
    assert names(await slow.ask(Credit(0, 1))) == ["Tokens", "Done"]


async def test_nothing_is_left_when_everything_has_expired(serve: Serve, clock: FakeClock) -> None:
    server = serve(resume_timeout_ms=1000, idempotency_window_ms=2000)
    peer = await server.connect()
    for index in range(4):
        await peer.ask(resumable(index, idempotency_key=f"k{index}"))
        await server.engine.last.put(chunk(0), chunk(1, last=True) if index % 2 else Unavailable("gone"))
        assert names(await peer.received()) == ["Tokens", "Tokens", "Done"] if index % 2 else ["Tokens", "Error"]
    assert server.replays.num_bytes > 0
    await clock.advance(2)
    assert_nothing_is_kept(server)
    assert (await server.connect(session=peer.session)).session != peer.session, "the session's name is kept"


async def test_a_stream_that_ended_in_an_error_does_not_hold_its_prompt(server: FakeServer) -> None:
    peer = await server.connect()
    await peer.ask(resumable())
    (log,) = server.replays.logs
    await server.engine.last.put(Unavailable("gone"))
    assert log.error is not None
    assert log.error.__traceback__ is None
    assert is_error(await peer.received(), "UNAVAILABLE")


async def test_closing_releases_everything(server: FakeServer) -> None:
    peer = await server.connect()
    for index in range(3):
        await peer.ask(resumable(index, idempotency_key=f"k{index}"))
    await server.engine.generations[0].put(chunk(0, last=True))
    await server.replays.close()
    assert_nothing_is_kept(server)
    assert len(server.requests) == 0


async def test_a_key_answers_a_limited_number_of_requests_at_a_time(server: FakeServer) -> None:
    peer = await server.connect()
    for request_id in range(1, 1 + MAX_READERS):
        assert names(await peer.ask(generate(request_id, idempotency_key="k"))) == ["Accepted"]
    (refusal,) = await peer.ask(generate(100, idempotency_key="k"))
    assert isinstance(refusal, Error)
    assert (refusal.request_id, refusal.code, refusal.retryable) == (100, "RESOURCE_EXHAUSTED", True)
    await server.engine.last.put(chunk(0, last=True))
    assert names(await peer.received()).count("Done") == MAX_READERS


# Stored requests


async def test_a_stored_request_that_is_deleted_does_not_expire_later() -> None:
    index = StoredIndex(3600.0, lambda _: None)
    log: Any = SimpleNamespace(tenant="ann", name="1", stored_entry=None)
    index.add(log, ToStore("resp_", b"{}"))
    entry = index.find("ann", "resp_1")
    index.on_end(entry)
    index.remove(entry)
    assert entry.expiry is not None
    assert entry.expiry.cancelled(), "the timer would keep the output in memory"
