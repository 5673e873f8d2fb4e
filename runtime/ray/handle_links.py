"""Links of `cluster/` that Serve's handles carry, for machines without open ports other than Ray's.

A link is one streaming call, `link_down`, which yields the host's messages, and one unary call after another,
`link_up`, with the API server's messages. Both ends are streams, so that greeting, messages and limits are the same as
over TCP. Must not import Ray.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Callable
from typing import Any, cast

import structlog

from ..cluster import EngineHost
from ..common.errors import Unavailable

MAX_PIECE_BYTES = 64 << 10  # Ray passes values below 100 KiB without its object store
WINDOW_BYTES = 4 << 20  # bytes that a host sends before the API server has acknowledged them
ACKNOWLEDGE_BYTES = WINDOW_BYTES // 4  # bytes after which an API server acknowledges even without a message to send
MAX_LINKS = 1024  # links of one host

_log = structlog.get_logger("quire.ray")


class LinkEnd(asyncio.Transport):
    """One end of a link, with streams over it. Written messages wait in this object until a call carries them."""

    def __init__(self) -> None:
        super().__init__()
        self._loop = asyncio.get_running_loop()
        self._unsent = bytearray()
        self._num_delivered = 0  # bytes
        self._is_closing = False
        self._is_over = False
        self._changed = asyncio.Event()  # set by every change since the last check of `_next_piece`
        self._may_deliver = asyncio.Event()
        self._may_deliver.set()
        self.reader = asyncio.StreamReader(loop=self._loop)
        protocol = asyncio.StreamReaderProtocol(self.reader, loop=self._loop)
        self._protocol: asyncio.BaseProtocol = protocol
        self.writer = asyncio.StreamWriter(self, protocol, self.reader, self._loop)
        protocol.connection_made(self)

    # asyncio.Transport

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol = protocol

    def get_protocol(self) -> asyncio.BaseProtocol:
        return self._protocol

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if not self._is_closing:
            self._unsent += data
            self._changed.set()

    def get_write_buffer_size(self) -> int:
        return len(self._unsent)

    def pause_reading(self) -> None:
        self._may_deliver.clear()

    def resume_reading(self) -> None:
        self._may_deliver.set()

    def is_closing(self) -> bool:
        return self._is_closing

    def close(self) -> None:
        """Close this end after the messages written before have left."""
        self._is_closing = True
        self._changed.set()

    def abort(self) -> None:
        """Close this end immediately. Idempotent."""
        if not self._is_over:
            self._is_closing = self._is_over = True
            self._unsent.clear()
            self._changed.set()
            self._may_deliver.set()
            self._loop.call_soon(lambda: self._protocol.connection_lost(None))

    # Carrying

    async def _deliver(self, data: bytes) -> None:
        """Pass on bytes of the peer as soon as the reader of this end accepts them."""
        await self._may_deliver.wait()
        if data and not self._is_over:
            self._num_delivered += len(data)
            cast(asyncio.Protocol, self._protocol).data_received(data)

    async def _next_piece(self, room: Callable[[], int], is_due: Callable[[], bool]) -> bytes | None:
        """Take up to `room` bytes as soon as there are any, or no bytes when `is_due`. None: the end of the link."""
        while not self._is_over:
            num_bytes = min(len(self._unsent), room(), MAX_PIECE_BYTES)
            if num_bytes or is_due():
                piece = bytes(self._unsent[:num_bytes])
                del self._unsent[:num_bytes]
                return piece
            if self._is_closing and not self._unsent:
                break
            self._changed.clear()
            await self._changed.wait()
        return None


class HostEnd(LinkEnd):
    """The end at the host. Implements `cluster.host.LinkConnection`."""

    def __init__(self, address: str) -> None:
        super().__init__()
        self.address = address
        self._num_sent = 0  # bytes
        self._num_acknowledged = 0
        self._next_sequence = 0

    def settle(self) -> None:
        """Do nothing: the limit on links does not depend on the greeting."""

    async def pieces(self) -> AsyncGenerator[bytes]:
        """Yield the host's messages, at most WINDOW_BYTES ahead of the API server."""
        while (piece := await self._next_piece(self._room, lambda: False)) is not None:
            self._num_sent += len(piece)
            yield piece

    async def receive(self, sequence: int, data: bytes, num_received: int) -> bool:
        """Receive what the API server sent. Return whether the link continues.

        `num_received` acknowledges bytes of the host. A missing, repeated or impossible call ends the link.
        """
        is_acknowledged = self._num_acknowledged <= num_received <= self._num_sent
        if sequence != self._next_sequence or not is_acknowledged or len(data) > MAX_PIECE_BYTES:
            _log.warning("a link over handles is out of order", link=self.address, sequence=sequence)
            self.abort()
            return False
        self._next_sequence += 1
        self._num_acknowledged = num_received
        self._changed.set()
        await self._deliver(data)
        return not self._is_over

    def _room(self) -> int:
        return WINDOW_BYTES - (self._num_sent - self._num_acknowledged)


class HostLinks:
    """The links over handles of one host."""

    def __init__(self, host: EngineHost) -> None:
        self._host = host
        self._ends: dict[str, HostEnd] = {}  # link's name -> end
        self._serving = set[asyncio.Task[None]]()

    async def down(self, link: str) -> AsyncGenerator[bytes]:
        """Open a link, and yield the host's messages until either end closes it. Raises Unavailable."""
        if link in self._ends or len(self._ends) >= MAX_LINKS:
            raise Unavailable("the host takes no further link")
        end = self._ends[link] = HostEnd(f"link {link[:8]}")
        serving = asyncio.create_task(self._host.serve(end), name="quire-host-link")
        self._serving.add(serving)
        serving.add_done_callback(self._serving.discard)
        serving.add_done_callback(lambda _: end.close())
        try:
            async for piece in end.pieces():
                yield piece
        finally:
            del self._ends[link]
            end.abort()

    async def up(self, link: str, sequence: int, data: bytes, num_received: int) -> bool:
        """Receive what the API server sent. Return whether the link continues."""
        end = self._ends.get(link)
        return end is not None and await end.receive(sequence, data, num_received)

    def close(self) -> None:
        """Close every link."""
        for end in self._ends.values():
            end.abort()


class ServerEnd(LinkEnd):
    """The end at the API server. `hosts` is Serve's handle, and `address` names the replica of the calls."""

    def __init__(self, hosts: Any, address: str, on_end: Callable[[ServerEnd], None]) -> None:
        super().__init__()
        self.address = address
        self._hosts = hosts
        self._link = secrets.token_hex(16)
        self._on_end = on_end
        self._num_acknowledged = 0  # bytes
        self._tasks = [asyncio.create_task(self._carry_down()), asyncio.create_task(self._carry_up())]
        for task in self._tasks:
            task.add_done_callback(self._on_done)

    def abort(self) -> None:
        """Close both ends immediately. Idempotent."""
        super().abort()
        for task in self._tasks:
            task.cancel()
        self._on_end(self)

    async def _carry_down(self) -> None:
        pieces = self._hosts.options(stream=True).link_down.remote(self.address, self._link)
        try:
            async for piece in pieces:
                await self._deliver(piece)
                self._changed.set()
        finally:
            pieces.cancel()

    async def _carry_up(self) -> None:
        """Send one piece after another: a call ends when the host has accepted its piece."""
        sequence = 0
        while (piece := await self._next_piece(lambda: MAX_PIECE_BYTES, self._is_due)) is not None:
            num_received = self._num_acknowledged = self._num_delivered
            if not await self._hosts.link_up.remote(self.address, self._link, sequence, piece, num_received):
                break
            sequence += 1

    def _is_due(self) -> bool:
        return self._num_delivered - self._num_acknowledged >= ACKNOWLEDGE_BYTES

    def _on_done(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None and not self._is_over:
            reason = str(error).partition("\n")[0]
            _log.warning("a link over handles ended", host=self.address, reason=f"{type(error).__name__}: {reason}")
        self.abort()


class ServerLinks:
    """The links over handles of one API server: one to each host. `hosts` is Serve's handle."""

    def __init__(self, hosts: Any) -> None:
        self.addresses: frozenset[str] = frozenset()  # hosts with an open link; replaced, so any thread may read it
        self._hosts = hosts
        self._ends: dict[str, ServerEnd] = {}  # address -> end

    def open(self, address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Open a link to a host. The caller has closed the former one."""
        end = self._ends[address] = ServerEnd(self._hosts, address, self._forget)
        self.addresses = frozenset(self._ends)
        return end.reader, end.writer

    def cut(self, address: str) -> None:
        """Close the link to a host, if there is one."""
        if (end := self._ends.get(address)) is not None:
            end.abort()

    def _forget(self, end: ServerEnd) -> None:
        if self._ends.get(end.address) is end:
            del self._ends[end.address]
            self.addresses = frozenset(self._ends)
