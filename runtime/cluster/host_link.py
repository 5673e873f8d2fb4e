"""The link between an API server and an engine host: the engine link's messages over TCP, and a few of its own.

Both ends are the same build and know the same secret (`greeting.py`). Times on the link are durations: a deadline is
the number of seconds left.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol, cast

import msgspec

from ..common.errors import ProtocolError
from ..protocol.framing import next_payload, with_prefix
from ..workers.engine_link import (
    AddAnswer,
    AddEncoding,
    AddRequests,
    CancelRequest,
    DropRequest,
    EngineReady,
    ImagePixels,
    PixelSender,
    ReadmitEncoding,
    ReadmitRequest,
    RequestsBegun,
    SpecT,
    StatsReport,
    StepReport,
    ToEngine,
)

MAX_MESSAGE_BYTES = 64 << 20
MAX_IMAGE_BYTES = 1 << 30  # pixels of all live requests of an API server
# Unsent bytes beyond which the link to a peer that does not read is closed. A host that takes over the requests of a
# lost host receives all of their tokens and images at once.
MAX_UNSENT_TO_SERVER_BYTES = 64 << 20
MAX_UNSENT_TO_HOST_BYTES = (1 << 30) + MAX_IMAGE_BYTES


class Heartbeat(msgspec.Struct, frozen=True, array_like=True, tag="HEARTBEAT"):
    """Sent each quarter of a second if nothing else is."""


class HostReady(EngineReady, frozen=True, array_like=True, tag="HOST"):
    """The first message of a host."""

    models_digest: str  # digest of the model's configuration
    max_num_waiting: int


class HostLeaving(msgspec.Struct, frozen=True, array_like=True, tag="LEAVING"):
    """The host takes no new requests and will close the link."""


class HostRestarting(msgspec.Struct, frozen=True, array_like=True, tag="RESTARTING"):
    """The host has no engine process until its next StatsReport."""

    request_ids: tuple[int, ...]  # requests that wait for a process; another host may continue them after a DropRequest


class HostRequestFailed(msgspec.Struct, frozen=True, array_like=True, tag="REQUEST_FAILED"):
    """A request ended with an error that is not the scheduler's."""

    request_id: int
    error: str  # name of a class in common/errors.py
    message: str


ToHost = (
    ImagePixels | AddRequests | ReadmitRequest | AddEncoding | ReadmitEncoding | CancelRequest | DropRequest | Heartbeat
)
FromHost = (
    HostReady
    | HostLeaving
    | HostRestarting
    | HostRequestFailed
    | Heartbeat
    | AddAnswer
    | RequestsBegun
    | StepReport
    | StatsReport
)
TO_HOST: msgspec.msgpack.Decoder[ToHost] = msgspec.msgpack.Decoder(ToHost)
FROM_HOST: msgspec.msgpack.Decoder[FromHost] = msgspec.msgpack.Decoder(FromHost)
_encode = msgspec.msgpack.Encoder().encode


class LinkConnection(Protocol):
    """The carrier of a link: a connection of the acceptor, or another system."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    address: str  # address of the peer, for logs

    def settle(self) -> None:
        """Note that the greeting is over."""


class HostLink(asyncio.Protocol):
    """One end of a greeted connection. Its messages are handled as they arrive: no task wakes for them."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, decoder: Any, max_unsent_bytes: int
    ) -> None:
        self._reader = reader
        self._writer = writer  # kept, because a writer without references closes its transport
        self._transport = cast(asyncio.Transport, writer.transport)  # a stream socket's
        self._decode = decoder.decode
        self._max_unsent_bytes = max_unsent_bytes
        self._received = bytearray()
        self._receive: Callable[[Any], None] = _ignore
        self._pixels = PixelSender()
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def send(self, message: FromHost | ToHost | ToEngine) -> None:
        """Write `message` without waiting; drop it on a closed link.

        The link to a peer that does not read is closed.
        """
        for part in self._pixels.parts(message):
            if not self._transport.is_closing():
                self._transport.write(with_prefix(_encode(part)))
                if self._transport.get_write_buffer_size() > self._max_unsent_bytes:
                    self._transport.abort()

    async def receive_all(self, receive: Callable[[Any], None]) -> None:
        """Call `receive` with each message until the link ends. Raises ProtocolError for an invalid message.

        Raises the errors of `receive`.
        """
        if self._reader.at_eof():
            return
        self._receive = receive
        self._transport.set_protocol(self)
        self._reader.feed_eof()  # makes the bytes after the greeting available without waiting
        self.data_received(await self._reader.read())
        await self._ended

    def close(self) -> None:
        """Close this end after the messages sent before have left."""
        self._transport.close()

    def abort(self) -> None:
        """Close this end immediately."""
        self._transport.abort()

    # asyncio.Protocol

    def data_received(self, data: bytes) -> None:
        self._received += data
        try:
            while not self._ended.done() and (payload := next_payload(self._received, MAX_MESSAGE_BYTES)) is not None:
                self._receive(self._decode(payload))
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            self._end(ProtocolError(f"a message cannot be read: {error}"))
        except Exception as error:
            self._end(error)

    def connection_lost(self, error: Exception | None) -> None:
        if not self._ended.done():
            self._ended.set_result(None)

    def _end(self, error: Exception) -> None:
        """Make `receive_all` raise `error`, and stop receiving."""
        if not self._ended.done():
            self._ended.set_exception(error)
        self._transport.pause_reading()


def _ignore(message: object) -> None:
    """Ignore messages before `receive_all`."""


def with_time_left(spec: SpecT, now: float) -> SpecT:
    """Return `spec` in the form of the link: its deadline is the number of seconds left."""
    return spec if spec.deadline is None else replace(spec, deadline=spec.deadline - now)


def arrived(spec: SpecT, request_id: int, now: float) -> SpecT:
    """Return a received spec with another id, and its deadline on this machine's clock."""
    deadline = None if spec.deadline is None else now + spec.deadline
    return replace(spec, request_id=request_id, deadline=deadline)
