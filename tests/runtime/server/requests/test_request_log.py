"""Each request that ran or was refused has one log line, whatever reads it and however it ends."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import Any

import pytest
from quire.runtime.common.errors import GenerationFailed, Overloaded, Unavailable
from quire.runtime.protocol.frames import MIN_FRAME_BYTES, Resume, Tokenize
from quire.runtime.server.requests.request_log import MAX_FREE_LINES, RequestLog
from quire.runtime.server.tenancy.tenants import FRAMES_PER_TURN

from tests.support.server import FakeClock, FakeServer, chunk, generate, settle

Serve = Callable[..., FakeServer]
Logs = list[MutableMapping[str, Any]]

every_kind = pytest.mark.parametrize(
    "kind", [{}, {"resumable": True}, {"idempotency_key": "k"}], ids=["plain", "resumable", "keyed"]
)


def lines(logs: Logs) -> list[tuple[str, object, object]]:
    """Return event, client's id and code or finish reason of the lines about requests."""
    return [
        (each["event"], each["client_id"], each.get("code") or each.get("finish_reason") or each.get("cause"))
        for each in logs
        if "client_id" in each
    ]


@every_kind
async def test_a_request_that_ends_has_one_line(server: FakeServer, logs: Logs, kind: dict[str, Any]) -> None:
    peer = await server.connect()
    await peer.ask(generate(7, **kind))
    await server.engine.last.put(chunk(0), chunk(1, last=True))
    assert lines(logs) == [("request ended", 7, "length")]


@every_kind
async def test_a_request_that_fails_has_one_line(server: FakeServer, logs: Logs, kind: dict[str, Any]) -> None:
    peer = await server.connect()
    await peer.ask(generate(7, **kind))
    await server.engine.last.put(chunk(0), GenerationFailed("NaN"))
    assert lines(logs) == [("request failed", 7, "INTERNAL")]


@every_kind
async def test_a_request_whose_last_chunk_cannot_be_sent_has_ended(
    server: FakeServer, logs: Logs, kind: dict[str, Any]
) -> None:
    """The tokens of the request were computed, so they count for its tenant."""
    peer = await server.connect(max_frame_bytes=MIN_FRAME_BYTES)
    await peer.ask(generate(7, **kind))
    await server.engine.last.put(chunk(0), chunk(1, text="x" * MIN_FRAME_BYTES, last=True))
    assert lines(logs) == [("request ended", 7, "length")]


@every_kind
async def test_a_request_cut_by_the_drain_limit_has_one_line(
    server: FakeServer, logs: Logs, kind: dict[str, Any]
) -> None:
    peer = await server.connect()
    await peer.ask(generate(7, **kind))
    await server.engine.last.put(chunk(0, 3))
    server.replays.fail(Unavailable("shut down"))
    peer.connection.fail_requests(Unavailable("shut down"))
    await settle()
    assert lines(logs) == [("request failed", 7, "UNAVAILABLE")]
    assert (logs[-1]["completion_tokens"], logs[-1]["cause"]) == (3, "shutdown")


@every_kind
@pytest.mark.parametrize("refusal", ["refusal", "late_refusal"])
async def test_a_refused_request_has_one_line(
    server: FakeServer, logs: Logs, kind: dict[str, Any], refusal: str
) -> None:
    setattr(server.engine, refusal, Overloaded("full", 250))
    peer = await server.connect()
    await peer.ask(generate(7, **kind))
    assert lines(logs) == [("request refused", 7, "RESOURCE_EXHAUSTED")]
    assert (logs[-1]["retry_after_ms"], logs[-1]["log_level"]) == (250, "info")
    assert server.observer.refused_requests.counts == {("ann", "resource_exhausted"): 1}


async def test_a_request_that_never_reaches_the_engine_has_one_line(server: FakeServer, logs: Logs) -> None:
    peer = await server.connect()
    await peer.ask(generate(7), generate(7), Tokenize(8, ""), Resume(9, 0))
    assert lines(logs) == [
        ("request refused", 7, "ALREADY_EXISTS"),
        ("request refused", 9, "NOT_FOUND"),
        ("request refused", 8, "INVALID_ARGUMENT"),
    ]


async def test_a_lost_connection_is_the_cause_in_the_line(server: FakeServer, logs: Logs) -> None:
    peer = await server.connect()
    await peer.ask(generate(7))
    await peer.leave()
    assert lines(logs) == [("request ended", 7, "cancelled")]


async def test_a_resumed_stream_is_not_another_request(server: FakeServer, logs: Logs) -> None:
    peer = await server.connect()
    await peer.ask(generate(7, resumable=True))
    await server.engine.last.put(chunk(0))
    await peer.leave()
    again = await server.connect(session=peer.session)
    await again.ask(Resume(7, 1))
    await server.engine.last.put(chunk(1, last=True))
    assert lines(logs) == [("stream resumed", 7, None), ("request ended", 7, "length")]
    assert server.observer.resumed_streams.value == 1


async def test_an_idempotent_retry_is_not_another_request(server: FakeServer, logs: Logs) -> None:
    peer = await server.connect()
    await peer.ask(generate(7, idempotency_key="k"))
    await server.engine.last.put(chunk(0, last=True))
    await peer.ask(generate(8, idempotency_key="k"))
    assert lines(logs) == [("request ended", 7, "length"), ("request answered by an earlier one", 8, None)]
    assert server.observer.idempotent_replays.value == 1


async def test_retries_and_resumptions_are_logged_at_a_bounded_rate(server: FakeServer, logs: Logs) -> None:
    log = RequestLog(server.observer)
    for client_id in range(MAX_FREE_LINES + 5):
        log.replayed("ann", client_id)
        log.resumed("bob", client_id, 0)
    log.replayed("cas", 1)
    log.resumed("cas", 1, 0)
    events = [each["event"] for each in logs]
    assert events.count("stream resumed") == MAX_FREE_LINES + 1, "the rate is a tenant's own"
    assert events.count("request answered by an earlier one") == MAX_FREE_LINES + 1
    assert server.observer.resumed_streams.value == MAX_FREE_LINES + 6
    assert server.observer.idempotent_replays.value == MAX_FREE_LINES + 6


async def test_a_resumable_request_without_a_client_has_a_line(serve: Serve, clock: FakeClock, logs: Logs) -> None:
    server = serve(resume_timeout_ms=1000)
    peer = await server.connect()
    await peer.ask(generate(7, resumable=True))
    await peer.leave()
    await clock.advance(2)
    assert lines(logs) == [("request ended", 7, "cancelled")]


async def test_refusals_are_logged_at_a_bounded_rate_per_tenant(server: FakeServer, logs: Logs) -> None:
    peer = await server.connect()
    for _ in range(MAX_FREE_LINES + 5):
        peer.send(Resume(1, 0))
    for _ in range(MAX_FREE_LINES // FRAMES_PER_TURN):
        await settle()
    assert len(lines(logs)) == MAX_FREE_LINES
    assert server.observer.refused_requests.counts == {("ann", "not_found"): MAX_FREE_LINES + 5}
