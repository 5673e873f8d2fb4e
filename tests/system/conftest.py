"""A real server on real sockets, over a fake engine with scripted streams or over a real one."""

from __future__ import annotations

import asyncio
import struct
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import msgpack
import msgspec
import pytest
from prometheus_client import generate_latest
from quire.pager import check
from quire.runtime.common.config import EngineConfig
from quire.runtime.common.errors import GenerationFailed, InvalidRequest, Overloaded
from quire.runtime.common.server_config import ServerConfig
from quire.runtime.common.types import OutputChunk, TokenLogprobs, Usage
from quire.runtime.engine import Engine, LocalEngine
from quire.runtime.engine.facade import (
    AdapterStatus,
    EngineInfo,
    EngineObserver,
    EngineStats,
    GenerateRequest,
)
from quire.runtime.engine.text import Token
from quire.runtime.server import Server
from quire.runtime.workers import engine_process
from quire.scheduler import AdmissionEstimate

from tests.support.samples import BYTES_INFO, STATS
from tests.support.waiting import until

from .chromium import Browser, OpenTab, Tab

CHUNK_TOKENS = 2
RECEIVE_TIMEOUT_S = 60
FREE_PORTS: dict[str, Any] = {"port": 0, "operator_port": 0, "openai_port": 0}


def prompt_of(request: GenerateRequest) -> Any:
    """Return the prompt, or the last message."""
    return request.prompt if request.messages is None else request.messages[-1]["content"]


class FakeGeneration:
    """A stream of max_tokens tokens, whose text contains the prompt or the last message.

    The prompt `hold` never ends by itself, `fail` and `crash` raise an error, and `prefill` takes several steps for its
    prompt of three tokens.

    If there are several choices, the first ends first; each of the others is one chunk.
    """

    def __init__(self, engine: FakeEngine, request: GenerateRequest) -> None:
        self.engine = engine
        self.request = request
        self.cancelled = asyncio.Event()
        self.admission = AdmissionEstimate(position=1, pages_needed=2, pages_free=3, predicted_wait_s=0.0045)
        self.prompt_token_ids = (1, 2, 3)
        self.prompt_has_text = True
        self.seed = 0
        self.new_parser = None
        self.on_prefill: Callable[[int], None] = lambda _: None

    def cancel(self) -> None:
        self.cancelled.set()

    def watch_prefill(self, callback: Callable[[int], None]) -> None:
        self.on_prefill = callback

    def deliver(self, receive: Callable[[OutputChunk | Exception], object]) -> None:
        self._delivering = asyncio.create_task(self._deliver(receive))

    async def _deliver(self, receive: Callable[[OutputChunk | Exception], object]) -> None:
        self.engine.live.append(self)
        try:
            async for chunk in self._chunks():
                receive(chunk)
        except (GenerationFailed, ZeroDivisionError) as error:
            receive(error)
        finally:
            self.engine.live.remove(self)

    async def _chunks(self) -> AsyncIterator[OutputChunk]:
        kind = prompt_of(self.request)
        params = self.request.sampling_params
        if kind == "prefill":
            self.on_prefill(1)
            self.on_prefill(2)
        begun = sent = len(self.request.generated[0]) if self.request.generated else 0  # tokens by another server
        while sent < params.max_tokens and not self.cancelled.is_set():
            await self.engine.step()
            if kind == "hold" and sent > begun:
                await self.cancelled.wait()
                break
            if sent and kind == "fail":
                raise GenerationFailed("the logits are NaN")
            if sent and kind == "crash":
                raise ZeroDivisionError("a bug")
            count = min(CHUNK_TOKENS, params.max_tokens - sent)
            yield self._chunk(sent, count)
            sent += count
        reason: Any = "cancelled" if self.cancelled.is_set() else "length"
        usage = Usage(prompt_tokens=3, completion_tokens=sent * params.n)
        for choice in range(params.n):
            is_last = choice == params.n - 1
            yield OutputChunk(
                first_index=sent if choice == 0 else 0,
                token_ids=() if choice == 0 else tuple(range(sent)),
                text="" if choice == 0 else f"choice {choice}",
                finish_reason=reason,
                usage=usage if is_last else None,
                choice=choice,
                cumulative_logprob=-1.5 if choice else None,
            )

    def _chunk(self, first: int, count: int) -> OutputChunk:
        text = "x" * self.engine.text_bytes or f" {prompt_of(self.request)}:{first}é日"
        ids = tuple(range(first, first + count))
        logprobs = tuple(TokenLogprobs(i, -0.5, ((i, -0.5),)) for i in ids)
        return OutputChunk(
            first_index=first,
            token_ids=ids,
            text=text,
            logprobs=None if self.request.sampling_params.logprobs is None else logprobs,
        )


@dataclass
class FakeEngine:
    live: list[FakeGeneration] = field(default_factory=list)
    requests: list[GenerateRequest] = field(default_factory=list)
    observer: EngineObserver | None = None
    steps: int = 0
    text_bytes: int = 0  # bytes of each chunk's text; 0: a readable one
    fingerprint: str = ""
    default_sampling: dict[str, float] = field(default_factory=dict)
    adapters: dict[str, str] = field(default_factory=dict)
    submitting: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.submitting.set()

    async def submit(self, request: GenerateRequest) -> FakeGeneration:
        self.requests.append(request)
        await self.submitting.wait()
        if prompt_of(request) == "full":
            raise Overloaded("the queue is full", 250)
        if prompt_of(request) == "bug":
            raise KeyError("a bug in submit")
        return FakeGeneration(self, request)

    async def tokenize(
        self, text: str, add_special_tokens: bool = True, *, tenant: str = "", of_encoder: bool = False
    ) -> tuple[int, ...]:
        await self.submitting.wait()
        if not text:
            raise InvalidRequest("the text is empty")
        return (0,) * add_special_tokens + tuple(text.encode())

    async def tokenize_chat(self, request: GenerateRequest) -> tuple[int, ...]:
        return await self.tokenize("".join(each["content"] for each in request.messages or ()), False)

    async def detokenize(
        self,
        token_ids: tuple[int, ...],
        *,
        skip_special_tokens: bool = True,
        tenant: str = "",
        of_encoder: bool = False,
    ) -> str:
        return bytes(token_ids).decode(errors="replace")

    def token(self, token_id: int, *, of_encoder: bool = False) -> Token:
        return Token(bytes([token_id]), False)

    @property
    def info(self) -> EngineInfo:
        return msgspec.structs.replace(
            BYTES_INFO,
            has_chat_template=True,
            fingerprint=self.fingerprint,
            default_sampling=self.default_sampling,
            adapters=self.adapters,
        )

    async def step(self) -> None:
        self.steps += 1
        await asyncio.sleep(0)

    def host_statuses(self) -> None:
        return None

    def adapter_status(self, name: str) -> AdapterStatus:
        return AdapterStatus(is_loaded=True, is_pinned=False, num_requests=0)

    async def load_adapter(self, name: str, path: str, *, is_pinned: bool = False, in_place: bool = False) -> None:
        self.adapters[name] = f"{name}@{path}"

    def unload_adapter(self, name: str) -> None:
        del self.adapters[name]

    def stats(self) -> EngineStats:
        return msgspec.structs.replace(STATS, step=self.steps, running=len(self.live), waiting=0)

    def set_observer(self, observer: EngineObserver) -> None:
        self.observer = observer

    async def drain(self) -> None: ...
    async def close(self) -> None: ...


class RawClient:
    """A client that sends any frame or bytes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    def send(self, *message: object) -> None:
        payload = msgpack.packb(message)
        self.writer.write(struct.pack(">I", len(payload)) + payload)

    async def receive(self) -> list[Any]:
        """Return the next frame; an empty list when the connection is closed."""
        try:
            async with asyncio.timeout(RECEIVE_TIMEOUT_S):
                (length,) = struct.unpack(">I", await self.reader.readexactly(4))
                message: list[Any] = msgpack.unpackb(await self.reader.readexactly(length), strict_map_key=False)
        except (asyncio.IncompleteReadError, ConnectionError):
            return []
        return message

    async def until(self, *types: str) -> list[list[Any]]:
        """Return the frames up to and including the first of `types`."""
        frames: list[list[Any]] = []
        while not frames or frames[-1][0] not in types:
            frames.append(await self.receive())
            assert frames[-1], f"closed before {types}: {frames}"
        return frames


async def raw_client(address: str, hello: bool = True, **options: Any) -> RawClient:
    if address.startswith("unix:"):
        client = RawClient(*await asyncio.open_unix_connection(address.removeprefix("unix:"), **options))
    else:
        host, _, port = address.rpartition(":")
        client = RawClient(*await asyncio.open_connection(host.strip("[]"), int(port), **options))
    if hello:
        client.send("HELLO", [1])
        assert (await client.receive())[0] == "WELCOME"
    return client


@dataclass
class System:
    engine: FakeEngine
    server: Server
    raw: Callable[..., Awaitable[RawClient]]

    @property
    def address(self) -> str:
        return self.server.address

    def metrics(self) -> str:
        return generate_latest(self.server.observer.registry).decode()


@pytest.fixture
async def serve() -> AsyncIterator[Callable[..., Awaitable[System]]]:
    """Start a server on free ports with `await serve(token="x")`. It is closed after the test with no request left."""
    servers: list[Server] = []
    writers: list[asyncio.StreamWriter] = []
    engines: list[FakeEngine] = []

    async def start(**settings: Any) -> System:
        engine = FakeEngine()
        server = Server()
        await server.start(engine, ServerConfig(**{**FREE_PORTS, **settings}))
        servers.append(server)
        engines.append(engine)

        async def raw(hello: bool = True, **options: Any) -> RawClient:
            client = await raw_client(server.address, hello, **options)
            writers.append(client.writer)
            return client

        return System(engine, server, raw)

    try:
        yield start
    finally:
        for writer in writers:
            writer.transport.abort()
        for server in servers:
            await server.close()
        assert [engine.live for engine in engines] == [[]] * len(engines), "a closed server left requests running"


@pytest.fixture
async def system(serve: Callable[..., Awaitable[System]]) -> System:
    return await serve()


@pytest.fixture
def eventually() -> Callable[[Callable[[], bool]], Awaitable[None]]:
    """Return a function that waits until a condition holds."""
    return until


@pytest.fixture
def socket_path(tmp_path: Path) -> Path:
    return tmp_path / "quire.sock"


# With the real engine


@dataclass
class Real:
    engine: LocalEngine
    server: Server
    _writers: list[asyncio.StreamWriter] = field(default_factory=list)

    @property
    def address(self) -> str:
        return self.server.address

    async def raw(self, hello: bool = True) -> RawClient:
        client = await raw_client(self.address, hello)
        self._writers.append(client.writer)
        return client

    async def idle(self) -> None:
        """Wait until no request is live."""
        async with asyncio.timeout(60):
            while self.engine.core.scheduler.has_work:
                await asyncio.sleep(0.002)

    def check_books(self) -> None:
        """Check that no page is owned and every page is accounted for."""
        stats = self.engine.stats()
        assert stats.pages_owned == 0
        assert stats.pages_free + stats.pages_cached + stats.pages_owned == stats.pages_total
        check(self.engine.core.pager, [])

    def drop_connections(self) -> None:
        for writer in self._writers:
            writer.transport.abort()


@pytest.fixture
def serving(monkeypatch: pytest.MonkeyPatch) -> Callable[..., AbstractAsyncContextManager[Real]]:
    """Serve the bundled model with `async with serving(max_num_seqs=4, uds="…") as real`, audited at every step.

    Afterwards no request is live and no page is owned.
    """
    monkeypatch.setenv("QUIRE_DEBUG", "1")

    @asynccontextmanager
    async def start(
        uds: str | None = None,
        allowed_image_hosts: str | None = None,
        ollama_port: int | None = None,
        otlp_traces_endpoint: str | None = None,
        **settings: Any,
    ) -> AsyncIterator[Real]:
        engine = await Engine.start(EngineConfig(**{"kv_cache_memory": 8 << 20, **settings}))
        real = Real(engine, Server())
        try:
            config = ServerConfig(
                **FREE_PORTS,
                uds=uds,
                allowed_image_hosts=allowed_image_hosts,
                ollama_port=ollama_port,
                otlp_traces_endpoint=otlp_traces_endpoint,
            )
            await real.server.start(engine, config)
            yield real
            real.drop_connections()
            await real.server.close()
            await real.idle()
            real.check_books()
        finally:
            await real.server.close()
            await engine.close()

    return start


@pytest.fixture
def slow_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make each step of an engine process take 5 ms longer."""
    script = Path(__file__).with_name("slow_engine.py")
    monkeypatch.setattr(engine_process, "COMMAND", (sys.executable, "-P", str(script)))


# With a browser


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    browser = Browser(tmp_path_factory.mktemp("chromium"))
    yield browser
    browser.close()


@pytest.fixture
async def open_tab(browser: Browser) -> AsyncIterator[OpenTab]:
    """Open a page by its address. No script of it has failed, and its policy has blocked nothing."""
    tabs: list[Tab] = []
    async with aiohttp.ClientSession() as session:

        async def open_it(address: str) -> Tab:
            tab = Tab(await session.ws_connect(browser.url, max_msg_size=0))
            tabs.append(tab)
            await tab.open(f"http://{address}/")
            return tab

        yield open_it
        for tab in tabs:
            await tab.close()
    assert [tab.problems for tab in tabs] == [[]] * len(tabs)
