"""The engine link: what passes between the server and an engine process, and how.

Frames on a unix socketpair: u32 big-endian length, then one msgpack array `[type, field, …]` per struct below. Both
ends are the same build, so this is no protocol for others; a child may die in the middle of a frame, and nothing more.
It must not know why somebody sends. One invariant: what crosses is the same on both sides, to the last bit.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, cast

import msgspec

from ...scheduler import AdmissionEstimate, FinishReason, RequestSpec, RequestUpdate
from ..common.config import EngineConfig
from ..engine import CoreInfo, EngineStats, Prefilled, StepStats
from ..model.runner import SamplingSpec
from ..protocol.framing import next_payload, with_prefix

LogForm = tuple[Literal["console", "json"], str]  # form and level


class _Message(msgspec.Struct, frozen=True, array_like=True):
    pass


@dataclass(frozen=True, slots=True)
class SampledRequestSpec(RequestSpec):
    """A `RequestSpec` as it is read from the link, where `sampling` needs a type."""

    sampling: SamplingSpec


def as_read(spec: RequestSpec) -> SampledRequestSpec:
    """Return `spec` itself: it is encoded as a `SampledRequestSpec` would be."""
    return cast(SampledRequestSpec, spec)


# Server to engine


class Start(_Message, tag="START", frozen=True):
    config: EngineConfig
    cpus: frozenset[int] | None  # to run on; None: all that are allowed
    snapshot: str | None  # file that keeps the prefix cache
    name: str  # for its log lines
    log: LogForm | None  # None: it does not log


class Add(_Message, tag="ADD", frozen=True):
    """Answered by Answer under the id of the first."""

    requests: tuple[SampledRequestSpec, ...]


class Readmit(_Message, tag="READMIT", frozen=True):
    """Not answered: it had been accepted."""

    request: SampledRequestSpec
    generated: tuple[int, ...]


class Cancel(_Message, tag="CANCEL", frozen=True):
    request_id: int


class Drop(_Message, tag="DROP", frozen=True):
    request_id: int
    finish_reason: FinishReason | None
    error: str | None


class Stop(_Message, tag="STOP", frozen=True):
    """End what is alive, keep the prefix cache if asked to, and exit."""


# Engine to server


class Ready(_Message, tag="READY", frozen=True):
    info: CoreInfo
    kv_bytes: int


class Failed(_Message, tag="FAILED", frozen=True):
    """It could not start."""

    error: str  # class name in `errors`
    message: str


class Answer(_Message, tag="ANSWER", frozen=True):
    """Accepted with an estimate, or refused, then with the name of a class in `scheduler.admission`."""

    request_id: int
    estimate: AdmissionEstimate | None
    num_waiting: int
    refusal: str | None = None
    message: str = ""


class Begun(_Message, tag="BEGUN", frozen=True):
    """These will be computed for the first time now: if the process dies of it, they were there."""

    requests: tuple[Prefilled, ...]  # with the tokens that the prefix cache had


class Report(_Message, tag="REPORT", frozen=True):
    """What a step brought, or what happened between steps."""

    updates: tuple[RequestUpdate, ...]
    num_waiting: int
    num_steps: int
    step: StepStats | None = None
    prefilled: tuple[Prefilled, ...] = ()


class Beat(_Message, tag="BEAT", frozen=True):
    """How it does, every BEAT_INTERVAL_S."""

    stats: EngineStats | None  # None: its loop has broken


BEAT_INTERVAL_S = 0.25  # each wakes a process whose CPUs compute

ToEngine = Start | Add | Readmit | Cancel | Drop | Stop
FromEngine = Ready | Failed | Answer | Begun | Report | Beat
TO_ENGINE: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
FROM_ENGINE: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)


class Channel(asyncio.Protocol):
    """One end. `take` gets each message in order, `lost` is called once when the other end is gone."""

    def __init__(
        self,
        end: socket.socket,
        decoder: msgspec.msgpack.Decoder[ToEngine] | msgspec.msgpack.Decoder[FromEngine],
        take: Callable[..., None],
        lost: Callable[[], None],
    ) -> None:
        self._end = end
        self._decode = decoder.decode
        self._encode = msgspec.msgpack.Encoder().encode
        self._take = take
        self._lost = lost
        self._received = bytearray()
        self._transport: asyncio.Transport | None = None

    @classmethod
    async def open(
        cls,
        end: socket.socket,
        decoder: msgspec.msgpack.Decoder[ToEngine] | msgspec.msgpack.Decoder[FromEngine],
        take: Callable[..., None],
        lost: Callable[[], None],
    ) -> Channel:
        end.setblocking(False)
        loop = asyncio.get_running_loop()
        _, channel = await loop.create_unix_connection(lambda: cls(end.dup(), decoder, take, lost), sock=end)
        return channel

    def send(self, message: ToEngine | FromEngine) -> None:
        """Never waits. Dropped when the other end is gone."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(with_prefix(self._encode(message)))

    def close(self) -> None:
        """What was sent before still leaves."""
        if self._transport is not None:
            self._transport.close()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # a stream socket's; uvloop's has no such base class

    def data_received(self, data: bytes) -> None:
        self._received += data
        while (payload := next_payload(self._received)) is not None:
            self._take(self._decode(payload))

    def connection_lost(self, error: Exception | None) -> None:
        with contextlib.suppress(OSError):  # a write to one that is gone fails before its last words are read
            while data := self._end.recv(1 << 16):
                self.data_received(data)
        self._end.close()
        self._lost()
