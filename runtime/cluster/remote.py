"""One engine host from an API server's view: its link, the log of its requests, and their replay.

A host is lost when its link closes or has been silent for the heartbeat timeout. Its requests are then replayed at
another host, or, without another one, at the same host when it returns.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, cast

import structlog

from ...scheduler import NotAccepting
from ..common import errors
from ..common.errors import ConfigError, ProtocolError, QuireError, Unavailable
from ..engine import CoreInfo, HostState, HostStatus
from ..net.address import TCPAddress
from ..net.connecting import open_tcp, tls_error
from ..workers import HealthTimeouts
from ..workers.engine_link import AddAnswer, DropRequest, EngineReady, RequestsBegun, SpecT, StatsReport, StepReport
from ..workers.supervised_engine import SupervisedEngine
from ..workers.token_log import MAX_LOST_HOSTS, MAX_UNBEGUN_HOSTS, LoggedRequest
from .greeting import greet_host
from .host_link import (
    FROM_HOST,
    MAX_UNSENT_TO_HOST_BYTES,
    FromHost,
    Heartbeat,
    HostLeaving,
    HostLink,
    HostReady,
    HostRequestFailed,
    HostRestarting,
    with_time_left,
)
from .members import Member
from .plausible import check_answer, check_counts, check_stats, check_step, check_update

LINK_TIMEOUT_S = 2.0  # time for connecting and the greeting
RECONNECT_PAUSE_S = 0.1
_log = structlog.get_logger("quire.cluster")
LOST_HOSTS_REASON = (
    f"{MAX_LOST_HOSTS} hosts were lost while they computed this request, or {MAX_UNBEGUN_HOSTS} before they did; "
    "it is not tried again"
)


class Credentials(NamedTuple):
    """The credentials of an API server for its hosts."""

    secret: bytes  # secret of all hosts without their own
    tls: ssl.SSLContext | None = None  # None: the links are not encrypted


class HostLost(NotAccepting):
    """The host was lost before it answered; another host may be tried."""


@dataclass(slots=True)
class HostTraits:
    """The traits that all hosts of an API server must share, taken from the first host that connects."""

    models_digest: str  # digest of the model for which the API server tokenizes
    first: str = ""  # address of the first host
    info: CoreInfo | None = None  # description by the first host

    def check(self, address: str, ready: HostReady) -> None:
        """Raise ConfigError for a host with another model or other bits, a shorter context, or smaller images."""
        if ready.models_digest != self.models_digest:
            raise ConfigError(f"engine host {address} has another model than this API server; give both the same")
        if self.info is None:
            self.first = address
            self.info = ready.info
        if ready.info.fingerprint != self.info.fingerprint:
            raise ConfigError(
                f"engine host {address} computes other bits ({ready.info.fingerprint}) than {self.first} "
                f"({self.info.fingerprint}); start both with the same build, model, dtypes and page size, and in bf16 "
                "the same ISA level"
            )
        if ready.info.adapters != self.info.adapters:
            raise ConfigError(
                f"engine host {address} has other adapters ({_names(ready.info)}) than {self.first} "
                f"({_names(self.info)}), or other files; start both with the same"
            )
        if ready.info.max_model_len < self.info.max_model_len:
            raise ConfigError(
                f"engine host {address} has max_model_len {ready.info.max_model_len}, {self.first} has "
                f"{self.info.max_model_len}; set the same at both"
            )
        here, there = ready.info.images, self.info.images
        if here is not None and there is not None and here.num_tokens < there.num_tokens:
            raise ConfigError(
                f"engine host {address} takes images of {here.num_tokens} tokens, {self.first} of {there.num_tokens}; "
                "set the same max_image_tokens at both"
            )


class HostConnection:
    """A greeted link to a host. Implements `workers.supervisor.OpenEngine`."""

    pid = None
    is_stopped = False

    def __init__(
        self, link: HostLink, receive: Callable[[FromHost], None], on_heartbeat: Callable[[bool], None]
    ) -> None:
        self.link = link
        self.ready: asyncio.Future[EngineReady] = asyncio.get_running_loop().create_future()
        self.closed = asyncio.Event()
        self.problem: ProtocolError | None = None  # error that ended the link
        self._pass_on = receive
        self._on_heartbeat = on_heartbeat
        self._reading = asyncio.create_task(self._read(), name="quire-host-link")

    @classmethod
    async def open(
        cls,
        member: Member,
        credentials: Credentials,
        receive: Callable[[FromHost], None],
        on_heartbeat: Callable[[bool], None],
    ) -> HostConnection:
        """Connect and greet. Raises Unavailable, TLSError, ConfigError, ProtocolError or Unauthenticated."""
        writer: asyncio.StreamWriter | None = None
        address = member.address
        tls = credentials.tls
        try:
            async with asyncio.timeout(LINK_TIMEOUT_S):
                if isinstance(address, TCPAddress):
                    reader, writer = await open_tcp(address, tls, member.name)
                else:
                    reader, writer = await address.open()
                await greet_host(reader, writer, member.secret or credentials.secret)
            link = HostLink(reader, writer, FROM_HOST, MAX_UNSENT_TO_HOST_BYTES)
            connection = cls(link, receive, on_heartbeat)
            writer = None
            return connection
        except ssl.SSLError as error:
            raise tls_error(str(address), error) from error
        except (OSError, EOFError) as error:
            reasons = {TimeoutError: "no answer", asyncio.IncompleteReadError: "it closed the connection"}
            reason = reasons.get(type(error)) or str(error)
            raise Unavailable(f"engine host {address} cannot be reached: {reason}") from error
        except QuireError as error:
            raise type(error)(f"engine host {address}: {error}") from error
        finally:
            if writer is not None:
                writer.transport.abort()

    async def stop(self) -> None:
        """Close the link; the host drops the requests of this API server."""
        await self.kill()

    async def wait_after_close(self) -> None:
        """Return immediately: a host has no other sign of its end than the link."""

    async def kill(self) -> int:
        """Close the link and stop receiving. Idempotent."""
        self.link.abort()
        self._reading.cancel()
        await asyncio.wait([self._reading])
        return 0

    async def _read(self) -> None:
        try:
            await self.link.receive_all(self._receive)
        except ProtocolError as error:
            self.problem = error
        except Exception:  # the link is closed as for a lost host, and the supervisor continues
            _log.exception("a message of an engine host failed")
        finally:
            self.link.abort()
            self.closed.set()
            if not self.ready.done():
                self.ready.set_exception(self.problem or Unavailable("the engine host closed the link"))
                self.ready.exception()  # marked as retrieved: it may be that no task waits for it

    def _receive(self, message: FromHost) -> None:
        self._on_heartbeat(False)
        if isinstance(message, HostReady) == self.ready.done():
            raise ProtocolError("an engine host introduces itself once, with its first message")
        if isinstance(message, HostReady):
            self.ready.set_result(message)
        else:
            self._pass_on(message)


class HostSource:
    """A source that connects to one host repeatedly. Implements `workers.supervisor.EngineSource`."""

    what = "engine host"
    snapshot: str | None = None
    connection: HostConnection  # the latest
    ready: HostReady  # the host's last report about itself

    def __init__(self, member: Member, credentials: Credentials, traits: HostTraits) -> None:
        self.name = str(member.address)
        self.member = member  # may change: a host that returns to its address may have another secret
        self.problem: QuireError | None = None  # error of the last attempt
        self._credentials = credentials
        self._traits = traits
        self.adapters: dict[str, str] = {}  # hosts keep their own
        self._next_attempt = 0.0  # earliest time of the next attempt

    def ending(self, status: int) -> str:
        """See `EngineSource.ending`."""
        problem = self.connection.problem
        return "the link was closed" if problem is None else str(problem)

    async def open(self, receive: Callable[..., None], on_heartbeat: Callable[[bool], None]) -> HostConnection:
        """See `EngineSource.open`. Two attempts are at least RECONNECT_PAUSE_S apart."""
        now = asyncio.get_running_loop().time()
        self._next_attempt = max(now, self._next_attempt) + RECONNECT_PAUSE_S
        await asyncio.sleep(self._next_attempt - RECONNECT_PAUSE_S - now)
        try:
            self.connection = await HostConnection.open(self.member, self._credentials, receive, on_heartbeat)
        except QuireError as error:
            self.problem = error
            raise
        return self.connection

    def note_ready(self, ready: EngineReady) -> None:
        """Raise ConfigError for a host that cannot continue the requests of the others."""
        self.ready = cast(HostReady, ready)
        try:
            self._traits.check(self.name, self.ready)
        except ConfigError as error:
            self.problem = error
            raise
        self.problem = None


class RemoteHost(SupervisedEngine):
    """A host as a core whose requests outlive it. `move` continues a request elsewhere, and returns whether it did."""

    def __init__(
        self,
        source: HostSource,
        move: Callable[[LoggedRequest], bool],
        timeouts: HealthTimeouts,
        restart_timeout_s: float,
    ) -> None:
        super().__init__(source, 0, timeouts, restart_timeout_s, time.monotonic)
        self._source = source
        self._move = move
        self._is_leaving = False  # the host has announced that it will close the link
        self._is_failing = False  # the engines cannot be restarted, until the host reports their state
        self._restarting: HostRestarting | None = None  # last report of restarting engines; None while they compute
        self._num_moved = 0  # requests that continued at another host
        self.is_retired = False  # no longer a member: new requests go elsewhere, running requests continue

    @property
    def address(self) -> str:
        return self._source.name

    @property
    def problem(self) -> QuireError | None:
        """The error of the last attempt to connect; None before its end, and while connected."""
        return self._source.problem

    def connect(self) -> None:
        """Begin to connect, and keep trying until `close`."""
        self._supervisor.start()

    def rejoin(self, member: Member) -> None:
        """Become a member, possibly again: a new host may have a former one's address, with another secret."""
        self.is_retired = False
        self._source.member = member

    @property
    def takes_requests(self) -> bool:
        """Whether requests of a lost host can continue here."""
        return self.is_ready and not (self._is_leaving or self._is_failing or self.is_retired)

    @property
    def is_ready(self) -> bool:
        """Whether the host is connected and has an engine process, by its last report."""
        return super().is_ready and self._restarting is None

    @property
    def state(self) -> HostState:
        if not super().is_ready:
            return "down"
        if self.is_retired:
            return "removed"
        if self._is_leaving:
            return "leaving"
        return "failing" if self._is_failing else "up" if self.is_ready else "restarting"

    def status(self) -> HostStatus:
        """Return the state of this host for operators."""
        info = self.info if self._supervisor.num_opened else None
        return HostStatus(
            address=self.address,
            state=self.state,
            problem=None if self.problem is None else str(self.problem),
            bits="" if info is None else info.fingerprint,
            isa="" if info is None else info.isa,
            requests=self.num_requests,
            moved_requests=self._num_moved,
            predicted_wait_s=self.load.predicted_wait_s,
            engine=self.stats() if self.is_ready and self._counters.stats is not None else None,
        )

    def give_up(self) -> list[LoggedRequest]:
        """Remove and return the requests that wait for the host or its engines; fail unanswered ones with HostLost."""
        unanswered = self._pending_adds.refuse_all(HostLost(f"engine host {self.address} was lost"))
        left_there = [request.request_id for pending in unanswered for request in pending.requests]
        if self._restarting is not None:
            left_there += self._tokens.take_back(self._restarting.request_ids)
        for request_id in left_there:  # the link may be down
            self._send(DropRequest(request_id, None, "it goes on at another host"))
        given_up = super().give_up()
        self._num_moved += len(given_up)
        return given_up

    # ProcessOwner

    def receive(self, message: FromHost) -> None:  # type: ignore[override]  # a host says more than a process
        match message:
            case HostLeaving():
                self._is_leaving = True
            case HostRequestFailed(request_id, error, text):
                self._on_failed(request_id, _error_named(error)(text))
            case Heartbeat():
                pass
            case StepReport(updates, step=step, prefilled=prefilled):
                for update in updates:
                    if (entry := self._tokens.sent(update.request_id)) is not None:
                        check_update(update, entry, self.info)
                check_step(step, prefilled)
                super().receive(message)
            case RequestsBegun(requests):
                check_counts(*[each.num_tokens for each in requests])
                super().receive(message)
            case AddAnswer():
                check_answer(message)
                super().receive(message)
            case HostRestarting():
                self._restarting = message
                self._listener.interrupted(())
            case StatsReport():
                check_stats(message)
                was_lost = self._is_failing or self._restarting is not None
                self._is_failing = False
                self._restarting = None
                super().receive(message)
                if was_lost:
                    self._listener.resumed()
            case _:
                super().receive(message)

    def on_process_ready(self) -> None:
        self.info = self._source.ready.info
        self._max_num_waiting = self._source.ready.max_num_waiting
        super().on_process_ready()

    def on_process_exit(self, from_outside: bool, reason: str) -> None:
        self._forget_stats()
        self._pending_adds.on_process_exit(from_outside=True)
        self._end(self._tokens.on_host_lost(is_blameless=self._is_leaving), LOST_HOSTS_REASON)
        self._is_leaving = self._is_failing = False  # the host may return
        self._restarting = None
        self._listener.interrupted(())

    def on_tick(self) -> None:
        if self._supervisor.process is not None:
            self._source.connection.link.send(Heartbeat())
        super().on_tick()

    def _on_failed(self, request_id: int, error: QuireError) -> None:
        entry = self._tokens.give_up(request_id)
        if entry is None:
            return
        entry.num_lost_hosts += 1  # counts as a lost host, since its engines have ended for good
        is_lost = isinstance(error, Unavailable)
        self._is_failing = self._is_failing or is_lost
        if is_lost and entry.num_lost_hosts < MAX_LOST_HOSTS and self._move(entry):
            self._num_moved += 1
        else:
            self._listener.fail(request_id, error, entry.known_counters())
        self._note_idle()

    def _check_accepting(self) -> None:
        if self._is_leaving or self.is_retired:
            raise NotAccepting(f"engine host {self.address} is leaving")
        if self._is_failing:
            raise NotAccepting(f"the engines of host {self.address} cannot be restarted")
        super()._check_accepting()

    def _for_link(self, spec: SpecT) -> SpecT:
        return with_time_left(spec, self._clock())


def _names(info: CoreInfo) -> str:
    return ", ".join(info.adapters) or "none"


def _error_named(name: str) -> type[QuireError]:
    kind = getattr(errors, name, None)
    return kind if isinstance(kind, type) and issubclass(kind, QuireError) else errors.GenerationFailed
