"""CREDIT and PROGRESS on real sockets; a reader that grants no credit loses that request only."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

Serve = Callable[..., Awaitable[Any]]
Eventually = Callable[[Callable[[], bool]], Awaitable[None]]

LONG = {"max_tokens": 1_000_000}


def generate(client: Any, request_id: int, prompt: str, max_tokens: int, credit: int | None) -> None:
    client.send("GENERATE", request_id, prompt, {"max_tokens": max_tokens}, None, 0, None, None, credit)


async def token_ids(client: Any, *until: str) -> list[int]:
    """Return the token ids of all TOKENS up to the first frame of these types."""
    frames = await client.until(*until)
    return [token for frame in frames if frame[0] == "TOKENS" for token in frame[3]]


async def test_a_stream_pauses_without_credit_and_goes_on(system: Any) -> None:
    client = await system.raw()
    generate(client, 1, "hi", 10, credit=4)
    await client.until("ACCEPTED")
    assert [(await client.receive())[3] for _ in range(2)] == [[0, 1], [2, 3]]
    client.send("PING", 1)
    assert await client.receive() == ["PONG", 1], "no TOKENS without credit"
    client.send("CREDIT", 1, 2)
    assert (await client.receive())[3] == [4, 5]
    client.send("CREDIT", 1, 100)
    assert await token_ids(client, "DONE") == [6, 7, 8, 9]


async def test_a_chunk_is_not_divided(system: Any) -> None:
    """With a credit of three, two chunks of two tokens are sent. The third chunk waits until credit is above zero."""
    client = await system.raw()
    generate(client, 1, "hi", 10, credit=3)
    await client.until("ACCEPTED")
    assert [(await client.receive())[3] for _ in range(2)] == [[0, 1], [2, 3]]
    client.send("CREDIT", 1, 1)
    client.send("PING", 1)
    assert await client.receive() == ["PONG", 1]
    client.send("CREDIT", 1, 1)
    assert (await client.receive())[3] == [4, 5]


async def test_the_engine_does_not_wait_for_credit(system: Any, eventually: Eventually) -> None:
    client = await system.raw()
    generate(client, 1, "hi", 10, credit=0)
    assert (await client.receive())[0] == "ACCEPTED"
    client.send("PING", 1)
    assert await client.receive() == ["PONG", 1]
    client.send("CREDIT", 1, 10)
    assert await token_ids(client, "DONE") == list(range(10))


async def test_credit_for_a_stream_without_a_limit_changes_nothing(system: Any) -> None:
    client = await system.raw()
    client.send("GENERATE", 1, "hi", {"max_tokens": 4})
    client.send("CREDIT", 1, 1)
    client.send("CREDIT", 99, 1)
    assert await token_ids(client, "DONE") == [0, 1, 2, 3]


async def test_a_reader_that_grants_no_credit_loses_that_request_only(serve: Serve, eventually: Eventually) -> None:
    system = await serve(credit_timeout_ms=30)
    client = await system.raw()
    client.send("GENERATE", 2, "hold", LONG)
    await client.until("TOKENS")
    generate(client, 1, "endless", 1_000_000, credit=2)
    error = (await client.until("ERROR"))[-1]
    assert error[:3] == ["ERROR", 1, "DEADLINE_EXCEEDED"]
    assert "in 30 ms the client took fewer than one in 32" in error[3]
    await eventually(lambda: [live.request.prompt for live in system.engine.live] == ["hold"])
    client.send("CANCEL", 2)
    assert (await client.receive())[:3] == ["DONE", 2, "cancelled"]
    assert 'quire_cancelled_total{cause="slow_reader"} 1.0' in system.metrics()


async def test_cancel_ends_a_stream_that_waits_for_credit(system: Any) -> None:
    client = await system.raw()
    generate(client, 1, "endless", 1_000_000, credit=0)
    await client.until("ACCEPTED")
    client.send("CANCEL", 1)
    assert (await client.receive())[:3] == ["DONE", 1, "cancelled"], "the waiting tokens are dropped"


async def test_every_choice_ends_once_when_cancelled_without_credit(system: Any) -> None:
    client = await system.raw()
    params = {"max_tokens": 4, "n": 2}
    client.send("GENERATE", 1, "hold", params, None, 0, None, None, 0)
    await client.until("ACCEPTED")
    client.send("CANCEL", 1)
    frames = await client.until("DONE")
    assert [frame[6:8] for frame in frames[:-1]] == [[0, "cancelled"]]


async def test_a_lost_connection_cancels_a_stream_that_waits_for_credit(system: Any, eventually: Eventually) -> None:
    client = await system.raw()
    generate(client, 1, "endless", 1_000_000, credit=1)
    await client.until("TOKENS")
    client.writer.transport.abort()
    await eventually(lambda: not system.engine.live and not system.server.live_requests())


# Progress


async def test_progress_is_sent_if_negotiated(system: Any) -> None:
    client = await system.raw(hello=False)
    client.send("HELLO", [1], None, ["progress", "telepathy"])
    assert (await client.receive())[2] == ["progress"]
    client.send("GENERATE", 1, "prefill", {"max_tokens": 2})
    frames = await client.until("DONE")
    assert [frame[0] for frame in frames] == ["ACCEPTED", "PROGRESS", "PROGRESS", "TOKENS", "DONE"]
    assert frames[1:3] == [["PROGRESS", 1, 1, 3], ["PROGRESS", 1, 2, 3]]


async def test_progress_of_a_replayed_stream_follows_accepted(system: Any) -> None:
    client = await system.raw(hello=False)
    client.send("HELLO", [1], None, ["progress"])
    await client.receive()
    client.send("GENERATE", 1, "prefill", {"max_tokens": 2}, None, 0, None, None, None, "k", True)
    assert (await client.receive())[0] == "ACCEPTED"


async def test_progress_is_not_sent_by_default(system: Any) -> None:
    client = await system.raw()
    client.send("GENERATE", 1, "prefill", {"max_tokens": 2})
    assert [frame[0] for frame in await client.until("DONE")] == ["ACCEPTED", "TOKENS", "DONE"]


async def test_progress_of_the_real_engine(serving: Callable[..., Any]) -> None:
    async with serving(max_num_batched_tokens=64) as real:
        peer = await real.raw(hello=False)
        peer.send("HELLO", [1], None, ["progress"])
        await peer.receive()
        peer.send("GENERATE", 1, [5] * 200, {"max_tokens": 1})
        frames = await peer.until("DONE")
        computed = [frame[2] for frame in frames if frame[0] == "PROGRESS"]
        assert computed
        assert computed == sorted(set(computed))
        assert all(0 < tokens < 200 for tokens in computed)
        assert {frame[3] for frame in frames if frame[0] == "PROGRESS"} == {200}


# Live requests on the status page


async def test_live_requests_show_their_state(system: Any, eventually: Eventually) -> None:
    client = await system.raw()
    system.engine.submitting.clear()
    client.send("GENERATE", 7, "hold", LONG)
    await eventually(lambda: len(system.server.live_requests()) == 1)
    (queued,) = system.server.live_requests()
    assert (queued.request_id, queued.tenant, queued.state, queued.prompt_tokens) == ("7", "", "queued", None)
    system.engine.submitting.set()
    await client.until("TOKENS")
    (decoding,) = system.server.live_requests()
    assert (decoding.state, decoding.prompt_tokens, decoding.prefilled, decoding.generated) == ("decode", 3, 3, 2)
    assert decoding.age_s >= queued.age_s >= 0
    assert system.server.num_connections == 1
    client.send("CANCEL", 7)
    await client.until("DONE")
    assert system.server.live_requests() == []
