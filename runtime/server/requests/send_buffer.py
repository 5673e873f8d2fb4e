"""`SendBuffer`: the output of one connection that is not sent yet. Sending never waits for the client.

Unsent output is frames that the system does not take at once, and chunks that wait for credit. Beyond a limit the
largest holder ends: the stream with the most waiting output, or the connection. A connection whose write makes no
progress for `write_timeout_s` is closed. Must not import requests.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Protocol

from ...common.errors import DeadlineExceeded, QuireError
from ...protocol.codec import encode
from ...protocol.frames import MAX_FRAME_BYTES, Frame
from ..tenancy.tenant_bytes import TenantBytes

WRITE_BYTES = 64 << 10  # bytes of one write; each such piece must be taken within `write_timeout_s`
# A stream that can wait sends only while fewer bytes than this, and than half of `max_bytes`, are unsent.
MAX_PACED_BYTES = 4 * WRITE_BYTES


class WaitingStream(Protocol):
    """A stream with output that waits for credit or for its end."""

    def shed(self, error: QuireError) -> None:
        """Drop the waiting output, and end in `error`."""


class SendBuffer:
    """`send` may be called anywhere in the event loop. Frames of one turn of the loop are written together.

    `run` lasts until the buffer is closed or the connection is lost, and waits while the system takes no bytes.
    """

    def __init__(
        self,
        writer: asyncio.StreamWriter,
        *,
        max_bytes: int,
        write_timeout_s: float,
    ) -> None:
        self.num_bytes = 0  # waiting chunks and counted frames
        self._loop = asyncio.get_running_loop()
        self._writer = writer
        self._transport = writer.transport  # direct access: methods of the writer add a call each
        self._max_bytes = max_bytes
        self._max_paced_bytes = min(MAX_PACED_BYTES, max_bytes // 2)
        self._write_timeout_s = write_timeout_s
        self._unsent = bytearray()
        self._writing_bytes = 0  # bytes of a write that the system did not take at once
        self._counted_bytes = 0  # bytes of frames
        self._waiting: dict[WaitingStream, int] = {}  # bytes of each stream's output that waits for credit
        self._tenant_output: TenantBytes | None = None  # bytes of the tenant, from WELCOME to the end
        self._will_write = False  # a write is due in this turn of the event loop
        self._is_blocked = False  # the system did not take a write at once, or the connection is lost
        self._changed = asyncio.Event()  # blocked or closed
        self._shrank = asyncio.Event()
        self._when_short: dict[Callable[[], None], None] = {}
        self._closed = False
        self.exceeded: str | None = None  # the limit that the client was too slow for, if any
        self.max_frame_bytes = MAX_FRAME_BYTES  # limit of the client; set with WELCOME
        # With a limit of 1, drain() waits until the system has taken all but one byte, so a time limit on it measures
        # progress. With a limit of 0 a TLS transport would never write again, because it treats an empty buffer as
        # full.
        self._transport.set_write_buffer_limits(high=1)

    @property
    def unsent_bytes(self) -> int:
        """Number of bytes that the system has not yet taken."""
        return len(self._unsent) + self._transport.get_write_buffer_size()

    @property
    def max_bytes(self) -> int:
        """Most bytes that the connection may hold if no other connection of its tenant holds any."""
        own = self._max_bytes
        output = self._tenant_output
        return own if output is None else min(own, output.limit)

    def send(self, frame: Frame) -> None:
        """Queue `frame`, or drop it if the connection is lost or closing.

        Raises InvalidRequest, queueing nothing, if the frame exceeds the client's limit.
        """
        if not self._closed:
            self.send_bytes(encode(frame, self.max_frame_bytes))

    def send_bytes(self, data: bytes) -> None:
        """Queue `data`, or drop it if the connection is lost or closing."""
        if self._closed:
            return
        self._unsent += data
        if self._counted_bytes or len(self._unsent) > WRITE_BYTES:
            self._count_frames()
        if not (self._will_write or self._is_blocked):
            self._will_write = True
            self._loop.call_soon(self._write)

    def hold(self, stream: WaitingStream, num_bytes: int) -> None:
        """Count output of `stream` that waits for credit; a negative number of bytes no longer waits."""
        if num_bytes:
            self._waiting[stream] = self._waiting.get(stream, 0) + num_bytes
            if not self._waiting[stream]:
                del self._waiting[stream]
            self._count(num_bytes)

    def join(self, tenant_output: TenantBytes) -> None:
        """Count for a tenant from now on, until `leave`."""
        self._tenant_output = tenant_output
        tenant_output.join(self)

    def leave(self) -> None:
        """Stop counting: the connection has ended."""
        if self._tenant_output is not None:
            self._tenant_output.leave(self)
            self._tenant_output = None

    def shed(self, limit: str) -> None:
        """End the stream with the most waiting output, or the connection if its unsent frames have more bytes."""
        stream = max(self._waiting, key=self._waiting.__getitem__, default=None)
        if stream is None or self._waiting[stream] < len(self._unsent):
            self._give_up(limit)
            return
        stream.shed(
            DeadlineExceeded(
                f"the client reads too slowly: {self._waiting[stream]} bytes of this request wait to be sent, and "
                f"{limit}; grant CREDIT as you read"
            )
        )

    @property
    def is_stuck(self) -> bool:
        """Whether the client was too slow."""
        return self.exceeded is not None

    @property
    def is_long(self) -> bool:
        """Whether a stream should wait if it can; False on a lost connection."""
        return len(self._unsent) > self._max_paced_bytes and not self._closed

    async def wait_until_short(self) -> None:
        """Wait while too many bytes are unsent. Returns immediately on a lost connection."""
        while self.is_long:
            self._shrank.clear()
            await self._shrank.wait()

    def call_when_short(self, callback: Callable[[], None]) -> None:
        """Call `callback` once fewer bytes are unsent."""
        self._when_short[callback] = None

    def close(self) -> None:
        """Accept no further frame; `run` ends after the queued frames are sent."""
        self._closed = True
        self._when_short.clear()
        self._changed.set()
        self._shrank.set()

    async def run(self) -> None:
        """Write delayed output until the buffer is closed or the connection lost. Never raises."""
        with contextlib.suppress(ConnectionError):
            while not self._closed or self._unsent or self._is_blocked:
                await self._changed.wait()
                self._changed.clear()
                if self._is_blocked:
                    await self._drain()
                    self._is_blocked = False
                self._write()
        self.close()

    def _count_frames(self) -> None:
        """Count the unsent frames. Frames that the system takes at once, nearly all, are never counted."""
        added = len(self._unsent) + self._writing_bytes - self._counted_bytes
        self._counted_bytes += added
        self._count(added)

    def _count(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        if self._tenant_output is not None:
            self._tenant_output.add(num_bytes)
        while self.num_bytes > self._max_bytes and num_bytes > 0:
            self.shed(f"all output of a connection may be {self._max_bytes} bytes (`max_outgoing_bytes`)")

    def _write(self) -> None:
        """Write unsent bytes until the system takes no more."""
        self._will_write = False
        was_long = self.is_long
        while self._unsent and not self._is_blocked:
            if self._transport.is_closing():
                self._block()
                break
            piece = bytes(self._unsent if len(self._unsent) <= WRITE_BYTES else self._unsent[:WRITE_BYTES])
            del self._unsent[: len(piece)]
            self._transport.write(piece)
            if self._transport.get_write_buffer_size():
                self._writing_bytes = len(piece)
                self._block()
            if self._counted_bytes or self._is_blocked:
                self._count_frames()
        if was_long and not self.is_long:
            self._shrank.set()
            callbacks = self._when_short
            self._when_short = {}
            for callback in callbacks:
                callback()

    def _block(self) -> None:
        """Let `run` wait until the system has taken the write, or find that the connection is lost."""
        self._is_blocked = True
        self._changed.set()

    async def _drain(self) -> None:
        """Wait until the system has taken the write. Raises ConnectionError if the connection is lost."""
        try:
            async with asyncio.timeout(self._write_timeout_s):
                await self._writer.drain()
        except TimeoutError:
            self._give_up(f"a write took longer than {self._write_timeout_s:g} s (`write_timeout_ms`)")
        finally:
            self._writing_bytes = 0
            self._count_frames()

    def _give_up(self, limit: str) -> None:
        self.exceeded = limit
        self.close()
        self._writing_bytes = 0
        self._unsent.clear()
        self._count_frames()
        self._transport.abort()
