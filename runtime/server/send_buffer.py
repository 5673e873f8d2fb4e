"""The bounded way out of one connection: whoever sends never waits for the peer.

It must not know requests. One invariant: what is unsent is at most `max_bytes`; a peer that lets it grow past that,
or takes none of a write for `write_timeout_s`, loses this connection and nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib

from ..protocol.codec import encode
from ..protocol.frames import MAX_FRAME_BYTES, Frame

WRITE_BYTES = 64 << 10  # written at once; each such piece has `write_timeout_s` to leave
ROOM_BYTES = 4 * WRITE_BYTES  # with so much unsent, or half the limit, who can wait should


class SendBuffer:
    """`send` from anywhere in the event loop; `run` is the one task that writes."""

    def __init__(self, writer: asyncio.StreamWriter, *, max_bytes: int, write_timeout_s: float) -> None:
        self._writer = writer
        self._max_bytes = max_bytes
        self._room_bytes = min(ROOM_BYTES, max_bytes // 2)
        self._write_timeout_s = write_timeout_s
        self._unsent = bytearray()
        self._changed = asyncio.Event()
        self._has_room = asyncio.Event()
        self._closed = False
        self.stuck = False
        self.max_frame_bytes = MAX_FRAME_BYTES  # what the peer takes; raised or lowered by WELCOME
        # drain() then waits until the system has taken everything, so a time limit on it measures progress. All but one
        # byte: TLS transports call a buffer that is as large as its limit full, with 0 they would never write again.
        writer.transport.set_write_buffer_limits(high=1)

    @property
    def has_unsent(self) -> bool:
        """Whether the system has yet to take some of it."""
        return bool(self._unsent) or self._writer.transport.get_write_buffer_size() > 0

    def send(self, frame: Frame) -> None:
        """Queue `frame`; dropped when the connection is already lost or closing. Raises InvalidRequest, having queued
        nothing, for one that is longer than the peer takes.
        """
        if self._closed:
            return
        self._unsent += encode(frame, self.max_frame_bytes)
        if len(self._unsent) > self._max_bytes:
            self._give_up()
        self._changed.set()

    async def room(self) -> None:
        """Wait while much is unsent: for whoever has a long stream at hand. Returns at once on a lost connection."""
        while len(self._unsent) > self._room_bytes and not self._closed:
            self._has_room.clear()
            await self._has_room.wait()

    def close(self) -> None:
        """Nothing more will be sent; `run` ends once the rest has left."""
        self._closed = True
        self._changed.set()
        self._has_room.set()

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
        self._has_room.set()
        self._writer.write(piece)
        try:
            async with asyncio.timeout(self._write_timeout_s):
                await self._writer.drain()
        except TimeoutError:
            self._give_up()

    def _give_up(self) -> None:
        self.stuck = True
        self.close()
        self._unsent.clear()
        self._writer.transport.abort()
