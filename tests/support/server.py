"""Fakes for the server's unit tests: an engine that a test scripts, a clock that a test moves, a client in memory."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec
from prometheus_client import generate_latest
from quire.runtime.common.errors import InvalidRequest
from quire.runtime.common.server_config import ServerConfig
from quire.runtime.common.types import FinishReason, OutputChunk, SamplingParams, TokenLogprobs, Usage
from quire.runtime.engine.facade import EngineInfo, EngineStats, GenerateRequest
from quire.runtime.protocol.codec import Decoder, encode
from quire.runtime.protocol.frames import MAX_FRAME_BYTES, SERVER_FRAMES, Frame, Generate, Hello, Welcome
from quire.runtime.server.app_context import AppContext
from quire.runtime.server.models.catalog import ModelCatalog
from quire.runtime.server.monitoring import PrometheusObserver
from quire.runtime.server.msgpack.connection import Connection
from quire.runtime.server.requests.live_requests import LiveRequests
from quire.runtime.server.requests.resume import ReplayStore
from quire.runtime.server.tenancy.auth import Keyring, hash_key
from quire.runtime.server.tenancy.tenant_bytes import EqualShares
from quire.runtime.server.tenancy.tenants import Tenant
from quire.scheduler import AdmissionEstimate

from tests.support.samples import BYTES_INFO, STATS

TURNS = 20  # turns of the event loop: more than any chain of tasks in the server needs


async def settle() -> None:
    """Run the event loop until every task waits for the test."""
    for _ in range(TURNS):
        await asyncio.sleep(0)


def chunk(
    first: int, count: int = 1, text: str = "x", *, last: bool = False, reason: FinishReason = "length"
) -> OutputChunk:
    """Return a chunk of `count` tokens; `last` adds the finish reason and the usage."""
    ids = tuple(range(first, first + count))
    return OutputChunk(
        first_index=first,
        token_ids=ids,
        text=text,
        logprobs=tuple(TokenLogprobs(i, -0.1 * i, ((i, -0.5), (i + 1, float("-inf")))) for i in ids),
        finish_reason=reason if last else None,
        usage=Usage(prompt_tokens=3, completion_tokens=first + count) if last else None,
    )


def generate(request_id: int = 1, prompt: str | None = "hi", **fields: Any) -> Generate:
    return Generate(request_id, prompt, SamplingParams(), **fields)


def names(frames: list[Frame]) -> list[str]:
    """Return the types of `frames`."""
    return [type(frame).__name__ for frame in frames]


class FakeClock:
    """The time of the running event loop, moved by `advance` only."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.now = float(math.ceil(loop.time()))

    def __call__(self) -> float:
        return self.now

    async def advance(self, seconds: float, step: float | None = None) -> None:
        """Move the time by `seconds`, `step` at a time, and run the timers that are due."""
        end = self.now + seconds
        while self.now < end:
            self.now = end if step is None else min(end, self.now + step)
            await settle()


class FakeGeneration:
    """An accepted request whose chunks and errors the test puts. Nothing follows the last chunk or an error."""

    admission = AdmissionEstimate(position=0, pages_needed=1, pages_free=1)
    prompt_token_ids = (1, 2, 3)
    prompt_has_text = True
    seed = 0
    new_parser = None

    def __init__(self, request: GenerateRequest) -> None:
        self.request = request
        self.is_cancelled = False
        self.note_prefill: Callable[[int], None] = lambda _: None
        self._early: list[OutputChunk | Exception] = []
        self._receive: Callable[[Any], object] = self._early.append

    async def put(self, *items: OutputChunk | Exception) -> None:
        for item in items:
            self._put(item)
        await settle()

    def cancel(self) -> None:
        self.is_cancelled = True
        self._put(chunk(0, 0, "", last=True, reason="cancelled"))

    def watch_prefill(self, callback: Callable[[int], None]) -> None:
        self.note_prefill = callback

    def deliver(self, receive: Callable[[Any], object]) -> None:
        self._receive = receive
        for item in self._early:
            receive(item)

    def _put(self, item: OutputChunk | Exception) -> None:
        receive = self._receive
        if isinstance(item, Exception) or item.usage is not None:
            self._receive = lambda _: None
        receive(item)


class FakeEngine:
    """An engine that accepts every request, except where a test sets a refusal.

    `refusal` is raised by the call of `submit`; `late_refusal` where its result is awaited, as for a prompt that is too
    long once tokenized. While `prepared` is not set, prompts and texts are being tokenized.
    """

    def __init__(self) -> None:
        self.generations: list[FakeGeneration] = []
        self.refusal: Exception | None = None
        self.late_refusal: Exception | None = None
        self.prepared = asyncio.Event()
        self.prepared.set()
        self.num_preparing = 0

    @property
    def last(self) -> FakeGeneration:
        return self.generations[-1]

    def submit(self, request: GenerateRequest) -> Awaitable[FakeGeneration]:
        if self.refusal is not None:
            raise self.refusal
        return self._prepare(request)

    async def _prepare(self, request: GenerateRequest) -> FakeGeneration:
        self.num_preparing += 1
        try:
            await self.prepared.wait()
        finally:
            self.num_preparing -= 1
        if self.late_refusal is not None:
            raise self.late_refusal
        self.generations.append(FakeGeneration(request))
        return self.last

    async def tokenize(
        self, text: str, add_special_tokens: bool = True, *, tenant: str = "", of_encoder: bool = False
    ) -> tuple[int, ...]:
        self.num_preparing += 1
        try:
            await self.prepared.wait()
        finally:
            self.num_preparing -= 1
        if not text:
            raise InvalidRequest("the text is empty")
        return tuple(text.encode())

    def host_statuses(self) -> None:
        return None

    def stats(self) -> EngineStats:
        return msgspec.structs.replace(STATS, running=len(self.generations), waiting=0)

    @property
    def info(self) -> EngineInfo:
        return BYTES_INFO


class FakeTransport:
    """The transport of a `FakeWriter`. While `reads` is not set, the peer reads nothing."""

    def __init__(self) -> None:
        self.taken = bytearray()
        self.waiting = bytearray()
        self.aborted = False
        self.reads = asyncio.Event()
        self.reads.set()

    def set_write_buffer_limits(self, high: int) -> None: ...

    def get_write_buffer_size(self) -> int:
        return len(self.waiting)

    def write(self, data: bytes) -> None:
        self.waiting += data

    def is_closing(self) -> bool:
        return self.aborted

    def abort(self) -> None:
        self.aborted = True
        self.reads.set()


class FakeWriter:
    """An `asyncio.StreamWriter` that writes to memory. `stop_reading` makes the peer stuck."""

    def __init__(self) -> None:
        self.transport = FakeTransport()

    def stop_reading(self) -> None:
        self.transport.reads.clear()

    def read_again(self) -> None:
        self.transport.reads.set()

    def write(self, data: bytes) -> None:
        self.transport.write(data)

    async def drain(self) -> None:
        await self.transport.reads.wait()
        if self.transport.aborted:
            raise ConnectionResetError("aborted")
        self.transport.taken += self.transport.waiting
        self.transport.waiting.clear()

    def get_extra_info(self, name: str) -> None:
        return None

    def is_closing(self) -> bool:
        return self.transport.is_closing()

    def can_write_eof(self) -> bool:
        return False


class FakePeer:
    """A client in memory, over a real `Connection`."""

    def __init__(self, context: AppContext, hello: Hello | None) -> None:
        self.reader = asyncio.StreamReader()
        self.writer = FakeWriter()
        self.is_settled = False
        self.connection = Connection(self, context)  # type: ignore[arg-type]
        self.task = asyncio.create_task(self.connection.run())
        self.session = ""
        self._decoder = Decoder(SERVER_FRAMES, MAX_FRAME_BYTES)
        self._num_read = 0
        if hello is not None:
            self.send(hello)

    def settle(self) -> None:
        """Stop being pending, as an `AcceptedConnection`."""
        self.is_settled = True

    def send(self, *frames: Frame) -> None:
        for frame in frames:
            self.reader.feed_data(encode(frame))

    async def received(self) -> list[Frame]:
        """Return the frames that came since the last call."""
        await settle()
        data = bytes(self.writer.transport.taken[self._num_read :])
        self._num_read += len(data)
        return list(self._decoder.feed(data))  # type: ignore[arg-type]

    async def ask(self, *frames: Frame) -> list[Frame]:
        """Send `frames` and return the frames that came since the last call."""
        self.send(*frames)
        return await self.received()

    async def leave(self) -> None:
        """Lose the connection."""
        self.reader.feed_eof()
        await settle()


class FakeServer:
    """The objects that the connections of one server share, over a `FakeEngine`."""

    def __init__(self, tenant: Tenant | None = None, tenants: Sequence[str] = (), **settings: Any) -> None:
        """Serve `tenant` without a token, or `tenants`, each with its name as token."""
        self.engine = FakeEngine()
        self.tenant = tenant or Tenant("ann")
        self.config = ServerConfig(**settings)
        self.observer = PrometheusObserver()
        engine: Any = self.engine
        keys = {hash_key(name): Tenant(name) for name in tenants}
        keyring = Keyring(keys, default_tenant=None if keys else self.tenant)
        texts = EqualShares("texts", "max_text_bytes", lambda: self.config.max_text_bytes // keyring.num_tenants)
        models = ModelCatalog.of_one(self.config.served_model_name or "quire", engine)
        self.requests = LiveRequests(models, self.observer, texts)
        self.replays = ReplayStore(self.requests, self.config, lambda: keyring.num_tenants)
        self.context = AppContext(
            models, self.config, self.observer, keyring, self.requests, self.replays, "127.0.0.1:7071", "127.0.0.1:8000"
        )
        self.peers: list[FakePeer] = []

    async def connect(self, **hello: Any) -> FakePeer:
        """Open a connection. Its WELCOME is not among the frames that `received` returns."""
        peer = FakePeer(self.context, Hello((1,), **hello))
        self.peers.append(peer)
        (welcome,) = await peer.received()
        assert isinstance(welcome, Welcome)
        peer.session = welcome.session
        return peer

    def metric(self, sample: str) -> float:
        """Return the value of one sample of /metrics; the name includes the labels."""
        lines = generate_latest(self.observer.registry).decode().splitlines()
        return float(next(line for line in lines if line.startswith(sample + " ")).rpartition(" ")[2])

    def unsent_bytes(self) -> int:
        """Return the unsent output of all tenants."""
        return self.context.unsent.num_bytes

    async def close(self) -> None:
        for peer in self.peers:
            await peer.leave()
            peer.writer.transport.abort()
        await settle()
        hanging = [peer.task for peer in self.peers if not peer.task.done()]
        for task in hanging:
            task.cancel()
        await self.replays.close()
        assert not hanging, "a connection did not end with its peer"
