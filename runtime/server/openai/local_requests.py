"""`LocalRequests`: requests that the server sends to itself, without a socket, in the lowest priority class."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any, cast

import h11

from ...common.errors import Unavailable
from ...common.server_config import ServerConfig
from ...engine.facade import EngineFacade
from ..app_context import AppContext
from ..batches.lines import BatchLine, LineAnswer
from ..http import BodyReader, HTTPRouter
from ..http.errors import HTTPAnswer
from ..http.request_cycle import RequestCycle
from ..models.catalog import ModelCatalog
from ..monitoring import PrometheusObserver, Readiness
from ..requests.live_requests import LiveRequests
from ..requests.resume import ReplayStore
from ..requests.send_buffer import SendBuffer
from ..tenancy.auth import Keyring
from ..tenancy.tenant_bytes import EqualShares
from ..tenancy.tenants import Tenant
from .api import OpenAIDoor
from .errors import error_answer

NUMBER = 0  # number of a request on its connection: no connection has a request 0
FIRST_RETRY_PAUSE_S = 0.02
LONGEST_RETRY_PAUSE_S = 5.0
ENGINE_PATIENCE_S = 600.0  # time without an engine after which a line ends its batch
UNAVAILABLE_STATUS = 503


@contextlib.asynccontextmanager
async def without_sockets(engine: EngineFacade, config: ServerConfig, model: str) -> AsyncIterator[LocalRequests]:
    """Answer requests of one tenant without limits, by an engine that no server offers to clients."""
    observer = PrometheusObserver()
    engine.set_observer(observer)
    texts = EqualShares("texts", "max_text_bytes", lambda: config.max_text_bytes)
    models = ModelCatalog.of_one(model, engine)
    requests = LiveRequests(models, observer, texts)
    replays = ReplayStore(requests, config, lambda: 1)
    context = AppContext(models, config, observer, Keyring.none(), requests, replays, "", "")
    bodies = BodyReader()
    door = OpenAIDoor(context, Readiness(engine.stats, config.stall_timeout_ms / 1000), bodies)
    try:
        yield LocalRequests(context, HTTPRouter(context, [door]), door)
    finally:
        await replays.close()
        bodies.close()


class LocalRequests:
    """Sends requests of tenants to the handlers of OpenAI's API."""

    def __init__(self, context: AppContext, router: HTTPRouter, door: OpenAIDoor) -> None:
        self._context = context
        self._router = router
        self._door = door

    async def send(self, tenant: Tenant, line: BatchLine) -> LineAnswer:
        """Return the answer to a line, once it is not a refusal for now. A cancelled call cancels its request.

        Raises Unavailable if the engine has not answered for `ENGINE_PATIENCE_S`.
        """
        pause_s = FIRST_RETRY_PAUSE_S
        unavailable_s = 0.0
        while True:
            answer = await self._send(tenant, line)
            if answer.headers.get("x-should-retry") != "true":
                return LineAnswer(answer.status, answer.content)
            if unavailable_s > ENGINE_PATIENCE_S:
                raise Unavailable(f"the engine has not answered for {ENGINE_PATIENCE_S:.0f} s")
            retry_ms = answer.headers.get("retry-after-ms")
            pause_s = min(max(pause_s, int(retry_ms or 0) / 1000), LONGEST_RETRY_PAUSE_S)
            await asyncio.sleep(pause_s)
            unavailable_s += pause_s if answer.status == UNAVAILABLE_STATUS else 0
            pause_s *= 2

    async def _send(self, tenant: Tenant, line: BatchLine) -> HTTPAnswer:
        http = h11.Connection(h11.SERVER)
        http.receive_data(
            b"POST %b HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            b"x-request-id: %b\r\ncontent-length: 0\r\n\r\n" % (line.url.encode(), line.name.encode())
        )
        head = http.next_event()
        assert isinstance(head, h11.Request), "a whole request was received"
        http.next_event()
        received = _Received()
        buffer = SendBuffer(
            cast(asyncio.StreamWriter, received),
            max_bytes=self._context.config.max_outgoing_bytes,
            write_timeout_s=self._context.config.write_timeout_ms / 1000,
        )
        cycle = RequestCycle(http, buffer, head, NUMBER, self._door.form)
        cycle.tenant = tenant
        cycle.body = line.body
        cycle.is_batch = True
        buffer.join(self._context.unsent.of(tenant.name))
        answering = asyncio.create_task(self._router.answer(cycle, self._door.paths[line.url]["POST"]))
        try:
            await asyncio.shield(answering)
            while buffer.unsent_bytes:  # noqa: ASYNC110 - the next turn of the loop writes the bytes
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            cycle.leave("client")
            if not cycle.cancels:
                answering.cancel()
            await asyncio.wait({answering})
            raise
        finally:
            buffer.close()
            buffer.leave()
        return received.answer()


class _Received:
    """A writer and its transport that keep what is written."""

    def __init__(self) -> None:
        self.transport: Any = self
        self._data = bytearray()

    def answer(self) -> HTTPAnswer:
        """Return the answer that was written."""
        client = h11.Connection(h11.CLIENT)
        client.send(h11.Request(method="POST", target="/", headers=[("host", "localhost")]))
        client.send(h11.EndOfMessage())
        client.receive_data(bytes(self._data))
        response = client.next_event()
        if not isinstance(response, h11.Response):  # the request was cancelled from elsewhere
            return error_answer(Unavailable("the request ended without an answer; try again"))
        content = bytearray()
        while isinstance(event := client.next_event(), h11.Data):
            content += event.data
        headers = {name.decode(): value.decode() for name, value in response.headers}
        return HTTPAnswer(response.status_code, bytes(content), headers.get("content-type", ""), headers)

    def write(self, data: bytes) -> None:
        self._data += data

    def set_write_buffer_limits(self, high: int) -> None:
        """Do nothing: every byte is taken at once."""

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return False

    def abort(self) -> None:
        """Do nothing: there is no connection."""

    async def drain(self) -> None:
        """Return at once."""
