"""An HTTP client for tests that sends any bytes, and reads answers with h11."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import h11

TIMEOUT_S = 60


class Reply(NamedTuple):
    """One answer; `events` are the data of its server-sent events, without the last `[DONE]`."""

    status: int
    headers: dict[str, str]
    content: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.content)

    @property
    def error(self) -> dict[str, Any]:
        error: dict[str, Any] = self.json["error"]
        return error

    @property
    def data(self) -> list[str]:
        """The data of each event."""
        lines = [line for line in self.content.decode().split("\n") if line and not line.startswith(":")]
        return [line.removeprefix("data: ") for line in lines]

    @property
    def events(self) -> list[Any]:
        """The events before `[DONE]`, which must be there."""
        *events, done = self.data
        assert done == "[DONE]"
        return [json.loads(event) for event in events]


class HTTPClient:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self._parser = h11.Connection(h11.CLIENT)

    @classmethod
    async def open(cls, address: str, **options: Any) -> HTTPClient:
        host, _, port = address.rpartition(":")
        return cls(*await asyncio.open_connection(host.strip("[]"), int(port), **options))

    def send(self, method: str, path: str, body: object = None, headers: Mapping[str, str] | None = None) -> None:
        """Send a request; a body that is not bytes becomes JSON."""
        content = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        own = {"host": "localhost", "content-type": "application/json", "content-length": str(len(content))}
        lines = [f"{method} {path} HTTP/1.1"]
        lines += [f"{name}: {value}" for name, value in {**own, **(headers or {})}.items()]
        self.writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + content)

    async def receive(self, method: str = "POST") -> Reply:
        """Return the next answer."""
        self._parser = h11.Connection(h11.CLIENT)
        self._parser.send(h11.Request(method=method, target="/", headers=[("host", "x")]))
        self._parser.send(h11.EndOfMessage())
        status = 0
        headers = {}
        content = b""
        async with asyncio.timeout(TIMEOUT_S):
            while True:
                event = self._parser.next_event()
                if event is h11.NEED_DATA:
                    # Byte by byte, so that nothing of the next answer is taken.
                    self._parser.receive_data(await self.reader.read(1))
                elif isinstance(event, h11.Response):
                    status = event.status_code
                    headers = {name.decode(): value.decode() for name, value in event.headers}
                elif isinstance(event, h11.Data):
                    content += event.data
                elif isinstance(event, h11.EndOfMessage):
                    return Reply(status, headers, content)

    async def ask(self, method: str, path: str, body: object = None, headers: Mapping[str, str] | None = None) -> Reply:
        self.send(method, path, body, headers)
        return await self.receive(method)

    async def read_until(self, text: bytes) -> bytes:
        async with asyncio.timeout(TIMEOUT_S):
            return await self.reader.readuntil(text)

    async def is_closed(self) -> bool:
        """Read until the server closes the connection."""
        async with asyncio.timeout(TIMEOUT_S):
            try:
                while await self.reader.read(1 << 16):
                    pass
            except ConnectionError:
                pass
            return True


@asynccontextmanager
async def connection(system: Any) -> AsyncIterator[HTTPClient]:
    """Connect to a system's HTTP API; the connection is cut at the end."""
    client = await HTTPClient.open(system.server.openai_address)
    try:
        yield client
    finally:
        client.writer.transport.abort()
