"""`HostileClient`: one HTTP connection that sends any bytes, and checks every answer.

An answer must be HTTP/1.1 with a JSON error of OpenAI's form or a success, and never a 500.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import NamedTuple

import h11

ANSWER_S = 60.0  # time until the server must answer


class WrongAnswer(Exception):
    """The server answered, but not as its documentation says."""


class Answer(NamedTuple):
    """One answer, whose body is complete."""

    status: int
    headers: dict[bytes, bytes]
    body: bytes


class HostileClient:
    """One connection that sends any bytes, and checks every answer."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, token: str) -> None:
        self.writer = writer
        self.token = token
        self.limit: asyncio.Timeout | None = None  # deadline of the server's answer
        self._reader = reader
        self._unread = b""

    @classmethod
    async def open(cls, address: str, token: str) -> HostileClient:
        host, _, port = address.rpartition(":")
        return cls(*await asyncio.open_connection(host, int(port)), token)

    def send(self, method: str, path: str, body: bytes = b"", **headers: str) -> None:
        lines = {"host": "localhost", "content-type": "application/json", "content-length": str(len(body)), **headers}
        lines["authorization"] = f"Bearer {self.token}"
        head = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in lines.items())
        self.write(f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode() + body)

    def write(self, data: bytes) -> None:
        if not self.writer.transport.is_closing():
            self.writer.write(data)

    async def answer(self, method: str = "POST") -> Answer | None:
        """Return the next answer; None when the connection is closed. Raises WrongAnswer."""
        parser = h11.Connection(h11.CLIENT)
        parser.send(h11.Request(method=method, target="/", headers=[("host", "x")]))
        parser.send(h11.EndOfMessage())
        parser.receive_data(self._unread) if self._unread else None
        response = None
        body = bytearray()
        try:
            while True:
                event = parser.next_event()
                if isinstance(event, h11.Response):
                    response = event
                elif isinstance(event, h11.Data):
                    body += event.data
                elif isinstance(event, h11.EndOfMessage) and response is not None:
                    self._unread = parser.trailing_data[0]
                    if self.limit is not None:
                        self.limit.reschedule(asyncio.get_running_loop().time() + ANSWER_S)
                    return _checked(Answer(response.status_code, dict(response.headers), bytes(body)))
                elif event is h11.NEED_DATA:
                    data = await self._reader.read(1 << 16)
                    if not data and response is None:
                        return None
                    parser.receive_data(data)
                elif not isinstance(event, h11.InformationalResponse):
                    return None
        except ConnectionError:
            return None
        except h11.RemoteProtocolError as error:
            if response is None and not body:
                raise WrongAnswer(f"not HTTP: {error}") from None
            return None  # the server closed it in the middle: the client was too slow, or broke the limits

    async def skip(self) -> str:
        """Read a stream of events to its end, and say whether it came."""
        tail = b""
        with contextlib.suppress(ConnectionError):
            while data := await self._reader.read(1 << 16):
                tail = tail[-20:] + data
                if b"[DONE]" in tail:
                    return "read"
        return "closed"

    async def word(self, method: str = "POST") -> str:
        """Return the status of the next answer, or that there is none."""
        answer = await self.answer(method)
        return "closed" if answer is None else str(answer.status)

    def abort(self) -> None:
        self.writer.transport.abort()


def _checked(answer: Answer) -> Answer:
    """Return an answer that is as documented. Raises WrongAnswer."""
    if answer.status == 500:
        raise WrongAnswer(f"an internal error: {answer.body[:300]!r}")
    if answer.status >= 400:
        error = json.loads(answer.body)["error"]
        if error.keys() != {"message", "type", "param", "code"} or not error["message"]:
            raise WrongAnswer(f"an error of another form: {answer.body[:300]!r}")
    if any(name.startswith(b"access-control") for name in answer.headers):
        raise WrongAnswer("CORS headers")
    return answer
