"""The link between an API server and an engine host: the engine link's messages over TCP, and a few of its own.

Both ends are the same build and know the same secret (`greeting.py`). Times on the link are durations: a deadline is
the seconds that are left of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec

from ..common.errors import ProtocolError
from ..protocol.framing import next_payload, with_prefix
from ..workers.engine_link import (
    READ_BYTES,
    AddAnswer,
    AddEncoding,
    AddRequests,
    CancelRequest,
    DropRequest,
    EngineReady,
    ReadmitEncoding,
    ReadmitRequest,
    RequestsBegun,
    SpecT,
    StatsReport,
    StepReport,
    ToEngine,
)

MAX_MESSAGE_BYTES = 64 << 20
MAX_UNSENT_BYTES = 64 << 20  # to a peer that does not read; then the link is closed


class Heartbeat(msgspec.Struct, frozen=True, array_like=True, tag="HEARTBEAT"):
    """Sent each quarter of a second if nothing else is."""


class HostReady(EngineReady, frozen=True, array_like=True, tag="HOST"):
    """The first message of a host."""

    models_digest: str  # of the model's configuration
    max_num_waiting: int


class HostLeaving(msgspec.Struct, frozen=True, array_like=True, tag="LEAVING"):
    """The host takes no new requests and will close the link."""


class HostRequestFailed(msgspec.Struct, frozen=True, array_like=True, tag="REQUEST_FAILED"):
    """A request ended with an error that is not the scheduler's."""

    request_id: int
    error: str  # name of a class in common/errors.py
    message: str


ToHost = AddRequests | ReadmitRequest | AddEncoding | ReadmitEncoding | CancelRequest | DropRequest | Heartbeat
FromHost = (
    HostReady | HostLeaving | HostRequestFailed | Heartbeat | AddAnswer | RequestsBegun | StepReport | StatsReport
)
TO_HOST: msgspec.msgpack.Decoder[ToHost] = msgspec.msgpack.Decoder(ToHost)
FROM_HOST: msgspec.msgpack.Decoder[FromHost] = msgspec.msgpack.Decoder(FromHost)
_encode = msgspec.msgpack.Encoder().encode


class HostLink:
    """One end of a greeted connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, decoder: Any) -> None:
        self._reader = reader
        self._writer = writer  # kept: a writer that nothing refers to closes its transport
        self._transport = writer.transport
        self._decode = decoder.decode

    def send(self, message: FromHost | ToHost | ToEngine) -> None:
        """Write `message` without waiting; drop it on a closed link. A peer that does not read loses the link."""
        if not self._transport.is_closing():
            self._transport.write(with_prefix(_encode(message)))
            if self._transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
                self._transport.abort()

    async def receive_all(self, receive: Callable[[Any], None]) -> None:
        """Call `receive` with each message until the link ends. Raises ProtocolError for one that is not allowed."""
        received = bytearray()
        try:
            while data := await self._reader.read(READ_BYTES):
                received += data
                while (payload := next_payload(received, MAX_MESSAGE_BYTES)) is not None:
                    receive(self._decode(payload))
        except OSError:
            return
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise ProtocolError(f"a message cannot be read: {error}") from error

    def close(self) -> None:
        """Close this end after what was sent before has left."""
        self._transport.close()

    def abort(self) -> None:
        """Close this end immediately."""
        self._transport.abort()


def with_time_left(spec: SpecT, now: float) -> SpecT:
    """Return `spec` as it travels: its deadline is the seconds that are left."""
    return spec if spec.deadline is None else replace(spec, deadline=spec.deadline - now)


def arrived(spec: SpecT, request_id: int, now: float) -> SpecT:
    """Return a spec that travelled with another id, and its deadline on this machine's clock."""
    deadline = None if spec.deadline is None else now + spec.deadline
    return replace(spec, request_id=request_id, deadline=deadline)
