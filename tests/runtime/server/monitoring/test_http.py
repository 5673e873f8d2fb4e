"""The operator's HTTP port under clients that do not behave."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, MutableMapping
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvloop
from prometheus_client import CollectorRegistry, generate_latest
from quire.runtime.common.logs import MAX_LINES
from quire.runtime.net.listen import listen_tcp
from quire.runtime.server.models.residency import Residency
from quire.runtime.server.monitoring import PrometheusObserver, http
from quire.runtime.server.monitoring.http import OPERATOR_LIMITS, OperatorServer, SharedResult, render_metrics
from quire.runtime.server.monitoring.model_operations import ModelOperations
from quire.runtime.server.monitoring.readiness import Readiness

from tests.support.server import FakeEngine

READY = b"GET /readyz HTTP/1.1\r\nhost: x\r\n\r\n"
METRICS = b"GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n"


class Port:
    """An operator port, and the connections that a test opened to it."""

    address: tuple[str, int]
    server: OperatorServer
    num_status = 0

    def __init__(self) -> None:
        self.writers: list[asyncio.StreamWriter] = []
        self.observer = PrometheusObserver()

    def status(self) -> Any:
        self.num_status += 1
        return {"number": self.num_status}

    async def connect(self, data: bytes = b"") -> asyncio.StreamReader:
        reader, writer = await asyncio.open_connection(*self.address)
        self.writers.append(writer)
        writer.write(data)
        return reader

    async def ask(self, request: bytes) -> bytes:
        """Return all bytes that a new connection receives."""
        reader = await self.connect(request)
        self.writers[-1].write_eof()
        return await reader.read()


@asynccontextmanager
async def open_port() -> AsyncIterator[Port]:
    port = Port()
    listening = await listen_tcp("127.0.0.1", 0)
    port.address = listening.socket.getsockname()
    readiness = Readiness(FakeEngine().stats, 1.0)
    port.server = OperatorServer(
        port.observer.registry, readiness, lambda: port.status(), listening.socket, ModelOperations(Residency([]))
    )
    yield port
    for writer in port.writers:
        writer.transport.abort()
    await port.server.close()
    listening.close()


@pytest.fixture
async def port(logs: object, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Port]:
    monkeypatch.setattr(http, "ANSWER_PAUSE_S", 0)
    async with open_port() as port:
        yield port


async def test_requests_of_one_connection_are_answered_in_order(port: Port) -> None:
    answer = await port.ask(READY + b"HEAD /metrics HTTP/1.1\r\nhost: x\r\n\r\n" + READY)
    assert answer.count(b"HTTP/1.1 200") == 3
    assert answer.count(b"ready\n") == 2
    assert b"# HELP" not in answer


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"GET /readyz?x=1 HTTP/1.1\r\nhost: x\r\n\r\n", 200),
        (b"GET /readyz HTTP/1.0\r\n\r\n", 200),
        (b"POST /readyz HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n", 405),
        (b"GET /readyz HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\nsome body", 413),
        (b"GET /readyz HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n", 413),
        (b"GET /nothing HTTP/1.1\r\nhost: x\r\n\r\n", 404),
        (b"GET /%ff HTTP/1.1\r\nhost: x\r\n\r\n", 404),
        (b"GET /readyz HTTP/1.1\r\n\r\n", 400),
        (b"GET /readyz HTTP/1.1\nhost: x\r\n\r\n", 400),
        (b"GET /readyz HTTP/1.1\r\nhost: x\r\ny: a\r\n b\r\n\r\n", 400),
        (b"GET /readyz HTTP/1.1\r\nhost: x\r\nauthorization: a\r\nauthorization: b\r\n\r\n", 400),
        (b"GET /readyz HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\ntransfer-encoding: chunked\r\n\r\n", 400),
        (b"GET /readyz HTTP/1.0\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        (b"GET /readyz HTTP/1.1\r\nhost: x\r\nhost: x\r\n\r\n", 400),
        (b"GET /readyz HTTP/3.0\r\nhost: x\r\n\r\n", 505),
        (b"\x00\xff nonsense\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nhost: x\r\nlong: " + b"x" * 70_000, 431),
        (b"GET / HTTP/1.1\r\nhost: x\r\n" + b"a:\r\n" * 256 + b"\r\n", 431),
    ],
)
async def test_statuses(port: Port, request_bytes: bytes, status: int) -> None:
    assert (await port.ask(request_bytes)).startswith(b"HTTP/1.1 %d" % status)


async def test_malformed_requests_are_logged_at_a_bounded_rate(
    port: Port, logs: list[MutableMapping[str, Any]]
) -> None:
    for _ in range(MAX_LINES + 5):
        await port.ask(b"nonsense\r\n\r\n")
    assert [each["event"] for each in logs] == ["http request refused"] * MAX_LINES


async def test_half_sent_requests_do_not_keep_a_probe_out(port: Port) -> None:
    halves = [await port.connect(READY[:20]) for _ in range(OPERATOR_LIMITS.open + OPERATOR_LIMITS.pending)]
    assert b"200 OK" in await port.ask(READY)
    assert await halves[0].read() == b"", "the oldest is closed"


async def test_one_connection_is_answered_per_turn_of_the_event_loop(
    port: Port, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers: list[int] = [0]

    async def answer() -> http.Answer:
        answers[-1] += 1
        return http.Answer(b"x")

    def next_turn() -> None:
        if sum(answers) < 40:
            answers.append(0)
            asyncio.get_running_loop().call_soon(next_turn)

    monkeypatch.setitem(port.server._answers, "/readyz", answer)
    readers = [await port.connect() for _ in range(20)]
    next_turn()
    for writer in port.writers:
        writer.write(READY * 2)
    for reader in readers:
        assert (await reader.read(5)) == b"HTTP/"
    while sum(answers) < 40:
        await asyncio.sleep(0)
    assert max(answers) == 1


def test_closing_a_half_sent_request_for_a_newer_one_is_no_error(logs: object) -> None:
    """uvloop, on which the server runs, raises RuntimeError for an answer to a connection that was closed."""
    problems: list[Any] = []

    async def scene() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, problem: problems.append(problem))
        async with open_port() as port:
            halves = [await port.connect(READY[:20]) for _ in range(OPERATOR_LIMITS.open + OPERATOR_LIMITS.pending)]
            assert b"200 OK" in await port.ask(READY)
            assert await halves[0].read() == b""
        gc.collect()

    uvloop.run(scene())
    assert problems == []


async def test_a_half_sent_request_ends_after_the_time_limit(port: Port, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "REQUEST_TIMEOUT_S", 0.5)  # time enough for the half to arrive
    assert b"408" in await (await port.connect(READY[:20])).read()
    assert await (await port.connect()).read() == b"", "a silent connection is closed without an answer"


async def test_clients_that_never_read_do_not_keep_a_probe_out(port: Port) -> None:
    for _ in range(OPERATOR_LIMITS.open):
        await port.connect(METRICS * 1000)
        port.writers[-1].transport.pause_reading()  # type: ignore[attr-defined]
    assert b"200 OK" in await port.ask(READY)


async def test_an_answer_that_is_not_read_ends_the_connection(port: Port, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "ANSWER_TIMEOUT_S", 0.01)
    monkeypatch.setattr(port, "status", lambda: "x" * (32 << 20))
    reader = await port.connect(b"GET /status.json HTTP/1.1\r\nhost: x\r\n\r\n")
    port.writers[-1].transport.pause_reading()  # type: ignore[attr-defined]
    async with asyncio.timeout(60):
        while port.server.num_connections:
            await asyncio.sleep(0.002)
    port.writers[-1].transport.resume_reading()  # type: ignore[attr-defined]
    assert len(await reader.read()) < 32 << 20


async def test_metrics_and_status_are_shared(port: Port) -> None:
    one, two = await asyncio.gather(*(port.ask(b"GET /status.json HTTP/1.1\r\nhost: x\r\n\r\n") for _ in range(2)))
    assert one == two
    assert port.num_status == 1


async def test_rendering_in_pieces_is_rendering_as_a_whole() -> None:
    registry = PrometheusObserver().registry
    assert await render_metrics(registry) == generate_latest(registry)
    assert await render_metrics(CollectorRegistry()) == b""


async def test_other_tasks_run_between_the_families_of_the_metrics() -> None:
    registry = PrometheusObserver().registry
    num_turns = 0

    async def count_turns() -> None:
        nonlocal num_turns
        while True:
            num_turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count_turns())
    await render_metrics(registry)
    counting.cancel()
    assert num_turns >= len(list(registry.collect())) > 10


async def test_a_result_is_made_once_per_interval() -> None:
    now = 5.0
    made = 0

    async def make() -> bytes:
        nonlocal made
        made += 1
        await asyncio.sleep(0)
        if made == 3:
            raise ZeroDivisionError
        return b"%d" % made

    result = SharedResult(make, 1.0, clock=lambda: now)
    assert await asyncio.gather(result.get(), result.get()) == [b"1", b"1"]
    now += 0.9
    assert await result.get() == b"1"
    now += 0.1
    assert await result.get() == b"2"
    now += 1
    with pytest.raises(ZeroDivisionError):
        await result.get()
    assert await result.get() == b"4", "a failure is not kept"
    await result.close()


async def test_a_caller_that_leaves_does_not_cancel_the_others() -> None:
    going: asyncio.Event = asyncio.Event()

    async def make() -> bytes:
        await going.wait()
        return b"1"

    result = SharedResult(make, 1.0)
    leaving, staying = (asyncio.create_task(result.get()) for _ in range(2))
    await asyncio.sleep(0)
    leaving.cancel()
    going.set()
    assert await staying == b"1"
    await result.close()
