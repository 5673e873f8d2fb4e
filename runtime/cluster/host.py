"""An engine host: offers the engine processes of this machine to many API servers.

Each API server has a session with its own ids. Neither the actions of a session nor its end affect other sessions.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

import structlog

from ...scheduler import (
    AdmissionEstimate,
    EncodeRequest,
    FinalCounters,
    QueuedRequest,
    QueueFull,
    Refused,
    Request,
    RequestUpdate,
    SchedulerError,
)
from ..common.errors import ProtocolError, QuireError, Unavailable
from ..engine import CoreListener, EngineStats, Prefilled, StepStats, sum_stats
from ..engine.stats import subtract_counters
from ..net.acceptor import Acceptor, ConnectionLimits
from ..net.address import Address
from ..net.listen import ListeningSocket
from ..net.tls import TLS
from ..workers import EnginePool
from ..workers.engine_link import (
    STATS_INTERVAL_S,
    AddAnswer,
    AddEncoding,
    AddRequests,
    CancelRequest,
    DropRequest,
    ImagePixels,
    PixelReceiver,
    ReadmitEncoding,
    ReadmitRequest,
    RequestsBegun,
    StatsReport,
    StepReport,
)
from ..workers.token_log import LoggedRequest
from .arriving import arrived_requests, arrived_texts, check_tokens
from .greeting import greet_server
from .host_link import (
    MAX_IMAGE_BYTES,
    MAX_UNSENT_TO_SERVER_BYTES,
    TO_HOST,
    Heartbeat,
    HostLeaving,
    HostLink,
    HostReady,
    HostRequestFailed,
    HostRestarting,
    LinkConnection,
    ToHost,
)

GREETING_TIMEOUT_S = 5.0
SILENCE_TIMEOUT_S = 10.0  # silence after which the requests of an API server are dropped
DRAIN_POLL_S = 0.05
CONNECTION_LIMITS = ConnectionLimits(open=1024, pending=64, pending_per_address=32)
SESSION_IDS = 1 << 40  # request ids of one session; the API server's ids are these modulo SESSION_IDS

T = TypeVar("T", RequestUpdate, Prefilled, HostRequestFailed)
_log = structlog.get_logger("quire.cluster")


class EngineHost:
    """A server of `pool`, which it starts, for the API servers that know `secret`."""

    def __init__(
        self, pool: EnginePool, secret: bytes, models_digest: str, max_num_waiting: int, max_image_memory: int
    ) -> None:
        self.pool = pool
        self.address: Address | None = None  # address of the open port, from `listen` on; other links need none
        self._secret = secret
        self._ready = HostReady(pool.info, 0, models_digest, max_num_waiting)
        self._max_image_memory = max_image_memory
        self._sessions: dict[int, ServerSession] = {}
        self._next_number = 0
        self._is_leaving = False
        self._acceptor: Acceptor | None = None
        pool.start(
            CoreListener(self._publish, self._fail, self._observe, begun=self._note_begun, interrupted=self._interrupt)
        )
        self._sending_stats = asyncio.create_task(self._send_stats(), name="quire-host-stats")

    def listen(self, listening: ListeningSocket, tls: TLS | None = None) -> None:
        """Serve the connections of a listening socket until `close`."""
        self.address = listening.address
        self._acceptor = Acceptor(
            listening.socket, self.serve, CONNECTION_LIMITS, tls=tls, handshake_timeout_s=GREETING_TIMEOUT_S
        )

    async def serve(self, connection: LinkConnection) -> None:
        """Serve one connection until either end closes it. Errors of the peer are logged."""
        peer = connection.address
        try:
            async with asyncio.timeout(GREETING_TIMEOUT_S):
                await greet_server(connection.reader, connection.writer, self._secret)
        except (QuireError, OSError, EOFError) as error:
            is_probe = isinstance(error, asyncio.IncompleteReadError) and not error.partial  # the peer sent nothing
            log = _log.debug if is_probe else _log.warning
            log("connection refused", peer=peer, reason=str(error) or "no greeting in time")
            with contextlib.suppress(OSError):
                await connection.writer.drain()
                connection.writer.close()
            return
        connection.settle()
        link = HostLink(connection.reader, connection.writer, TO_HOST, MAX_UNSENT_TO_SERVER_BYTES)
        session = ServerSession(self._next_number, link, self.pool, self._refuse_images)
        self._next_number += 1
        self._sessions[session.number] = session
        _log.info("API server connected", peer=peer, number=session.number)
        link.send(self._ready)
        if self._is_leaving:
            link.send(HostLeaving())
        if not any(member.is_ready for member in self.pool.members):
            link.send(HostRestarting(()))
        reason = "it closed the link"
        try:
            await link.receive_all(session.receive)
        except ProtocolError as error:
            reason = str(error)
        finally:
            del self._sessions[session.number]
            num_dropped = session.end()
            _log.info("API server gone", peer=peer, number=session.number, dropped_requests=num_dropped, reason=reason)

    async def leave(self, timeout_s: float) -> None:
        """Announce that the host leaves, and wait until no request is left, at most `timeout_s` seconds."""
        self._is_leaving = True
        for session in self._sessions.values():
            session.link.send(HostLeaving())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while any(session.num_requests for session in self._sessions.values()):  # noqa: ASYNC110 - rare
                    await asyncio.sleep(DRAIN_POLL_S)

    async def close(self) -> None:
        """End every session. The engine processes are closed by their owner."""
        self._sending_stats.cancel()
        if self._acceptor is not None:
            await self._acceptor.close()

    # CoreListener

    def _publish(self, updates: Sequence[RequestUpdate]) -> None:
        for update in updates:
            if (session := self._session_of(update.request_id)) is not None:
                session.updates.append(update)
                session.flush_soon()

    def _fail(self, request_id: int, error: QuireError, _: FinalCounters) -> None:
        if (session := self._session_of(request_id)) is not None:
            session.failures.append(HostRequestFailed(request_id, type(error).__name__, str(error)))
            session.flush_soon()

    def _observe(self, step: StepStats, prefilled: Sequence[Prefilled]) -> None:
        for each in prefilled:
            if (session := self._session_of(each.request_id)) is not None:
                session.prefilled.append(each)
        for session in self._sessions.values():
            if session.updates or session.prefilled:
                session.flush(step)

    def _note_begun(self, begun: Sequence[Prefilled]) -> None:
        for each in begun:
            if (session := self._session_of(each.request_id)) is not None:
                session.begun.append(each)
                session.flush_soon()

    def _interrupt(self, request_ids: Sequence[int]) -> None:
        for session in self._sessions.values():
            session.interrupt(request_ids)

    def _refuse_images(self, num_bytes: int) -> QueueFull | None:
        """Return the refusal of a request whose images take `num_bytes`; None if they fit together with all others."""
        held = sum(session.image_bytes for session in self._sessions.values()) if num_bytes else 0
        if not held or held + num_bytes <= self._max_image_memory:
            return None
        return QueueFull(
            f"the images of this request take {num_bytes} bytes, those of others {held}, and all may take "
            f"{self._max_image_memory} (`max_image_memory`)",
            AdmissionEstimate(self.pool.num_waiting, 0, 0),
        )

    def _session_of(self, request_id: int) -> ServerSession | None:
        return self._sessions.get(request_id // SESSION_IDS)

    async def _send_stats(self) -> None:
        """Send each session the state of the engines, and close sessions that have been silent for too long."""
        while True:
            await asyncio.sleep(STATS_INTERVAL_S)
            try:
                stats = self.pool.stats()
            except Unavailable:  # the engines of this host are being restarted
                stats = None
            for session in list(self._sessions.values()):
                session.tick(stats)


class ServerSession:
    """One API server. Its requests have the ids `number * SESSION_IDS` + the API server's ids."""

    def __init__(
        self, number: int, link: HostLink, pool: EnginePool, refuse_images: Callable[[int], QueueFull | None]
    ) -> None:
        self.number = number
        self.link = link
        self.updates: list[RequestUpdate] = []  # the updates, like the next three lists, are not sent yet
        self.prefilled: list[Prefilled] = []
        self.begun: list[Prefilled] = []
        self.failures: list[HostRequestFailed] = []
        self._pool = pool
        self._refuse_images = refuse_images
        self._pixels = PixelReceiver(MAX_IMAGE_BYTES)
        self._first_id = number * SESSION_IDS
        self._requests: dict[int, QueuedRequest] = {}  # the host's own id -> request
        self._adding: dict[int, asyncio.Task[None]] = {}  # the host's own id -> task of an unanswered request
        self._counters_before = sum_stats(member.counters() for member in pool.members)
        self._silent_s = 0.0
        self._flush_handle: asyncio.Handle | None = None

    @property
    def num_requests(self) -> int:
        return len(self._requests)

    @property
    def image_bytes(self) -> int:
        """Bytes of the pixels of all requests."""
        specs = [request.spec for request in self._requests.values() if isinstance(request, Request)]
        pixels = [image.pixels for spec in specs for image in spec.images]
        return sum(map(len, {id(each): each for each in pixels}.values()))  # samples share images

    def receive(self, message: ToHost) -> None:
        """Handle a message. Raises ProtocolError or ValueError for invalid messages."""
        self._silent_s = 0.0
        info = self._pool.info
        match message:
            case ImagePixels(pixels):
                self._pixels.add(pixels)
            case AddRequests(generated=generated):
                for token_ids in generated:
                    check_tokens(token_ids, info.vocab_size)
                specs = arrived_requests(message.specs(), self._pixels, info, self._new_id, time.monotonic())
                requests = message.as_requests(specs)
                refusal = self._refuse_images(sum(len(image.pixels) for image in specs[0].images))
                self._add(requests, self._pool.add(requests) if refusal is None else _refuse(refusal))
            case AddEncoding(texts):
                encoding = EncodeRequest(arrived_texts(texts, info, self._new_id, time.monotonic()))
                self._add((encoding,), self._pool.add_encoding(encoding))
            case ReadmitRequest(spec, generated):
                check_tokens(generated, info.vocab_size)
                (here,) = arrived_requests((spec,), self._pixels, info, self._new_id, time.monotonic())
                self._readmit(Request(here, generated))
            case ReadmitEncoding(texts):
                self._readmit(EncodeRequest(arrived_texts(texts, info, self._new_id, time.monotonic())))
            case CancelRequest(request_id):
                self._pool.cancel(self._id_here(request_id))
            case DropRequest(request_id, reason, error):
                request_id = self._id_here(request_id)
                if (adding := self._adding.get(request_id)) is not None:
                    adding.cancel()
                self._pool.drop(request_id, reason, error)
                self._requests.pop(request_id, None)

    def tick(self, stats: EngineStats | None) -> None:
        """Send `stats` with the counters since the start of the session, or a heartbeat; end a silent session."""
        self._silent_s += STATS_INTERVAL_S
        if self._silent_s > SILENCE_TIMEOUT_S:
            _log.warning("API server silent", number=self.number, seconds=self._silent_s)
            self.link.abort()
        if stats is None:
            self.link.send(Heartbeat())
        else:
            of_session = subtract_counters(stats, self._counters_before)
            self.link.send(StatsReport(of_session, self._pool.predicted_wait_s))

    def end(self) -> int:
        """Drop every request of the session. Return their number."""
        if self._flush_handle is not None:
            self._flush_handle.cancel()
        for adding in set(self._adding.values()):
            adding.cancel()
        for request_id in self._requests:
            self._pool.drop(request_id, error="the API server left")
        num_dropped = len(self._requests)
        self._requests.clear()
        self.link.close()
        return num_dropped

    def flush_soon(self) -> None:
        """Send the held messages after this turn of the event loop, unless a step ends earlier."""
        if self._flush_handle is None:
            self._flush_handle = asyncio.get_running_loop().call_soon(self.flush)

    def flush(self, step: StepStats | None = None) -> None:
        """Send the held messages, except for requests that are not answered yet: the API server does not know them."""
        if self._flush_handle is not None:
            self._flush_handle.cancel()
            self._flush_handle = None
        if begun := self._drain(self.begun):
            self.link.send(RequestsBegun(tuple([self._elsewhere(each) for each in begun])))
        updates = [self._outgoing(update) for update in self._drain(self.updates)]
        prefilled = [self._elsewhere(each) for each in self._drain(self.prefilled)]
        if updates or prefilled or step is not None:
            num_waiting = self._pool.num_waiting
            self.link.send(StepReport(tuple(updates), num_waiting, 0, step, tuple(prefilled)))
        for failure in self._drain(self.failures):
            self._requests.pop(failure.request_id, None)
            self.link.send(HostRequestFailed(failure.request_id - self._first_id, failure.error, failure.message))

    def interrupt(self, request_ids: Sequence[int]) -> None:
        """Report that no engine process is left, and the ones of `request_ids` that another host may continue."""
        self.flush()
        theirs = [each - self._first_id for each in request_ids if each in self._requests and each not in self._adding]
        self.link.send(HostRestarting(tuple(theirs)))

    def _drain(self, held: list[T]) -> list[T]:
        taken = [each for each in held if each.request_id not in self._adding] if self._adding else list(held)
        held[:] = [each for each in held if each.request_id in self._adding] if self._adding else ()
        return taken

    def _outgoing(self, update: RequestUpdate) -> RequestUpdate:
        """Return an update with the API server's id. Forget a request that has ended."""
        theirs = update.request_id - self._first_id
        if not update.ended:
            return RequestUpdate(theirs, update.tokens)
        self._requests.pop(update.request_id, None)
        return update._replace(request_id=theirs)

    def _elsewhere(self, each: Prefilled) -> Prefilled:
        return Prefilled(each.request_id - self._first_id, each.num_tokens)

    def _add(self, requests: Sequence[QueuedRequest], adding: Coroutine[Any, Any, AdmissionEstimate]) -> None:
        task = asyncio.create_task(self._add_and_answer(requests, adding), name="quire-host-add")
        for request in requests:
            self._requests[request.request_id] = request
            self._adding[request.request_id] = task
        task.add_done_callback(lambda _: self._note_added(requests))

    async def _add_and_answer(
        self, requests: Sequence[QueuedRequest], adding: Coroutine[Any, Any, AdmissionEstimate]
    ) -> None:
        first_id = requests[0].request_id - self._first_id
        try:
            estimate = await adding
            answer = AddAnswer(first_id, estimate, self._pool.num_waiting)
        except (SchedulerError, QuireError) as refusal:
            for request in requests:
                self._requests.pop(request.request_id, None)
            refused = refusal.estimate if isinstance(refusal, Refused) else None
            answer = AddAnswer(first_id, refused, self._pool.num_waiting, type(refusal).__name__, str(refusal))
        self.link.send(answer)

    def _readmit(self, request: QueuedRequest) -> None:
        self._requests[request.request_id] = request
        self._pool.readmit(LoggedRequest(request, time.monotonic()))

    def _note_added(self, requests: Sequence[QueuedRequest]) -> None:
        """Send the messages held for requests whose answer has been sent."""
        for request in requests:
            self._adding.pop(request.request_id, None)
        self.flush()

    def _new_id(self, request_id: int) -> int:
        here = self._id_here(request_id)
        if here in self._requests:
            raise ProtocolError(f"request {request_id} is there already")
        return here

    def _id_here(self, request_id: int) -> int:
        if not 0 <= request_id < SESSION_IDS:
            raise ProtocolError(f"request id {request_id} is out of range")
        return self._first_id + request_id


async def _refuse(refusal: QueueFull) -> AdmissionEstimate:
    raise refusal
