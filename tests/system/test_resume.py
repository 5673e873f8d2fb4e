"""RESUME and idempotency keys on real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest
from quire.runtime.server.tenancy.auth import hash_key

Serve = Callable[..., Awaitable[Any]]
Serving = Callable[..., AbstractAsyncContextManager[Any]]
Eventually = Callable[[Callable[[], bool]], Awaitable[None]]

LONG = {"max_tokens": 1_000_000}
NOT_FOUND = [
    "NOT_FOUND",
    "there is nothing to resume under this id: it is unknown, expired, dropped to keep newer requests of this tenant, "
    "or of another tenant",
]


def generate(
    client: Any,
    request_id: int,
    prompt: Any,
    params: dict[str, Any],
    *,
    credit: int | None = None,
    key: str | None = None,
    resumable: bool = False,
) -> None:
    client.send("GENERATE", request_id, prompt, params, None, 0, None, None, credit, key, resumable)


async def greet(system: Any, session: str | None = None, token: str | None = None) -> tuple[Any, str]:
    """Return a connection and the name of its session."""
    client = await system.raw(hello=False)
    client.send("HELLO", [1], token, [], 1 << 20, session)
    return client, (await client.receive())[5]


async def resumed(system: Any, session: str, next_index: int, request_id: int = 1) -> tuple[Any, list[list[Any]]]:
    """Resume on a new connection. Return it and its frames up to the last one."""
    client, _ = await greet(system, session)
    client.send("RESUME", request_id, next_index)
    return client, await client.until("DONE", "ERROR")


def tokens_of(frames: list[list[Any]]) -> list[list[Any]]:
    return [frame for frame in frames if frame[0] == "TOKENS"]


async def lose_connection(client: Any, system: Any, eventually: Eventually) -> None:
    """Abort the connection, and wait until the server has noticed."""
    client.writer.transport.abort()
    await eventually(lambda: system.server.num_connections == 0)


# The same bytes

PROMPT = "This module provides"
KINDS: dict[str, dict[str, Any]] = {
    "plain": {"max_tokens": 40, "temperature": 0.8, "seed": 3, "ignore_eos": True},
    "logprobs": {"max_tokens": 24, "temperature": 0.8, "seed": 3, "ignore_eos": True, "logprobs": 3},
    "two choices": {"max_tokens": 24, "temperature": 0.8, "seed": 3, "ignore_eos": True, "n": 2},
    "choices that stop": {"max_tokens": 60, "temperature": 0.9, "seed": 7, "n": 3, "stop": ["e "]},
    "a search": {"max_tokens": 8, "beam_width": 3, "n": 2, "ignore_eos": True},
}


@pytest.mark.parametrize("params", KINDS.values(), ids=KINDS)
async def test_a_stream_resumed_at_any_chunk_is_the_same(
    serving: Serving, eventually: Eventually, params: dict[str, Any]
) -> None:
    """Cut after several numbers of TOKENS, and resume twice: while it runs, and when it has finished."""
    async with serving() as real:
        peer = await real.raw()
        generate(peer, 1, PROMPT, params)
        undisturbed = tokens_of(await peer.until("DONE"))
        for cut in {0, 1, len(undisturbed) // 2, len(undisturbed)}:
            client, session = await greet(real)
            generate(client, 1, PROMPT, params, resumable=True)
            await client.until("ACCEPTED")
            received = [await client.receive() for _ in range(cut)]
            client.writer.transport.abort()
            for _ in range(2):
                next_index = sum(len(frame[3]) for frame in received)
                second, rest = await resumed(real, session, next_index)
                again = [frame for frame in tokens_of(rest) if frame[3] or frame not in received]
                assert received + again == undisturbed
                assert (rest[0][0], rest[-1][0]) == ("ACCEPTED", "DONE")
                assert rest[-1][3]["completion_tokens"] == sum(len(frame[3]) for frame in undisturbed)
                second.writer.transport.abort()


async def test_a_request_goes_on_without_a_connection(system: Any, eventually: Eventually) -> None:
    client, session = await greet(system)
    generate(client, 1, "hi", {"max_tokens": 6}, resumable=True, credit=2)
    await client.until("TOKENS")
    await lose_connection(client, system, eventually)
    assert system.server.live_requests() == []
    _, rest = await resumed(system, session, next_index=2)
    assert [frame[3] for frame in tokens_of(rest)] == [[2, 3], [4, 5]]


async def test_resume_before_the_engine_has_accepted(system: Any, eventually: Eventually) -> None:
    system.engine.submitting.clear()
    client, session = await greet(system)
    generate(client, 1, "hi", {"max_tokens": 2}, resumable=True)
    await eventually(lambda: bool(system.engine.requests))
    await lose_connection(client, system, eventually)
    resuming = asyncio.create_task(resumed(system, session, next_index=0))
    system.engine.submitting.set()
    assert [frame[0] for frame in (await resuming)[1]] == ["ACCEPTED", "TOKENS", "DONE"]


async def test_a_resumed_stream_ends_in_the_error_of_its_request(system: Any, eventually: Eventually) -> None:
    client, session = await greet(system)
    generate(client, 1, "fail", {"max_tokens": 9}, resumable=True)
    await client.until("ERROR")
    _, rest = await resumed(system, session, next_index=2)
    assert [frame[:3] for frame in rest] == [["ACCEPTED", 1, 1], ["ERROR", 1, "INTERNAL"]]


async def test_resumed_with_credit(system: Any) -> None:
    client, session = await greet(system)
    generate(client, 1, "hi", {"max_tokens": 8}, resumable=True)
    await client.until("DONE")
    second, _ = await greet(system, session)
    second.send("RESUME", 1, 2, 2)
    assert [(await second.receive())[0] for _ in range(2)] == ["ACCEPTED", "TOKENS"]
    second.send("PING", 1)
    assert await second.receive() == ["PONG", 1]
    second.send("CREDIT", 1, 4)
    assert [frame[3] for frame in tokens_of(await second.until("DONE"))] == [[4, 5], [6, 7]]


async def test_a_long_replay_waits_for_its_reader(serve: Serve) -> None:
    """The replay is longer than what a connection may have unsent."""
    system = await serve(max_outgoing_bytes=200_000, max_frame_bytes=64 << 10)
    system.engine.text_bytes = 10_000
    client, session = await greet(system)
    generate(client, 1, "hi", {"max_tokens": 400}, resumable=True)
    await client.until("DONE")
    _, rest = await resumed(system, session, next_index=0)
    assert sum(len(frame[4]) for frame in tokens_of(rest)) == 2_000_000


async def test_a_session_continues_over_many_connections(system: Any) -> None:
    """Requests of later connections belong to the same session."""
    client, session = await greet(system)
    generate(client, 1, "hi", {"max_tokens": 2}, resumable=True)
    await client.until("DONE")
    second, same = await greet(system, session)
    assert same == session
    generate(second, 2, "ho", {"max_tokens": 2}, resumable=True)
    await second.until("DONE")
    for request_id in (1, 2):
        _, rest = await resumed(system, session, 0, request_id)
        assert rest[-1][:2] == ["DONE", request_id]


async def test_sessions_without_anything_to_resume_are_forgotten(system: Any) -> None:
    client, session = await greet(system)
    client.send("GENERATE", 1, "hi", {"max_tokens": 2})
    await client.until("DONE")
    _, other = await greet(system, session)
    assert session != other
    assert len(session) >= 24


async def test_a_request_that_is_not_resumable_is_cancelled_with_its_connection(
    system: Any, eventually: Eventually
) -> None:
    client, session = await greet(system)
    generate(client, 1, "hold", LONG)
    generate(client, 2, "hold", LONG, resumable=True)
    await client.until("TOKENS")
    await client.until("TOKENS")
    await lose_connection(client, system, eventually)
    await eventually(lambda: len(system.engine.live) == 1)
    second, rest = await resumed(system, session, 2, request_id=1)
    assert rest == [["ERROR", 1, *NOT_FOUND]]
    second.send("RESUME", 2, 2)
    await second.until("ACCEPTED")
    second.send("CANCEL", 2)
    assert (await second.receive())[:3] == ["DONE", 2, "cancelled"]


async def test_a_resumable_request_is_cancelled_after_the_timeout(serve: Serve, eventually: Eventually) -> None:
    system = await serve(resume_timeout_ms=30)
    client, session = await greet(system)
    generate(client, 1, "hold", LONG, resumable=True)
    await client.until("TOKENS")
    await lose_connection(client, system, eventually)
    await eventually(lambda: not system.engine.live)
    assert (await resumed(system, session, 2))[1] == [["ERROR", 1, *NOT_FOUND]]
    assert 'quire_cancelled_total{cause="disconnect"} 1.0' in system.metrics()


async def test_a_finished_request_can_be_resumed_until_the_timeout(serve: Serve) -> None:
    system = await serve(resume_timeout_ms=30)
    client, session = await greet(system)
    generate(client, 1, "hi", {"max_tokens": 2}, resumable=True)
    await client.until("DONE")
    async with asyncio.timeout(30):
        while (await resumed(system, session, 0))[1] != [["ERROR", 1, *NOT_FOUND]]:
            await asyncio.sleep(0.05)  # each RESUME restarts the timeout


async def test_a_cancelled_request_cannot_be_resumed(system: Any) -> None:
    client, session = await greet(system)
    generate(client, 1, "hold", LONG, resumable=True)
    await client.until("TOKENS")
    client.send("CANCEL", 1)
    assert (await client.receive())[:3] == ["DONE", 1, "cancelled"]
    assert (await resumed(system, session, 0))[1] == [["ERROR", 1, *NOT_FOUND]]


async def test_a_request_cancelled_after_its_last_token_finishes_normally(system: Any, eventually: Eventually) -> None:
    client, session = await greet(system)
    generate(client, 1, "hi", {"max_tokens": 6}, resumable=True, credit=2)
    await client.until("TOKENS")
    await eventually(lambda: not system.server.live_requests())
    client.send("CANCEL", 1)
    assert (await client.until("DONE", "ERROR"))[-1][:3] == ["DONE", 1, "length"]
    assert (await resumed(system, session, 0))[1] == [["ERROR", 1, *NOT_FOUND]]


# Sessions and tenants


async def test_an_unknown_session_or_id_is_not_found(system: Any, eventually: Eventually) -> None:
    client, session = await greet(system)
    generate(client, 1, "hi", {"max_tokens": 2}, resumable=True)
    await client.until("DONE")
    answers = [(await resumed(system, name, 0, id_))[1] for name, id_ in ((session, 2), ("another", 1), ("", 1))]
    assert [answer[0][2:] for answer in answers] == [NOT_FOUND] * 3


@pytest.fixture
def tenants(tmp_path: Path) -> Path:
    path = tmp_path / "tenants.toml"
    path.write_text("".join(f'[{name}]\nkeys = ["{hash_key(name).hex()}"]\n' for name in ("ann", "bob")))
    path.chmod(0o600)
    return path


@pytest.fixture
async def shared(serve: Serve, tenants: Path) -> Any:
    """Start a server of two tenants, whose keys are their names."""
    return await serve(auth_tokens=str(tenants))


async def test_another_tenant_cannot_resume(shared: Any) -> None:
    client, session = await greet(shared, token="ann")
    generate(client, 1, "hi", {"max_tokens": 2}, resumable=True)
    await client.until("DONE")
    thief, its_session = await greet(shared, session, token="bob")
    assert its_session != session
    thief.send("RESUME", 1, 0)
    assert await thief.receive() == ["ERROR", 1, *NOT_FOUND]
    owner, its_session = await greet(shared, session, token="ann")
    assert its_session == session
    owner.send("RESUME", 1, 0)
    assert (await owner.until("DONE"))[-1][:3] == ["DONE", 1, "length"]


async def test_idempotency_keys_are_separate_for_each_tenant(shared: Any) -> None:
    for token, prompt in (("ann", "hi"), ("bob", "ho")):
        client, _ = await greet(shared, token=token)
        generate(client, 1, prompt, {"max_tokens": 2}, key="k")
        assert tokens_of(await client.until("DONE"))[0][4] == f" {prompt}:0é日"
    assert [(request.tenant, request.prompt) for request in shared.engine.requests] == [("ann", "hi"), ("bob", "ho")]


# Refused RESUMEs


async def test_an_index_at_which_no_chunk_ended_is_refused(system: Any) -> None:
    client, session = await greet(system)
    generate(client, 1, "hi", {"max_tokens": 4}, resumable=True)
    await client.until("DONE")
    second, _ = await greet(system, session)
    for next_index in (1, 3, 5, 2**63):
        second.send("RESUME", 1, next_index)
        assert (await second.receive())[:3] == ["ERROR", 1, "INVALID_ARGUMENT"]
    second.send("RESUME", 1, 4)
    assert [frame[0] for frame in await second.until("DONE")] == ["ACCEPTED", "DONE"]


async def test_an_id_that_is_live_on_the_same_connection_is_refused(system: Any) -> None:
    client, _ = await greet(system)
    generate(client, 1, "hold", LONG, resumable=True)
    await client.until("TOKENS")
    client.send("RESUME", 1, 2)
    assert (await client.receive())[:3] == ["ERROR", 1, "ALREADY_EXISTS"]
    assert len(system.engine.live) == 1


async def test_the_latest_connection_that_resumes_has_the_stream(system: Any) -> None:
    """The earlier connection may be half open without the server's knowledge."""
    client, session = await greet(system)
    generate(client, 1, "hold", LONG, resumable=True)
    await client.until("TOKENS")
    second, _ = await greet(system, session)
    second.send("RESUME", 1, 2)
    assert (await second.receive())[0] == "ACCEPTED"
    assert (await client.receive())[:4] == ["ERROR", 1, "CANCELLED", "this request was resumed on another connection"]
    client.writer.transport.abort()
    second.send("CANCEL", 1)
    assert (await second.receive())[:3] == ["DONE", 1, "cancelled"]


async def test_an_id_that_was_used_twice_resumes_the_later_request(system: Any, eventually: Eventually) -> None:
    client, session = await greet(system)
    generate(client, 1, "hold", LONG, resumable=True)
    await client.until("TOKENS")
    await lose_connection(client, system, eventually)
    second, _ = await greet(system, session)
    generate(second, 1, "hi", {"max_tokens": 2}, resumable=True)
    await second.until("DONE")
    await eventually(lambda: not system.engine.live)
    _, rest = await resumed(system, session, 0)
    assert tokens_of(rest)[0][4] == " hi:0é日"


# Idempotency keys


async def test_a_retry_after_the_end_gets_the_same_stream(system: Any) -> None:
    client = await system.raw()
    generate(client, 1, "hi", {"max_tokens": 4}, key="k")
    first = await client.until("DONE")
    other = await system.raw()
    generate(other, 9, "hi", {"max_tokens": 4}, key="k")
    again = await other.until("DONE")
    assert [frame[0:1] + frame[2:] for frame in again] == [frame[0:1] + frame[2:] for frame in first]
    assert {frame[1] for frame in again} == {9}
    assert len(system.engine.requests) == 1


async def test_a_retry_while_the_request_runs_receives_it_from_the_start(system: Any, eventually: Eventually) -> None:
    client = await system.raw()
    generate(client, 1, "hold", LONG, key="k")
    await client.until("TOKENS")
    other = await system.raw()
    generate(other, 1, "hold", LONG, key="k")
    assert [frame[0] for frame in await other.until("TOKENS")] == ["ACCEPTED", "TOKENS"]
    assert len(system.engine.live) == 1
    client.send("CANCEL", 1)
    assert (await client.receive())[:3] == ["ERROR", 1, "CANCELLED"], "the other goes on"
    assert len(system.engine.live) == 1
    other.send("CANCEL", 1)
    assert (await other.receive())[:3] == ["DONE", 1, "cancelled"]
    await eventually(lambda: not system.engine.live)


async def test_a_lost_connection_does_not_end_the_stream_of_another(system: Any, eventually: Eventually) -> None:
    clients = [await system.raw() for _ in range(2)]
    for client in clients:
        generate(client, 1, "hold", LONG, key="k")
        await client.until("TOKENS")
    clients[0].writer.transport.abort()
    await eventually(lambda: system.server.num_connections == 1)
    assert len(system.engine.live) == 1
    clients[1].writer.transport.abort()
    await eventually(lambda: not system.engine.live)


@pytest.mark.parametrize(
    ("prompt", "params"),
    [("ho", {"max_tokens": 4}), ("hi", {"max_tokens": 5}), ([1, 2], {"max_tokens": 4})],
    ids=["prompt", "params", "ids"],
)
async def test_a_key_used_for_another_request_is_refused(system: Any, prompt: Any, params: dict[str, Any]) -> None:
    client = await system.raw()
    generate(client, 1, "hi", {"max_tokens": 4}, key="k")
    await client.until("DONE")
    generate(client, 1, prompt, params, key="k")
    error = await client.receive()
    assert error[:3] == ["ERROR", 1, "INVALID_ARGUMENT"]
    assert "used for another request" in error[3]


@pytest.mark.parametrize("prompt", ["full", "fail"])
async def test_a_key_of_a_failed_request_starts_a_new_one(system: Any, prompt: str) -> None:
    client = await system.raw()
    for _ in range(2):
        generate(client, 1, prompt, {"max_tokens": 9}, key="k")
        await client.until("ERROR")
    assert len(system.engine.requests) == 2


async def test_a_key_of_a_cancelled_request_starts_a_new_one(system: Any, eventually: Eventually) -> None:
    client = await system.raw()
    generate(client, 1, "hold", LONG, key="k")
    await client.until("TOKENS")
    client.writer.transport.abort()
    await eventually(lambda: not system.engine.live)
    other = await system.raw()
    generate(other, 1, "hold", LONG, key="k")
    await other.until("TOKENS")
    assert len(system.engine.requests) == 2


async def test_a_key_is_forgotten_after_its_window(serve: Serve, eventually: Eventually) -> None:
    system = await serve(idempotency_window_ms=20)
    client = await system.raw()
    async with asyncio.timeout(30):
        while len(system.engine.requests) < 2:
            generate(client, 1, "hi", {"max_tokens": 2}, key="k")
            await client.until("DONE")
            await asyncio.sleep(0.01)


async def test_a_keyed_request_can_be_resumed_too(system: Any, eventually: Eventually) -> None:
    client, session = await greet(system)
    generate(client, 1, "hold", LONG, key="k", resumable=True)
    await client.until("TOKENS")
    await lose_connection(client, system, eventually)
    retry, other_session = await greet(system)
    generate(retry, 5, "hold", LONG, key="k", resumable=True)
    await retry.until("TOKENS")
    await lose_connection(retry, system, eventually)
    for name, request_id in ((session, 1), (other_session, 5)):
        second, _ = await greet(system, name)
        second.send("RESUME", request_id, 2)
        assert (await second.receive())[:2] == ["ACCEPTED", request_id]
    assert len(system.engine.requests) == 1


async def test_over_the_memory_limit_the_longest_unused_output_is_dropped(serve: Serve) -> None:
    system = await serve(max_kept_bytes=60_000)
    system.engine.text_bytes = 10_000
    client = await system.raw()
    for key in ("a", "b", "c"):
        generate(client, 1, "hi", {"max_tokens": 4}, key=key)
        await client.until("DONE")
    generate(client, 1, "hi", {"max_tokens": 4}, key="a")
    assert (await client.until("ERROR"))[-1][2] == "NOT_FOUND", "the output of a was dropped, and a is not run again"
    generate(client, 1, "hi", {"max_tokens": 4}, key="c")
    await client.until("DONE")
    assert len(system.engine.requests) == 3


async def test_a_stream_that_outgrows_the_memory_limit_ends_in_an_error(serve: Serve) -> None:
    """The text of the stream is far longer than the memory that the request reserved."""
    system = await serve(max_kept_bytes=50_000)
    system.engine.text_bytes = 10_000
    client = await system.raw()
    generate(client, 1, "hi", {"max_tokens": 40}, key="k", resumable=True)
    error = (await client.until("ERROR"))[-1]
    assert error[2] == "RESOURCE_EXHAUSTED"
    assert "`max_kept_bytes`" in error[3]
    generate(client, 1, "hi", {"max_tokens": 40})
    await client.until("DONE")
