"""`ManagedEngine`: one model's engine for the doors, whether it is loaded or not."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import Any, TypeVar

import msgspec

from ...common.errors import DeadlineExceeded, QuireError, Unavailable
from ...engine.facade import (
    AdapterStatus,
    Embeddings,
    EmbedRequest,
    EngineFacade,
    EngineInfo,
    EngineObserver,
    EngineStats,
    GenerateRequest,
    Generation,
    HostStatus,
    SilentObserver,
)
from ...engine.stats import NO_STATS, counters_of, sum_stats
from ...engine.text import Token

R = TypeVar("R", GenerateRequest, EmbedRequest)
T = TypeVar("T", Generation, Embeddings)

BEGINNING_TURNS = 4  # turns of the event loop after which a submission has begun to run
Using = Callable[[], AbstractAsyncContextManager[EngineFacade]]  # keeps the model loaded, once it is


class ManagedEngine:
    """Implements `EngineFacade` by an engine that is loaded when a request needs it."""

    def __init__(self, planned: EngineInfo, using: Using) -> None:
        """`planned` describes the engine until its first load."""
        self._planned = planned
        self._using = using
        self._observer: EngineObserver = SilentObserver()
        self._engine: EngineFacade | None = None  # None while new requests must wait
        self._last: EngineFacade | None = None  # engine of the last load, whose texts remain
        self._stats: Callable[[], EngineStats] | None = None
        self._num_sending = 0  # submissions that the engine has not answered
        self._sending_ended = asyncio.Event()
        self.used_at = 0.0  # the loop's time of the last request
        self._former_stats = NO_STATS  # counters of engines that were unloaded

    # Residency

    def load(self, engine: EngineFacade) -> None:
        """Send requests to `engine` from now on."""
        engine.set_observer(self._observer)
        self._engine = self._last = engine
        self._stats = engine.stats

    async def leave(self) -> None:
        """Let new requests wait from now on, and wait until the engine has answered the earlier ones."""
        self._engine = None
        for _ in range(BEGINNING_TURNS):  # calls that were made before begin to run
            await asyncio.sleep(0)
        while self._num_sending:
            self._sending_ended.clear()
            await self._sending_ended.wait()

    def unload(self) -> None:
        """Keep the counters of an engine that is about to be closed."""
        try:
            stats = self.stats()
        except QuireError:
            stats = self._former_stats
        self._former_stats = counters_of(stats)
        self._stats = None

    # EngineFacade

    @property
    def info(self) -> EngineInfo:
        return self._planned if self._last is None else self._last.info

    def submit(self, request: GenerateRequest) -> Coroutine[Any, Any, Generation]:
        """See `EngineFacade.submit`. The request waits for its model, at most for its deadline."""
        return self._send(request, lambda engine, each: engine.submit(each))

    def embed(self, request: EmbedRequest) -> Coroutine[Any, Any, Embeddings]:
        """See `EngineFacade.embed`. The request waits for its model, at most for its deadline."""
        return self._send(request, lambda engine, each: engine.embed(each))

    def _send(self, request: R, send: Callable[[EngineFacade, R], Awaitable[T]]) -> Coroutine[Any, Any, T]:
        self.used_at = asyncio.get_running_loop().time()
        engine = self._engine
        if engine is None:
            return self._send_later(request, send)
        return self._sent(engine, send(engine, request), request, send)

    async def _sent(
        self,
        engine: EngineFacade,
        submission: Awaitable[T],
        request: R,
        send: Callable[[EngineFacade, R], Awaitable[T]],
    ) -> T:
        """Return the stream of a submission, or send it again if its engine began to drain meanwhile."""
        self._num_sending += 1
        try:
            return await submission
        except Unavailable:
            if self._engine is engine:
                raise
        finally:
            self._num_sending -= 1
            self._sending_ended.set()
        return await self._send_later(request, send)

    async def _send_later(self, request: R, send: Callable[[EngineFacade, R], Awaitable[T]]) -> T:
        """Send a request once its model is loaded."""
        loop = asyncio.get_running_loop()
        deadline_ms = request.deadline_ms
        began = loop.time()
        with _refusing_late(deadline_ms):
            async with asyncio.timeout(None if deadline_ms is None else deadline_ms / 1000):
                opened = self._using()
                engine = await opened.__aenter__()
        try:
            if deadline_ms is not None:
                left_ms = max(0, deadline_ms - round((loop.time() - began) * 1000))
                request = msgspec.structs.replace(request, deadline_ms=left_ms)
            return await send(engine, request)
        finally:
            await opened.__aexit__(None, None, None)

    async def tokenize(
        self, text: str, add_special_tokens: bool = True, *, tenant: str = "", of_encoder: bool = False
    ) -> tuple[int, ...]:
        """See `EngineFacade.tokenize`."""
        async with self._using() as engine:
            return await engine.tokenize(text, add_special_tokens, tenant=tenant, of_encoder=of_encoder)

    async def tokenize_chat(self, request: GenerateRequest) -> tuple[int, ...]:
        """See `EngineFacade.tokenize_chat`."""
        async with self._using() as engine:
            return await engine.tokenize_chat(request)

    async def detokenize(
        self,
        token_ids: tuple[int, ...],
        *,
        skip_special_tokens: bool = True,
        tenant: str = "",
        of_encoder: bool = False,
    ) -> str:
        """See `EngineFacade.detokenize`."""
        async with self._using() as engine:
            return await engine.detokenize(
                token_ids, skip_special_tokens=skip_special_tokens, tenant=tenant, of_encoder=of_encoder
            )

    def token(self, token_id: int, *, of_encoder: bool = False) -> Token:
        """See `EngineFacade.token`. The texts of a model remain when it is unloaded."""
        if self._last is None:
            raise Unavailable("the model has not been loaded yet")
        return self._last.token(token_id, of_encoder=of_encoder)

    def adapter_status(self, name: str) -> AdapterStatus:
        """See `EngineFacade.adapter_status`."""
        if self._engine is None:
            return AdapterStatus(is_loaded=False, is_pinned=False, num_requests=0)
        return self._engine.adapter_status(name)

    async def load_adapter(self, name: str, path: str, *, is_pinned: bool = False, in_place: bool = False) -> None:
        """See `EngineFacade.load_adapter`. The adapter is forgotten when the model is unloaded."""
        async with self._using() as engine:
            await engine.load_adapter(name, path, is_pinned=is_pinned, in_place=in_place)

    def unload_adapter(self, name: str) -> None:
        """See `EngineFacade.unload_adapter`. Raises Unavailable if the model is not loaded."""
        if self._engine is None:
            raise Unavailable("the model of this adapter is not loaded, and neither is the adapter")
        self._engine.unload_adapter(name)

    def stats(self) -> EngineStats:
        """Return the statistics of the engine, with the counters of engines before it."""
        if self._stats is None:
            return self._former_stats
        return sum_stats([self._stats(), self._former_stats])

    def host_statuses(self) -> Sequence[HostStatus] | None:
        """Return None: the engine computes on this machine."""
        return None

    def set_observer(self, observer: EngineObserver) -> None:
        """See `EngineFacade.set_observer`."""
        self._observer = observer
        if self._last is not None:
            self._last.set_observer(observer)

    async def drain(self) -> None:
        """See `EngineFacade.drain`."""
        if self._last is not None:
            await self._last.drain()

    async def close(self) -> None:
        """Do nothing: the residency closes engines."""


@contextmanager
def _refusing_late(deadline_ms: int | None) -> Iterator[None]:
    try:
        yield
    except TimeoutError:
        raise DeadlineExceeded(f"the deadline of {deadline_ms} ms passed before the model was loaded") from None
