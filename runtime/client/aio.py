"""`AsyncClient`: many concurrent streams over one connection to a Quire server.

It must not know models or tokenizers. One invariant: every stream ends, with its last chunk or with a QuireError; a
lost connection ends all of them with Unavailable.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import itertools
import time
from collections.abc import AsyncGenerator, Sequence
from types import TracebackType
from typing import Any

from ..errors import GenerationFailed, ProtocolError, QuireError, Unavailable
from ..generation import Completion, OutputChunk, SamplingParams, join_choices
from ..wire.address import Address, UnixAddress, parse_address
from ..wire.codec import Decoder, Malformed, encode
from ..wire.errors import error_from_frame
from ..wire.frames import (
    MAX_FRAME_BYTES,
    MIN_FRAME_BYTES,
    PROTOCOL_VERSION,
    SERVER_FRAMES,
    Accepted,
    Cancel,
    Done,
    Error,
    Frame,
    Generate,
    Hello,
    Ping,
    Pong,
    Tokens,
    Welcome,
)

CONNECT_TIMEOUT_S = 10.0
READ_BYTES = 64 << 10


class AsyncClient:
    """`async with AsyncClient("127.0.0.1:7070") as client: async for chunk in client.generate(…): …`

    `address` is `host:port`, `[v6]:port` or `unix:/path`; ConfigError otherwise. Entering raises Unavailable when
    nobody answers and Unauthenticated when the token is refused. Use it from one event loop.
    """

    def __init__(self, address: str, token: str | None = None) -> None:
        self._address = parse_address(address)
        self._token = token
        self._link: _Link | None = None

    async def __aenter__(self) -> AsyncClient:
        self._link = await _Link.open(self._address, self._token)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection; the server cancels what is still running. Idempotent."""
        if self._link is not None:
            await self._link.close()

    async def generate(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        deadline_ms: int | None = None,
        priority: int = 0,
        pin_ms: int | None = None,
    ) -> AsyncGenerator[OutputChunk, None]:
        """Stream the continuation of a text or of token ids; the last chunk has `usage`.

        Leaving the loop early cancels the request. Raises the server's typed error, or Unavailable when the connection
        is lost. Lower `priority` runs earlier; `deadline_ms` counts from arrival at the server; `pin_ms`: keep the
        prompt in the prefix cache so long after the end. With several choices, chunks of all of them come mixed, each
        with its `choice`; the last of each has its `finish_reason`.
        """
        link = self._connected()
        frame = Generate(
            link.next_id(),
            prompt if isinstance(prompt, str) else tuple(prompt),
            params or SamplingParams(),
            deadline_ms,
            priority,
            pin_ms,
        )
        choices = _Choices()
        async with contextlib.aclosing(link.stream(frame)) as answers:
            async for answer in answers:
                yield choices.chunk(answer)

    async def complete(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        deadline_ms: int | None = None,
        priority: int = 0,
        pin_ms: int | None = None,
    ) -> Completion:
        """`generate` to its end. Raises as it does."""
        stream = self.generate(prompt, params, deadline_ms=deadline_ms, priority=priority, pin_ms=pin_ms)
        async with contextlib.aclosing(stream) as chunks:
            received = [chunk async for chunk in chunks]
        usage = received[-1].usage
        if usage is None:
            raise GenerationFailed("the stream ended without its usage")
        return Completion(choices=join_choices(received), usage=usage)

    async def ping(self) -> float:
        """Seconds for a round trip to the server's event loop."""
        return await self._connected().ping()

    def _connected(self) -> _Link:
        if self._link is None:
            raise Unavailable("this client is not connected; enter it with `async with` first")
        return self._link


class _Choices:
    """What TOKENS leave to be known of one stream's choices: which one DONE ends, and at which token."""

    def __init__(self) -> None:
        self._received: dict[int, int] = {}  # tokens of each choice
        self._ended: set[int] = set()

    def chunk(self, answer: Tokens | Done) -> OutputChunk:
        if isinstance(answer, Done):
            choice = next(choice for choice in itertools.count() if choice not in self._ended)
            return OutputChunk(
                first_index=self._received.get(choice, 0),
                token_ids=(),
                text="",
                finish_reason=answer.finish_reason,
                usage=answer.usage,
                choice=choice,
            )
        self._received[answer.choice] = answer.first_index + len(answer.token_ids)
        if answer.finish_reason is not None:
            self._ended.add(answer.choice)
        return OutputChunk(
            first_index=answer.first_index,
            token_ids=answer.token_ids,
            text=answer.text,
            logprobs=answer.logprobs,
            finish_reason=answer.finish_reason,
            choice=answer.choice,
            cumulative_logprob=answer.cumulative_logprob,
        )


class _Link:
    """One open connection: a reader task that hands each frame to the stream it belongs to."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._decoder = Decoder(SERVER_FRAMES, MAX_FRAME_BYTES)
        self._ids = itertools.count(1)  # never reused, so a late frame cannot meet a newer request
        self._max_frame_bytes = MIN_FRAME_BYTES
        self._streams: dict[int, asyncio.Queue[Tokens | Done | QuireError]] = {}
        self._pings: dict[int, asyncio.Future[None]] = {}
        self._welcome: asyncio.Future[Welcome] = asyncio.get_running_loop().create_future()
        self._lost: QuireError | None = None
        self._reading = asyncio.create_task(self._read())

    @classmethod
    async def open(cls, address: Address, token: str | None) -> _Link:
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                link = cls(*await _connect(address))
                try:
                    await link._shake_hands(token)
                except BaseException:
                    await link.close()
                    raise
        except TimeoutError:
            raise Unavailable(f"{address} did not answer within {CONNECT_TIMEOUT_S:.0f} s") from None
        except OSError as error:
            raise Unavailable(f"cannot connect to {address}: {error.strerror or error}") from error
        return link

    def next_id(self) -> int:
        return next(self._ids)

    async def stream(self, frame: Generate) -> AsyncGenerator[Tokens | Done, None]:
        """Send `frame` and yield its answers to the DONE; stopping before it sends CANCEL."""
        answers: asyncio.Queue[Tokens | Done | QuireError] = asyncio.Queue()
        self._write(frame)
        self._streams[frame.request_id] = answers
        try:
            await self._flush()
            while True:
                answer = await answers.get()
                if isinstance(answer, QuireError):
                    raise answer
                yield answer
                if isinstance(answer, Done):
                    return
        finally:
            # Still listed: it has not ended on the server, so whoever iterated left early.
            if self._streams.pop(frame.request_id, None) is not None and self._lost is None:
                self._writer.write(encode(Cancel(frame.request_id)))

    async def ping(self) -> float:
        nonce = next(self._ids)
        answered = self._pings[nonce] = asyncio.get_running_loop().create_future()
        try:
            started = time.perf_counter()  # uvloop's own clock counts whole milliseconds
            self._write(Ping(nonce))
            await self._flush()
            await answered
            return time.perf_counter() - started
        finally:
            del self._pings[nonce]

    async def close(self) -> None:
        self._lose(Unavailable("this client is closed"))
        self._reading.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._reading
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()

    async def _shake_hands(self, token: str | None) -> None:
        self._write(Hello((PROTOCOL_VERSION,), token, (), MAX_FRAME_BYTES))
        await self._flush()
        self._max_frame_bytes = (await self._welcome).max_frame_bytes

    def _write(self, frame: Frame) -> None:
        """Raises InvalidRequest for what has no wire form, and the reason when the connection is lost."""
        if self._lost is not None:
            raise copy.copy(self._lost)
        self._writer.write(encode(frame, self._max_frame_bytes))

    async def _flush(self) -> None:
        # A lost connection is the reader task's to report: the server may have said why before it closed.
        with contextlib.suppress(OSError):
            await self._writer.drain()

    # Reading

    async def _read(self) -> None:
        try:
            while data := await self._reader.read(READ_BYTES):
                for frame in self._decoder.feed(data):
                    self._dispatch(frame)
            self._lose(Unavailable("the server closed the connection"))
        except OSError as error:
            self._lose(Unavailable(f"the connection to the server was lost: {error.strerror or error}"))
        except QuireError as error:
            self._lose(error)
            self._writer.close()

    def _dispatch(self, frame: Frame | Malformed) -> None:
        match frame:
            case Tokens(request_id) | Done(request_id):
                self._answer(request_id, frame, last=isinstance(frame, Done))
            case Error(None):
                raise error_from_frame(frame)
            case Error(int(request_id)):
                self._answer(request_id, error_from_frame(frame), last=True)
            case Pong(nonce):
                if (answered := self._pings.get(nonce)) is not None and not answered.done():
                    answered.set_result(None)
            case Welcome():
                if self._welcome.done():
                    raise ProtocolError("WELCOME came twice")
                self._welcome.set_result(frame)
            case Accepted():
                pass

    def _answer(self, request_id: int, answer: Tokens | Done | QuireError, last: bool) -> None:
        """A stream its reader left may still get answers that were under way."""
        queue = self._streams.pop(request_id, None) if last else self._streams.get(request_id)
        if queue is not None:
            queue.put_nowait(answer)

    def _lose(self, reason: QuireError) -> None:
        """The connection is over: end everything that waits on it. The first reason stays."""
        if self._lost is not None:
            return
        self._lost = reason
        for queue in self._streams.values():
            queue.put_nowait(copy.copy(reason))
        self._streams.clear()
        futures: list[asyncio.Future[Any]] = [self._welcome, *self._pings.values()]
        for waiting in futures:
            if not waiting.done():
                waiting.set_exception(copy.copy(reason))
                waiting.exception()  # retrieved: nobody may be left to await it


async def _connect(address: Address) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    if isinstance(address, UnixAddress):
        return await asyncio.open_unix_connection(address.path)
    return await asyncio.open_connection(address.host, address.port)
