"""`EngineLink`: one end of the socket between the server and an engine process, as an asyncio protocol."""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
import time
from collections import deque
from collections.abc import Callable
from typing import cast

import msgspec

from ..protocol.framing import next_payload, with_prefix
from .engine_link import FromEngine, PixelSender, StepReport, ToEngine

READ_BYTES = 1 << 16
TURN_S = 0.0005  # CPU time for messages, before other callbacks of the event loop run
SMOOTHING = 8  # reports over which the mean time of an update adapts


class EngineLink(asyncio.Protocol):
    """One end of the link. `receive` gets each message, in order; `lost` is called when the other end is closed.

    If many messages arrive together, one turn of the event loop handles them for `TURN_S`, and the next turns handle
    the rest. A report that takes longer is divided: an update with many logprobs takes several times as long as
    another.
    """

    def __init__(
        self,
        end: socket.socket,
        decoder: msgspec.msgpack.Decoder[ToEngine] | msgspec.msgpack.Decoder[FromEngine],
        receive: Callable[..., None],
        lost: Callable[[], None],
    ) -> None:
        self.receive = receive
        self._lost = lost
        self._end = end
        self._decode = decoder.decode
        self._encode = msgspec.msgpack.Encoder().encode
        self._pixels = PixelSender()
        self._received = bytearray()
        self._waiting: deque[ToEngine | FromEngine] = deque()  # parts of the last message, or that message
        self._update_s = 0.0  # CPU time that an update takes, a moving average
        self._goes_on = False  # the next turn continues with received messages
        self._transport: asyncio.Transport | None = None

    @classmethod
    async def open(
        cls,
        end: socket.socket,
        decoder: msgspec.msgpack.Decoder[ToEngine] | msgspec.msgpack.Decoder[FromEngine],
        receive: Callable[..., None],
        lost: Callable[[], None],
    ) -> EngineLink:
        end.setblocking(False)
        loop = asyncio.get_running_loop()
        _, link = await loop.create_unix_connection(lambda: cls(end.dup(), decoder, receive, lost), sock=end)
        return link

    def send(self, message: ToEngine | FromEngine) -> None:
        """Write `message` without waiting; drop it when the other end is closed."""
        if self._transport is not None and not self._transport.is_closing():
            for part in self._pixels.parts(message):
                self._transport.write(with_prefix(self._encode(part)))

    def close(self) -> None:
        """Close this end after the messages sent before have left."""
        if self._transport is not None:
            self._transport.close()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # a stream socket's; uvloop's has no such base class

    def data_received(self, data: bytes) -> None:
        self._received += data
        if not self._goes_on:
            self._handle_received(TURN_S)

    def connection_lost(self, error: Exception | None) -> None:
        with contextlib.suppress(OSError):  # a failed write closes the transport before all messages are read
            while data := self._end.recv(READ_BYTES):
                self._received += data
        self._handle_received(math.inf)
        self._end.close()
        self._lost()

    def _go_on(self) -> None:
        """Handle the waiting messages. Messages that come in the same turn of the event loop wait for the next one."""
        self._goes_on = False
        if self._handle_received(TURN_S) and not self._goes_on:
            self._wait_for_turn()

    def _wait_for_turn(self) -> None:
        self._goes_on = True
        asyncio.get_running_loop().call_soon(self._go_on)

    def _handle_received(self, limit_s: float) -> bool:
        """Handle messages for `limit_s`; the next turn continues. Return False if no message was complete.

        An error of `receive` ends the link.
        """
        began_s = now_s = time.thread_time()
        try:
            while True:
                if self._waiting:
                    message = self._waiting.popleft()
                elif (payload := next_payload(self._received)) is not None:
                    message = self._decode(payload)
                else:
                    return now_s > began_s
                if self._expected_s(message) > TURN_S:
                    message = self._first_part(message)
                if now_s > began_s and now_s - began_s + self._expected_s(message) > limit_s:
                    self._waiting.appendleft(message)
                    self._wait_for_turn()
                    return True
                self.receive(message)
                before_s, now_s = now_s, time.thread_time()
                if isinstance(message, StepReport) and message.updates:
                    self._update_s += ((now_s - before_s) / len(message.updates) - self._update_s) / SMOOTHING
        except Exception:
            if self._transport is not None:
                self._transport.abort()
            raise

    def _first_part(self, message: ToEngine | FromEngine) -> ToEngine | FromEngine:
        """Return the first part of a slow report; its other parts wait."""
        if not isinstance(message, StepReport):
            return message
        first, *others = message.parts(max(1, int(TURN_S / self._update_s)))
        self._waiting.extendleft(reversed(others))
        return first

    def _expected_s(self, message: ToEngine | FromEngine) -> float:
        return len(message.updates) * self._update_s if isinstance(message, StepReport) else 0.0
