"""The operator's HTTP port: `/metrics`, `/healthz`, `/readyz`, `/models` and a status page at `/`, in the event loop.

Only POST requests below `/models` change something: they load, unload and pin models. Clients can neither stall the
event loop nor close the port:
* Metrics and status are made at most once per `max_age_s` and shared.
* One connection is read and answered per turn of the event loop, new connections first.
* A connection has one request at a time, with time limits for the request and for reading the answer.
* Beyond the limits of connections, the connection that has been silent longest is closed for a new one.

A browser loads only the page's own script and style sheet. Must not import the protocol.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from http import HTTPStatus
from importlib.resources import files
from types import MappingProxyType
from typing import NamedTuple

import h11
import msgspec
import structlog
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.openmetrics import exposition as openmetrics

from ...common.logs import BoundedLog
from ...net.acceptor import AcceptedConnection, Acceptor, ConnectionLimits
from ...net.http_input import check_head, check_request
from ..tenancy.tenants import Turns
from .model_operations import OPERATOR_MODELS, ModelOperations
from .pages import PAGE_HEADERS, read_page
from .readiness import Readiness
from .status import Status

# All connections stay pending, so that the longest silent one is closed first; `open` leaves room for connections that
# are being closed. A turn of the event loop accepts only as many as it answers: a probe waits in the system's queue
# instead.
OPERATOR_LIMITS = ConnectionLimits(open=96, pending=64, pending_per_address=32, accepts_per_turn=1)
REQUEST_TIMEOUT_S = 5.0  # limit from the accept, or the end of the last answer, to the end of the request
ANSWER_TIMEOUT_S = 5.0  # limit from the first to the last byte of an answer
ANSWER_PAUSE_S = 0.05  # pause between the answers of one connection
MAX_REQUEST_BYTES = 16 << 10
REQUEST_READ_BYTES = 4 << 10
METRICS_MAX_AGE_S = 1.0
STATUS_MAX_AGE_S = 0.5

METRICS_PATH = "/metrics"
OPENMETRICS = b"application/openmetrics-text"
END_OF_OPENMETRICS = b"# EOF\n"
STATUS_PAGE = ("status.html", "status.css", "status.js")  # files in this folder
TEXT = "text/plain; charset=utf-8"
NOT_CACHED = {**PAGE_HEADERS, "cache-control": "no-store"}

_log = structlog.get_logger("quire.server")


class Answer(NamedTuple):
    """One HTTP answer; `headers` are added to content-type and content-length."""

    content: bytes
    media_type: str = TEXT
    status_code: int = 200
    headers: Mapping[str, str] = MappingProxyType({})


class OperatorServer:
    """A server on a listening socket, until `close`."""

    def __init__(
        self,
        registry: CollectorRegistry,
        readiness: Readiness,
        status: Callable[[], Status],
        listening: socket.socket,
        models: ModelOperations,
    ) -> None:
        self._models = models
        self._readiness = readiness
        self._status = status
        self._metrics_cache = SharedResult(lambda: render_metrics(registry), METRICS_MAX_AGE_S)
        self._openmetrics_cache = SharedResult(lambda: render_openmetrics(registry), METRICS_MAX_AGE_S)
        self._status_cache = SharedResult(self._render_status, STATUS_MAX_AGE_S)
        self._answers = {
            "/healthz": self._healthz,
            "/readyz": self._readyz,
            "/status.json": self._status_json,
            OPERATOR_MODELS: self._models_json,
        }
        page = read_page(files(__package__), *STATUS_PAGE)
        self._page = {path: Answer(*entry, headers=NOT_CACHED) for path, entry in page.items()}
        self._warnings = BoundedLog(_log)
        self._turns = Turns()
        self._acceptor = Acceptor(listening, self._serve, OPERATOR_LIMITS)

    @property
    def num_connections(self) -> int:
        return self._acceptor.num_open

    async def close(self) -> None:
        await self._acceptor.close()
        await self._metrics_cache.close()
        await self._openmetrics_cache.close()
        await self._status_cache.close()

    # Answers

    async def metrics(self, accepted: bytes) -> Answer:
        """Answer with the text that Prometheus reads: with exemplars if the header `accept` has OpenMetrics."""
        if OPENMETRICS in accepted.lower():
            return Answer(await self._openmetrics_cache.get(), openmetrics.CONTENT_TYPE_LATEST)
        return Answer(await self._metrics_cache.get(), CONTENT_TYPE_LATEST)

    async def _healthz(self) -> Answer:
        """Answer while the event loop runs."""
        return Answer(b"ok\n")

    async def _readyz(self) -> Answer:
        problem = self._readiness.problem()
        return Answer(f"{problem or 'ready'}\n".encode(), status_code=503 if problem else 200)

    async def _status_json(self) -> Answer:
        return Answer(await self._status_cache.get(), "application/json", headers=NOT_CACHED)

    async def _models_json(self) -> Answer:
        return Answer(msgspec.json.encode(self._models.status()), "application/json", headers=NOT_CACHED)

    def _act(self, request: h11.Request) -> Answer:
        """Change a model as an operator's POST says."""
        path = request.target.partition(b"?")[0].decode("ascii")
        outcome = self._models.act(path, dict(request.headers).get(b"origin"))
        media_type = "application/json" if outcome.is_json else TEXT
        return Answer(outcome.content, media_type, outcome.status_code, NOT_CACHED)

    async def _render_status(self) -> bytes:
        return msgspec.json.encode(self._status())

    async def _answer(self, request: h11.Request) -> Answer:
        if request.method == b"POST" and request.target.startswith(f"{OPERATOR_MODELS}/".encode()):
            return self._act(request)
        if request.method not in (b"GET", b"HEAD"):
            return Answer(b"allowed: GET and HEAD\n", status_code=405, headers={"allow": "GET, HEAD"})
        path = request.target.partition(b"?")[0].decode("ascii")
        if path in self._page:
            return self._page[path]
        if path not in self._answers and path != METRICS_PATH:
            return Answer(b"not found\n", status_code=404)
        try:
            if path == METRICS_PATH:
                return await self.metrics(b",".join(value for name, value in request.headers if name == b"accept"))
            return await self._answers[path]()
        except Exception as error:
            _log.error("http request failed", exc_info=error, path=path)
            return Answer(b"an internal error; see the server's log\n", status_code=500)

    # Connections

    async def _serve(self, accepted: AcceptedConnection) -> None:
        """Answer one request after the other, until the client closes or is too slow."""
        connection = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_REQUEST_BYTES)
        accepted.writer.transport.set_write_buffer_limits(high=0)  # drain waits until the system has every byte
        with contextlib.suppress(OSError):
            try:
                is_new = True
                while (request := await self._read(connection, accepted.reader, is_new)) is not None:
                    is_new = False
                    accepted.renew()
                    answer = await self._answer(request)
                    has_body = request.method != b"HEAD"
                    await _write(connection, accepted.writer, answer, has_body=has_body)
                    if connection.our_state is not h11.DONE or connection.their_state is not h11.DONE:
                        return
                    connection.start_next_cycle()
                    await asyncio.sleep(ANSWER_PAUSE_S)
                    await self._turns.wait()
            except h11.RemoteProtocolError as error:
                error.__traceback__ = None  # a frame of h11 holds the error
                self._warnings.write(logging.WARNING, "http request refused", peer=accepted.address, reason=str(error))
                if connection.our_state in (h11.IDLE, h11.SEND_RESPONSE):
                    answer = Answer(f"{error}\n".encode(), TEXT, error.error_status_hint, {"connection": "close"})
                    await _write(connection, accepted.writer, answer)

    async def _read(self, connection: h11.Connection, reader: asyncio.StreamReader, is_new: bool) -> h11.Request | None:
        """Return the next request, None at the end of the connection. Raises RemoteProtocolError, also for a body."""
        request: h11.Request | None = None
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                while True:
                    check_head(connection, MAX_REQUEST_BYTES)
                    event = connection.next_event()
                    if event is h11.NEED_DATA and request is None:
                        data = await reader.read(REQUEST_READ_BYTES)
                        await self._turns.wait(first=is_new)
                        connection.receive_data(data)
                    elif isinstance(event, h11.Request):
                        check_request(event)
                        request = event
                    elif isinstance(event, h11.EndOfMessage):
                        return request
                    elif isinstance(event, h11.ConnectionClosed):
                        return None
                    else:
                        raise h11.RemoteProtocolError("a request must not have a body", error_status_hint=413)
        except TimeoutError:
            if not connection.trailing_data[0]:
                return None
            limit = f"a request must be complete within {REQUEST_TIMEOUT_S:g} s"
            raise h11.RemoteProtocolError(limit, error_status_hint=408) from None


async def _write(
    connection: h11.Connection, writer: asyncio.StreamWriter, answer: Answer, *, has_body: bool = True
) -> None:
    """Send `answer`. Raises TimeoutError, an OSError, if the client does not read it in time."""
    headers = {"content-type": answer.media_type, "content-length": str(len(answer.content)), **answer.headers}
    status = HTTPStatus(answer.status_code)
    events: list[h11.Event] = [h11.Response(status_code=status, reason=status.phrase, headers=list(headers.items()))]
    if has_body:
        events.append(h11.Data(data=answer.content))
    events.append(h11.EndOfMessage())
    data = b"".join(connection.send(event) or b"" for event in events)
    async with asyncio.timeout(ANSWER_TIMEOUT_S):
        if writer.is_closing():  # the connection was closed for a newer one; uvloop would raise RuntimeError
            raise ConnectionResetError
        writer.write(data)
        await writer.drain()


class SharedResult:
    """The result of `make`, made at most once per `max_age_s` and shared by every caller of `get`."""

    def __init__(
        self,
        make: Callable[[], Coroutine[object, None, bytes]],
        max_age_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._make = make
        self._max_age_s = max_age_s
        self._clock = clock
        self._made_at = 0.0
        self._task: asyncio.Task[bytes] | None = None

    async def get(self) -> bytes:
        """Return a result that is at most `max_age_s` old. Raises what `make` raises; the next call tries again."""
        if self._task is None or (self._task.done() and self._is_stale(self._task)):
            self._made_at = self._clock()
            self._task = asyncio.create_task(self._make())
        return await asyncio.shield(self._task)

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    def _is_stale(self, task: asyncio.Task[bytes]) -> bool:
        return task.cancelled() or task.exception() is not None or self._clock() - self._made_at >= self._max_age_s


class _Families:
    """A registry of collected metric families."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> list[Metric]:
        return self._families


async def render_metrics(registry: CollectorRegistry) -> bytes:
    """Return the text for Prometheus: values of one moment, one family per turn of the event loop."""
    return b"".join([text async for text in _rendered(registry, generate_latest)])


async def render_openmetrics(registry: CollectorRegistry) -> bytes:
    """Return the text in the OpenMetrics format, which has exemplars, as `render_metrics` does."""
    texts = [text async for text in _rendered(registry, openmetrics.generate_latest)]
    return b"".join([*(text.removesuffix(END_OF_OPENMETRICS) for text in texts), END_OF_OPENMETRICS])


async def _rendered(registry: CollectorRegistry, render: Callable[[_Families], bytes]) -> AsyncIterator[bytes]:
    for family in list(registry.collect()):
        yield render(_Families([family]))
        await asyncio.sleep(0)
