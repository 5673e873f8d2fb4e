"""`SendBuffer`: the frames of one connection that are not sent yet. Sending never waits for the client.

A connection with more than `max_bytes` unsent bytes, or whose write makes no progress for `write_timeout_s`, is closed.
Must not import requests.
"""

from __future__ import annotations

import asyncio
import contextlib

from ..protocol.codec import encode
from ..protocol.frames import MAX_FRAME_BYTES, Frame

WRITE_BYTES = 64 << 10  # of one write; each such piece must be taken within `write_timeout_s`
# A stream that can wait sends only while fewer bytes than this, and than half of `max_bytes`, are unsent.
MAX_PACED_BYTES = 4 * WRITE_BYTES


class SendBuffer:
    """`send` may be called anywhere in the event loop; `run` is the only task that writes."""

    def __init__(self, writer: asyncio.StreamWriter, *, max_bytes: int, write_timeout_s: float) -> None:
        self._writer = writer
        self._max_bytes = max_bytes
        self._max_paced_bytes = min(MAX_PACED_BYTES, max_bytes // 2)
        self._write_timeout_s = write_timeout_s
        self._unsent = bytearray()
        self._changed = asyncio.Event()
        self._shrank = asyncio.Event()
        self._closed = False
        self.is_stuck = False  # the client was too slow
        self.max_frame_bytes = MAX_FRAME_BYTES  # that the client takes; set with WELCOME
        # With a limit of 1, drain() waits until the system has taken all but one byte, so a time limit on it measures
        # progress. With a limit of 0 a TLS transport would never write again: to it, an empty buffer is full.
        writer.transport.set_write_buffer_limits(high=1)

    @property
    def unsent_bytes(self) -> int:
        """Number of bytes that the system has not yet taken."""
        return len(self._unsent) + self._writer.transport.get_write_buffer_size()

    def send(self, frame: Frame) -> None:
        """Queue `frame`, or drop it if the connection is lost or closing.

        Raises InvalidRequest, and queues nothing, if the frame is longer than the client takes.
        """
        if self._closed:
            return
        self._unsent += encode(frame, self.max_frame_bytes)
        if len(self._unsent) > self._max_bytes:
            self._give_up()
        self._changed.set()

    async def wait_until_short(self) -> None:
        """Wait while much is unsent. Returns immediately on a lost connection."""
        while len(self._unsent) > self._max_paced_bytes and not self._closed:
            self._shrank.clear()
            await self._shrank.wait()

    def close(self) -> None:
        """Accept no further frame; `run` ends once the rest is sent."""
        self._closed = True
        self._changed.set()
        self._shrank.set()

    async def run(self) -> None:
        """Write until closed or lost. Never raises."""
        with contextlib.suppress(ConnectionError):
            while not self._closed or self._unsent:
                await self._changed.wait()
                self._changed.clear()
                while self._unsent:
                    await self._write()
        self.close()

    async def _write(self) -> None:
        piece = bytes(self._unsent[:WRITE_BYTES])
        del self._unsent[: len(piece)]
        self._shrank.set()
        self._writer.write(piece)
        try:
            async with asyncio.timeout(self._write_timeout_s):
                await self._writer.drain()
        except TimeoutError:
            self._give_up()

    def _give_up(self) -> None:
        self.is_stuck = True
        self.close()
        self._unsent.clear()
        self._writer.transport.abort()
