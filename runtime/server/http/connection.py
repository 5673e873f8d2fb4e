"""`HTTPConnection`: one client's HTTP/1.1 connection, with limits on its requests and unread output.

One request is answered at a time. The connection is read meanwhile, so that a client that leaves is noticed even in the
queue and in prefill; bytes that it sends ahead are kept within a limit. A client that half-closes has left. Must not
import routes' handlers or the listening sockets.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging

import h11
from structlog.contextvars import bind_contextvars

from ...common.errors import QuireError
from ...common.logs import new_id
from ...net.acceptor import AcceptedConnection, linger
from ...net.http_input import (
    BYTES_PER_CHUNK,
    MAX_SMALL_CHUNKS,
    PIECE_BYTES,
    ChunkLines,
    can_answer,
    check_chunks,
    check_head,
    check_kept,
    check_request,
)
from ..app_context import AppContext
from ..requests.request_log import quire_error
from ..requests.send_buffer import SendBuffer
from ..tenancy.tenant_bytes import PendingInput
from ..tenancy.tenants import Tenant
from .errors import BadRequest, DoorForm
from .request_cycle import RequestCycle
from .router import HTTPRouter, Route

READ_BYTES = 64 << 10
MAX_HEAD_BYTES = 32 << 10
MAX_AHEAD_BYTES = 64 << 10  # bytes that a client may send before its request is answered


class HTTPConnection:
    """`run` serves the client until either side ends the connection."""

    def __init__(self, accepted: AcceptedConnection, context: AppContext, router: HTTPRouter) -> None:
        self._accepted = accepted
        self._reader = accepted.reader
        self._writer = accepted.writer
        self._context = context
        self._config = context.config
        self._router = router
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEAD_BYTES)
        self._send_buffer = SendBuffer(
            accepted.writer,
            max_bytes=self._config.max_outgoing_bytes,
            write_timeout_s=self._config.write_timeout_ms / 1000,
        )
        self._pending_input = PendingInput(context.pending.of(None), self._refuse)
        self._tenant: Tenant | None = None  # tenant of the last request
        self._ahead = bytearray()  # bytes that the client has sent before its request was answered
        self._num_requests = 0
        self._cycle: RequestCycle | None = None  # cycle from the request's head to the end of its answer
        self._route: Route | None = None  # route of the cycle
        self._answering: asyncio.Task[None] | None = None
        self._serving: asyncio.Task[None] | None = None

    @staticmethod
    def can_serve(first_bytes: bytearray) -> bool:
        """Return whether `first_bytes` of a client can be answered."""
        return can_answer(first_bytes, MAX_HEAD_BYTES)

    @property
    def tasks(self) -> list[asyncio.Task[None]]:
        """The task that answers a request, if there is one."""
        return [] if self._answering is None or self._answering.done() else [self._answering]

    @property
    def unsent_bytes(self) -> int:
        return self._send_buffer.unsent_bytes

    async def run(self, refusal: QuireError | None = None) -> None:
        """Serve the client, or only answer with `refusal`, then close. Never raises."""
        bind_contextvars(connection=new_id(), peer=self._accepted.address)
        self._serving = asyncio.create_task(self._serve(refusal))
        sending = asyncio.create_task(self._send_buffer.run())
        try:
            await asyncio.wait({self._serving, sending}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if self._cycle is not None:
                self._cycle.leave("slow_reader" if self._send_buffer.is_stuck else "disconnect")
            self._serving.cancel()
            self._send_buffer.close()
            tasks = [self._serving, sending, *self.tasks]
            try:
                await asyncio.wait(tasks)
                await linger(self._reader, self._writer)
            finally:
                if (limit := self._send_buffer.exceeded) is not None:
                    event = "connection closed: the client reads too slowly"
                    name = None if self._tenant is None else self._tenant.name
                    self._context.connection_log.write(logging.WARNING, event, limit=limit, tenant=name)
                for task in tasks:
                    task.cancel()
                self._send_buffer.leave()
                self._pending_input.leave()
                self._writer.transport.abort()
                # The tasks refer to this connection; without them it is freed now and not by a later garbage
                # collection.
                self._serving = self._answering = None

    def go_away(self) -> None:
        """Close the connection after the next answer: the server is draining."""
        if self._cycle is not None:
            self._cycle.is_last = True

    def fail_requests(self, error: QuireError) -> None:
        """End the live request with `error` now."""
        if self._cycle is not None and self.tasks:
            self._cycle.fail(error, "shutdown")
            for task in self.tasks:
                task.cancel()

    def shut_down(self, error: QuireError) -> None:
        """End the connection from the server's side, its request with `error`."""
        self.fail_requests(error)
        self._end()

    def abort(self) -> None:
        """Close without sending the rest."""
        self._writer.transport.abort()

    def _end(self) -> None:
        self._send_buffer.close()
        if self._serving is not None:
            self._serving.cancel()

    def _refuse(self, error: QuireError) -> None:
        """End the connection: it holds more pending input than its tenant's share."""
        self._context.connection_log.write(logging.WARNING, "connection refused", code=error.code, reason=str(error))
        self._answer_error(error)
        self._end()

    def _answer_error(self, error: QuireError) -> None:
        """Send the error for a request without a cycle or an answer, and close."""
        if self._http.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            head = h11.Request(method="GET", target="/", headers=[("host", "")])
            cycle = self._cycle or self._new_cycle(head)
            cycle.is_last = True
            cycle.refuse(error)

    def _new_cycle(self, head: h11.Request) -> RequestCycle:
        return RequestCycle(self._http, self._send_buffer, head, self._num_requests, self._router.form)

    # Requests

    async def _serve(self, refusal: QuireError | None) -> None:
        """Answer one request after the other."""
        try:
            if refusal is not None:
                raise refusal
            while await self._read_request():
                await self._answer_request()
                if self._http.our_state is not h11.DONE or self._http.their_state is not h11.DONE:
                    return
                self._cycle = None
                self._http.start_next_cycle()
        except OSError:
            pass
        except h11.RemoteProtocolError as error:
            error.__traceback__ = None  # a frame of h11 holds the error
            self._refuse_bytes(error)
        except Exception as error:
            refusal = quire_error(error, "connection").with_traceback(None)  # the traceback's frames hold the refusal
            self._context.connection_log.write(logging.WARNING, "http request refused", code=refusal.code)
            self._answer_error(refusal)

    def _refuse_bytes(self, error: h11.RemoteProtocolError) -> None:
        """Answer bytes that are not HTTP, or no complete request."""
        if self._http.their_state is not h11.CLOSED and not self._reader.at_eof():
            status = error.error_status_hint
            self._answer_error(BadRequest(f"not a valid HTTP request: {error}", status=status))

    async def _read_request(self) -> bool:
        """Read a request into a new cycle; return False at the end of the connection. Raises its refusal."""
        head = await self._read_head()
        if head is None:
            return False
        self._num_requests += 1
        cycle = self._cycle = self._new_cycle(head)
        cycle.is_last = self._context.leaves_at is not None
        self._route = route = self._router.route(cycle)
        if cycle.tenant is not None:
            self._accepted.settle()
            self._count_for(cycle.tenant)
        cycle.body = await self._read_body(head, takes_body=route.takes_body)
        return True

    async def _read_head(self) -> h11.Request | None:
        """Return the next request's head. Raises RemoteProtocolError."""
        loop = asyncio.get_running_loop()
        head_s = self._config.handshake_timeout_ms / 1000
        is_first = not self._num_requests
        silence_s = head_s if is_first else self._config.idle_timeout_ms / 1000
        is_begun = bool(self._ahead or self._http.trailing_data[0])
        awaited_since = self._accepted.awaited_since if is_first else loop.time()
        try:
            async with asyncio.timeout_at(awaited_since + (head_s if is_begun else silence_s)) as limit:
                while True:
                    if self._http.trailing_data[0]:
                        await self._router.turns.wait()
                    check_head(self._http, MAX_HEAD_BYTES)
                    event = self._http.next_event()
                    if isinstance(event, h11.Request):
                        check_request(event)
                        return event
                    if event is not h11.NEED_DATA:
                        return None
                    data = await self._receive(PIECE_BYTES)
                    self._http.receive_data(data)
                    if data and not is_begun and not is_first:
                        is_begun = True
                        limit.reschedule(loop.time() + head_s)
        except TimeoutError:
            if not self._http.trailing_data[0]:
                return None
            text = f"a request's head must be complete within {head_s:g} s"
            raise h11.RemoteProtocolError(text, error_status_hint=408) from None

    async def _read_body(self, head: h11.Request, *, takes_body: bool) -> bytes:
        """Return the request's body. Raises BadRequest if it is too long or too slow, or RemoteProtocolError."""
        limit = self._config.max_frame_bytes if takes_body else 0
        text = f"the body is longer than {limit} bytes" if takes_body else "this method of this path takes no body"
        too_long = BadRequest(text, error_code="request_too_large", status=413)
        lengths = [value for name, value in head.headers if name == b"content-length"]
        if lengths and int(lengths[0]) > limit:
            raise too_long
        timeout_ms = self._config.frame_timeout_ms
        in_chunks = _has(head, b"transfer-encoding")
        lines = ChunkLines(self._http, in_chunks=in_chunks)
        body = bytearray()
        num_chunks = 0
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                if in_chunks:
                    check_chunks(self._http)
                while True:
                    lines.check()
                    event = self._http.next_event()
                    if isinstance(event, h11.Data):
                        lines.parsed(event)
                        if len(body) + len(event.data) > limit:
                            raise too_long
                        body += event.data
                        num_chunks += event.chunk_end
                        if num_chunks > MAX_SMALL_CHUNKS + len(body) // BYTES_PER_CHUNK:
                            raise BadRequest(f"the body has {num_chunks} chunks of few bytes; send larger ones")
                        self._pending_input.set_frame_bytes(len(body))
                    elif event is h11.NEED_DATA:
                        if self._http.they_are_waiting_for_100_continue:
                            self._send_100_continue()
                        await self._receive_body(in_chunks=in_chunks)
                    else:
                        return bytes(body)
        except TimeoutError:
            raise BadRequest(f"a body must be complete within {timeout_ms} ms", status=408) from None
        finally:
            self._pending_input.set_frame_bytes(0)

    async def _receive_body(self, *, in_chunks: bool) -> None:
        """Pass more of a body to h11. Raises RemoteProtocolError."""
        if in_chunks:
            check_kept(self._http)
            await asyncio.sleep(0)  # other tasks run between two pieces
        self._http.receive_data(await self._receive(PIECE_BYTES if in_chunks else READ_BYTES))
        if in_chunks:
            check_chunks(self._http)

    async def _receive(self, num_bytes: int) -> bytes:
        """Return at most `num_bytes` of the client's bytes, none at the end."""
        if not self._ahead:
            return await self._reader.read(num_bytes)
        data = bytes(self._ahead[:num_bytes])
        del self._ahead[:num_bytes]
        return data

    def _send_100_continue(self) -> None:
        if data := self._http.send(h11.InformationalResponse(status_code=100, headers=[], reason="Continue")):
            self._send_buffer.send_bytes(data)

    def _count_for(self, tenant: Tenant) -> None:
        """Count the connection's bytes for the tenant of its request; each request may have another key."""
        if tenant is not self._tenant:
            self._tenant = tenant
            bind_contextvars(tenant=tenant.name)
            self._send_buffer.leave()
            self._send_buffer.join(self._context.unsent.of(tenant.name))
            self._pending_input.move_to(self._context.pending.of(tenant.name))

    async def _answer_request(self) -> None:
        """Answer the request while the connection is read on."""
        cycle = self._cycle
        route = self._route
        assert cycle is not None, "a request was read"
        assert route is not None, "a request was read"
        self._answering = asyncio.create_task(self._router.answer(cycle, route))
        reading = asyncio.create_task(self._read_ahead(cycle))
        try:
            await asyncio.wait({self._answering})
        finally:
            reading.cancel()
            await asyncio.wait({reading})

    async def _read_ahead(self, cycle: RequestCycle) -> None:
        """Keep the bytes that the client sends ahead. Leave the cycle when the client has left or sends too much."""
        with contextlib.suppress(OSError):
            while len(self._ahead) <= MAX_AHEAD_BYTES and (data := await self._reader.read(READ_BYTES)):
                self._ahead += data
        cycle.leave("disconnect")
        if self._answering is not None and not cycle.cancels:
            self._answering.cancel()


def plain_answer(form: DoorForm) -> bytes:
    """Return the answer to a request without TLS at a port that wants TLS."""
    answer = form.error_answer(BadRequest("this port takes TLS only; the URL begins with https://"), (), {}, "")
    headers = [
        ("content-type", answer.media_type),
        ("content-length", str(len(answer.content))),
        ("connection", "close"),
    ]
    lines = ["HTTP/1.1 400 Bad Request", *(f"{name}: {value}" for name, value in headers)]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + answer.content


def _has(head: h11.Request, header: bytes) -> bool:
    return any(name == header for name, _ in head.headers)
