"""`RequestCycle`: one HTTP request of a connection, and its answer: whole, or a stream of server-sent events.

Sending never waits: bytes that the system does not take count as unsent output of the connection. Must not import
routes.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from email.utils import formatdate
from http import HTTPStatus

import h11

from ...common.errors import QuireError
from ...common.logs import new_id
from ..monitoring import CancelCause
from ..requests.send_buffer import SendBuffer
from ..tenancy.tenants import Tenant
from .errors import DoorForm, HTTPAnswer

KEEP_ALIVE_S = 15.0  # pause between comments that keep a silent stream alive through proxies
EVENT_HEADERS = (("content-type", "text/event-stream; charset=utf-8"), ("x-accel-buffering", "no"))

END_OF_EVENT = b"\n\n"

_ABSOLUTE = re.compile(r"https?://(?P<host>[^/?#]*)(?P<path>.*)", re.IGNORECASE)
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._-]{1,128}")


class EventNumbers:
    """Numbers the events of a stream as `id`, and leaves out events that the client has received."""

    def __init__(self, first: int) -> None:
        """Begin with the event number `first`."""
        self._first = first
        self._next = 0

    def numbered(self, events: bytes) -> bytes:
        """Return the next events with their numbers."""
        first = self._next
        self._next = self._next + events.count(END_OF_EVENT)
        return b"".join(
            b"id: %d\n%b\n\n" % (number, event)
            for number, event in enumerate(events.split(END_OF_EVENT)[:-1], first)
            if number >= self._first
        )


class RequestCycle:
    """One request/response cycle, as h11 names it. The answer begins with `respond` or `begin_events`.

    After the client has left or the server has failed the request, sending has no effect.
    """

    def __init__(
        self, http: h11.Connection, send_buffer: SendBuffer, request: h11.Request, number: int, form: DoorForm
    ) -> None:
        self.form = form  # form of the API that answers
        self.number = number  # number of the request on its connection
        self.method = request.method.decode("ascii")
        self.headers = {name.decode("ascii"): value for name, value in request.headers}
        self.target = request.target.decode("ascii", "replace")
        if (whole := _ABSOLUTE.fullmatch(self.target)) is not None:  # the form that clients send to proxies
            self.target, self.headers["host"] = whole["path"] or "/", whole["host"].encode()
        self.body = b""
        self.field_names: Mapping[str, str] = {}  # engine's name of a field -> name in the body
        self.send_buffer = send_buffer
        self.tenant: Tenant | None = None  # once authenticated
        self.cancels: list[Callable[[CancelCause], object]] = []  # running requests
        self.is_last = False  # the connection closes after the answer
        self.is_over = False
        self._http = http
        self._is_chunked = request.http_version != b"1.0"
        self.log_id = new_id()
        given = self.headers.get("x-request-id", b"")
        self.given_id = given.decode() if _REQUEST_ID.fullmatch(given) else None
        self._request_id = self.given_id or self.log_id
        self.is_batch = False  # a line of a batch, which runs after all other requests
        self._has_begun_events = False
        self._num_events = 0
        self._numbers: EventNumbers | None = None  # None: the events have no numbers
        self._keep_alive: asyncio.TimerHandle | None = None

    @property
    def authenticated(self) -> Tenant:
        """The tenant of a request whose route needs a key."""
        assert self.tenant is not None, "authenticated"
        return self.tenant

    def respond(self, answer: HTTPAnswer) -> None:
        """Send a whole answer."""
        if self.is_over:
            return
        size = ("content-length", str(len(answer.content)))
        self._begin(answer.status, [("content-type", answer.media_type), size, *answer.headers.items()])
        if self.method != "HEAD":
            self._send(h11.Data(data=answer.content))
        self._send(h11.EndOfMessage())
        self.is_over = True

    async def respond_pieces(self, media_type: str, num_bytes: int, pieces: Iterator[bytes]) -> None:
        """Send a long answer in pieces, as fast as the client reads."""
        self._begin(200, [("content-type", media_type), ("content-length", str(num_bytes))])
        if self.method != "HEAD":
            for piece in pieces:
                await self.send_buffer.wait_until_short()
                if self.is_over:
                    return
                self._send(h11.Data(data=piece))
        self._send(h11.EndOfMessage())
        self.is_over = True

    def number_events(self, first: int) -> None:
        """Give numbers to the events of the stream, and send the events from `first` on."""
        self._numbers = EventNumbers(first)

    def begin_events(self) -> None:
        """Send the head of a stream."""
        if self.is_over:
            return
        self._begin(200, self.form.stream_headers)
        self._has_begun_events = True
        self._watch_silence(-1)

    def send_events(self, events: bytes, *, are_numbered: bool = True) -> None:
        """Send events, which may be none. Errors and comments are not numbered."""
        if are_numbered and self._numbers is not None:
            events = self._numbers.numbered(events)
        if self.is_over or not events:
            return
        self._num_events += 1
        self.send_buffer.send_bytes(b"%x\r\n%b\r\n" % (len(events), events) if self._is_chunked else events)

    def end_events(self) -> None:
        """End the stream."""
        if not self.is_over:
            self._send(h11.EndOfMessage())
        self._stop()

    def refuse(self, error: QuireError, fields: Collection[str] = ()) -> None:
        """End in `error`: the whole answer, or the last event of a stream, without `[DONE]` after it."""
        if self._has_begun_events:
            event = self.form.error_event(error, self.field_names, self._request_id)
            self.send_events(event, are_numbered=False)
            self.end_events()
        else:
            self.respond(self.form.error_answer(error, fields, self.field_names, self._request_id))

    def leave(self, cause: CancelCause) -> None:
        """Cancel the running requests: the client has left, or reads too slowly."""
        self._stop()
        for cancel in self.cancels:
            cancel(cause)

    def fail(self, error: QuireError, cause: CancelCause) -> None:
        """End in `error` now, independent of the engine."""
        self.refuse(error)
        self.leave(cause)

    def _begin(self, status: int, headers: Sequence[tuple[str, str]]) -> None:
        own = [
            ("date", formatdate(usegmt=True)),
            ("cache-control", "no-store"),
            (self.form.id_header, self._request_id),
        ]
        if self.is_last:
            own.append(("connection", "close"))
        try:
            reason = HTTPStatus(status).phrase
        except ValueError:  # 499
            reason = "Client Closed Request"
        self._send(h11.Response(status_code=status, reason=reason, headers=[*headers, *own]))

    def _send(self, event: h11.Event) -> None:
        if data := self._http.send(event):
            self.send_buffer.send_bytes(data)

    def _stop(self) -> None:
        self.is_over = True
        if self._keep_alive is not None:
            self._keep_alive.cancel()

    def _watch_silence(self, num_events: int) -> None:
        """Send the form's event of a silent stream if no event was sent since the last call."""
        if num_events == self._num_events:
            self.send_events(self.form.keep_alive, are_numbered=False)
        loop = asyncio.get_running_loop()
        self._keep_alive = loop.call_later(KEEP_ALIVE_S, self._watch_silence, self._num_events)
