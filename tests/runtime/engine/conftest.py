"""Fakes for tests of the engine: a core that computes nothing, a text processor that waits, an observer."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from quire.runtime.common.errors import QuireError
from quire.runtime.engine import (
    CoreInfo,
    CoreListener,
    Engine,
    EngineStats,
    LoadedAdapter,
    RequestStats,
    StepStats,
    TextProcessor,
)
from quire.runtime.engine.text import ChatTemplate, Tokenizer
from quire.runtime.model import BUNDLED_MODEL
from quire.scheduler import AdmissionEstimate, FinishReason, NotAccepting, QueueFull, Request

ESTIMATE = AdmissionEstimate(position=0, pages_needed=1, pages_free=8)
INFO = CoreInfo(
    vocab_size=4096,
    max_model_len=256,
    max_num_seqs=8,
    num_pages=8,
    page_size=32,
    eos_token_ids=frozenset(),
    isa="scalar",
    threads=1,
    threads_reason="a test",
)


@dataclass
class FakeCore:
    """A core that queues requests and computes nothing. The test reports to `listener` in its place."""

    max_num_waiting: int = 1000
    info: CoreInfo = INFO
    refusal: Exception | None = None  # raised by `add`
    gate: asyncio.Event | None = None  # `add` waits for it
    on_add: Callable[[Sequence[Request]], None] = lambda requests: None  # called before `add` answers
    requests: list[Request] = field(default_factory=list)  # added and neither cancelled nor dropped
    dropped: list[int] = field(default_factory=list)
    cancelled: list[int] = field(default_factory=list)
    listener: CoreListener = field(init=False)
    accepting: bool = True

    def start(self, listener: CoreListener) -> None:
        self.listener = listener

    def check_room(self, tenant: str, count: int) -> None:
        if not self.accepting:
            raise NotAccepting("no new requests are accepted")
        if len(self.requests) + count > self.max_num_waiting:
            raise QueueFull("the queue is full", ESTIMATE)

    async def add(self, requests: Sequence[Request]) -> AdmissionEstimate:
        if self.gate is not None:
            await self.gate.wait()
        if self.refusal is not None:
            raise self.refusal
        self.check_room(requests[0].spec.tenant, len(requests))
        self.requests += requests
        self.on_add(requests)
        return ESTIMATE

    def cancel(self, request_id: int) -> None:
        self.cancelled.append(request_id)

    def drop(self, request_id: int, reason: FinishReason | None = None, error: str | None = None) -> None:
        self.dropped.append(request_id)
        self.requests = [request for request in self.requests if request.request_id != request_id]

    def stats(self) -> EngineStats:
        raise NotImplementedError

    async def load_adapter(self, name: str, path: str, kept: Sequence[str], leaving: Sequence[str]) -> LoadedAdapter:
        raise NotImplementedError

    def host_statuses(self) -> None:
        return None

    async def drain(self) -> None:
        self.accepting = False

    async def stop(self) -> None:
        self.accepting = False
        self.listener.ended()

    async def close(self) -> None:
        await self.stop()


@dataclass
class FakeObserver:
    """An observer that keeps the engine's reports."""

    rejected: list[QuireError] = field(default_factory=list)
    finished: list[RequestStats] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    gaps_s: list[float | None] = field(default_factory=list)  # gaps before each of `tokens`

    def on_step(self, stats: StepStats) -> None: ...

    def on_tokens(self, count: int, since_last_s: float | None) -> None:
        self.tokens.append(count)
        self.gaps_s.append(since_last_s)

    def on_rejected(self, error: QuireError) -> None:
        self.rejected.append(error)

    def on_finished(self, stats: RequestStats) -> None:
        self.finished.append(stats)


class FakeTextProcessor(TextProcessor):
    """The bundled model's tokenizer and a chat template. Both wait for `gate` and raise `error`, if set."""

    def __init__(self) -> None:
        super().__init__(Tokenizer(BUNDLED_MODEL), ChatTemplate("{{ messages[0].content * 2 }}"))
        self.gate: threading.Event | None = None
        self.error: Exception | None = None
        self.calls: list[str] = []

    def encode(self, text: str, add_special_tokens: bool = True) -> tuple[int, ...]:
        self._note("encode")
        return super().encode(text, add_special_tokens)

    def render(self, messages: Sequence[Any], tools: Sequence[Any] = (), variables: Any = None) -> str:
        self._note("render")
        return super().render(messages, tools, variables)

    def _note(self, name: str) -> None:
        self.calls.append(name)
        if self.gate is not None:
            self.gate.wait()
        if self.error is not None:
            raise self.error


@pytest.fixture
def core() -> FakeCore:
    return FakeCore()


@pytest.fixture
def text_processor() -> Iterator[FakeTextProcessor]:
    processor = FakeTextProcessor()
    yield processor
    if processor.gate is not None:
        processor.gate.set()  # a test that fails must not leave its threads waiting


@pytest.fixture
def observer() -> FakeObserver:
    return FakeObserver()


@pytest.fixture
def engine(core: FakeCore, text_processor: FakeTextProcessor, observer: FakeObserver) -> Engine[FakeCore]:
    """Return an engine over the fake core, with the observer set."""
    engine = Engine(core, text_processor)
    engine.set_observer(observer)
    return engine
