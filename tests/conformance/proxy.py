"""A proxy between a client and the server: counts tokens and credit, cuts connections and loses frames on request.

Bytes pass unchanged, except for the versions in HELLO if a case sets others, and for a frame that is lost. The proxy
listens on TCP and on a unix socket and connects to the server over TCP.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
from quire.runtime.protocol.codec import Decoder, Malformed, encode
from quire.runtime.protocol.frames import (
    CLIENT_FRAMES,
    MAX_FRAME_BYTES,
    SERVER_FRAMES,
    Cancel,
    Credit,
    Done,
    Error,
    Frame,
    Generate,
    Goaway,
    Hello,
    Resume,
    Tokens,
)

WAIT_S = 30.0
DOWNWARD_BYTES = 256  # a few frames: the cuts of a case must not fall into one piece


class Overdrawn(Exception):
    """The server sent tokens to a stream without credit."""


class Proxy:
    """The frames that passed since `reset`, and what to do with later frames."""

    def __init__(self) -> None:
        self.server = ""  # host:port
        self.address = ""
        self.unix_address = ""
        self.reset()

    def reset(self, versions: tuple[int, ...] | None = None) -> None:
        """Forget the frames so far; offer `versions` in later HELLOs instead of the client's."""
        self.connections = 0
        self.ids: list[int] = []  # ids of GENERATE frames
        self.breach: Exception | None = None
        self._versions = versions  # offered instead of the client's
        self._cuts: list[int] = []  # token counts at which the connection is cut
        self._losing_at: float | None = None  # token count from which the next TOKENS frame is lost
        self._tokens = 0
        self._credit: dict[int, int] = {}  # request id -> remaining credit
        self._seen: defaultdict[str, set[int]] = defaultdict(set)
        self._changed = asyncio.Event()

    def cut(self, after_tokens: int) -> None:
        """Cut the connection inside a frame once `after_tokens` tokens have passed since `reset`."""
        self._cuts.append(after_tokens)

    def lose(self, after_tokens: int) -> None:
        """Lose a TOKENS frame once `after_tokens` tokens have passed since `reset`; no server does that."""
        self._losing_at = after_tokens

    async def wait_for(self, what: str) -> None:
        """Wait for `cancelled` (CANCEL and the request's end), `paused` (a stream without credit) or `goaway`."""
        async with asyncio.timeout(WAIT_S):
            while not self._has_happened(what):
                self._changed.clear()
                await self._changed.wait()

    def _has_happened(self, what: str) -> bool:
        match what:
            case "cancelled":
                return bool(self._seen["cancel"] & self._seen["end"])
            case "paused":
                return any(credit <= 0 for credit in self._credit.values())
        return bool(self._seen[what])

    def _from_client(self, frame: Frame | Malformed) -> bytes:
        match frame:
            case Hello() if self._versions is not None:
                return encode(msgspec.structs.replace(frame, versions=self._versions))
            case Generate(request_id=request_id, credit=credit) | Resume(request_id=request_id, credit=credit):
                if isinstance(frame, Generate):
                    self.ids.append(request_id)
                if credit is not None:
                    self._credit[request_id] = credit
            case Credit(request_id, tokens) if request_id in self._credit:
                self._credit[request_id] += tokens
            case Cancel(request_id):
                self._seen["cancel"].add(request_id)
        return b""

    def _from_server(self, frame: Frame | Malformed) -> bool:
        """Return whether to cut the connection at this frame."""
        match frame:
            case Tokens(request_id, _, token_ids) if token_ids:
                if self._credit.get(request_id, 1) <= 0:
                    self.breach = Overdrawn(f"{len(token_ids)} tokens of request {request_id} came without credit")
                if request_id in self._credit:
                    self._credit[request_id] -= len(token_ids)
                self._tokens += len(token_ids)
                if self._cuts and self._tokens >= self._cuts[0]:
                    del self._cuts[0]
                    return True
            case Done(request_id) | Error(int(request_id)):
                self._credit.pop(request_id, None)
                self._seen["end"].add(request_id)
            case Goaway():
                self._seen["goaway"].add(0)
        return False

    def _is_lost(self, frame: Frame | Malformed) -> bool:
        is_lost = isinstance(frame, Tokens) and self._losing_at is not None and self._tokens >= self._losing_at
        if is_lost:
            self._losing_at = math.inf
        return is_lost

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection until either side closes it."""
        self.connections += 1
        host, _, port = self.server.rpartition(":")
        try:
            up_reader, up_writer = await asyncio.open_connection(host, int(port))
        except OSError:
            writer.transport.abort()
            return
        directions = [
            asyncio.ensure_future(self._upwards(reader, up_writer)),
            asyncio.ensure_future(self._downwards(up_reader, writer)),
        ]
        await asyncio.wait(directions, return_when=asyncio.FIRST_COMPLETED)
        for direction in directions:
            direction.cancel()
        for end in (writer, up_writer):
            with contextlib.suppress(OSError):
                end.close()

    async def _upwards(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        decoder = Decoder(CLIENT_FRAMES, MAX_FRAME_BYTES)
        async for data in _pieces(reader):
            changed = b"".join([self._from_client(frame) for frame in decoder.feed(data)])
            self._changed.set()
            writer.write(changed or data)

    async def _downwards(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        decoder = Decoder(SERVER_FRAMES, MAX_FRAME_BYTES)
        async for data in _pieces(reader, DOWNWARD_BYTES):
            frames = list(decoder.feed(data))
            if self._losing_at is not None:
                frames = [frame for frame in frames if not self._is_lost(frame)]
                data = b"".join([encode(frame) for frame in frames if not isinstance(frame, Malformed)])
            cut = any(self._from_server(frame) for frame in frames)  # frames after a cut are lost
            self._changed.set()
            writer.write(data[: len(data) // 2] if cut else data)
            if cut:
                return


async def _pieces(reader: asyncio.StreamReader, max_bytes: int = 1 << 16) -> AsyncIterator[bytes]:
    with contextlib.suppress(OSError):
        while data := await reader.read(max_bytes):
            yield data


Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def proxying(folder: Path) -> AsyncIterator[Proxy]:
    """Run a proxy whose unix socket is in `folder`."""
    proxy = Proxy()
    path = str(folder / "proxy.sock")
    async with (
        await asyncio.start_server(proxy.serve, "127.0.0.1", 0) as tcp,
        await asyncio.start_unix_server(proxy.serve, path),
    ):
        host, port = tcp.sockets[0].getsockname()
        proxy.address = f"{host}:{port}"
        proxy.unix_address = f"unix:{path}"
        yield proxy
