"""Send requests to a Quire server through AsyncClient, so that a load test measures from a client's view."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path

import msgspec

from ...client import AsyncClient
from ...common.errors import GenerationFailed, QuireError
from ...common.types import OutputChunk, SamplingParams
from ...protocol.frames import ServedModel
from .records import LoadRequest, ReceivedChunk, RequestFailed, StreamEnd


@dataclass(frozen=True, slots=True)
class QuireTarget:
    """Quire servers: their addresses, and the common fields of all requests."""

    address: str  # address, or several, with commas between them
    token: str | None = None
    tls: bool | Path = False  # a path: the CA's file
    num_connections: int = 1
    params: SamplingParams = field(default_factory=SamplingParams)  # parameters of every request, except max_tokens
    deadline_ms: int | None = None
    texts_per_request: int | None = None  # texts to embed; None: generate


class QuireBackend:
    """Quire servers under load. Requests use the connections in turn, and connections the servers.

    A connection continues at the next server when its own is lost.
    """

    def __init__(self, target: QuireTarget, clients: list[AsyncClient], model: ServedModel) -> None:
        self.model = model
        self._target = target
        self._clients = clients
        self._turns = cycle(clients)

    @classmethod
    async def open(cls, target: QuireTarget) -> QuireBackend:
        """Connect, and ask for the model. Raises ConfigError, Unavailable or Unauthenticated."""
        async with contextlib.AsyncExitStack() as opened:
            addresses = target.address.split(",")
            num_clients = max(target.num_connections, len(addresses))
            firsts = [index % len(addresses) for index in range(num_clients)]
            clients = [
                await opened.enter_async_context(
                    AsyncClient(addresses[first:] + addresses[:first], target.token, target.tls)
                )
                for first in firsts
            ]
            model, *_ = await clients[0].models()
            opened.pop_all()
        return cls(target, clients, model)

    async def close(self) -> None:
        for client in self._clients:
            await client.close()

    async def count_tokens(self, text: str) -> int:
        """Return the number of tokens of `text`, counted by the server."""
        return len(await self._clients[0].tokenize(text))

    async def stream(self, request: LoadRequest) -> AsyncGenerator[ReceivedChunk, None]:
        if self._target.texts_per_request is not None:
            yield await self._embed(request, self._target.texts_per_request)
            return
        params = msgspec.structs.replace(self._target.params, max_tokens=request.max_tokens)
        generating = next(self._turns).generate(request.prompt, params, deadline_ms=self._target.deadline_ms)
        try:
            async with contextlib.aclosing(generating) as chunks:
                async for chunk in chunks:
                    yield ReceivedChunk(time.perf_counter(), len(chunk.token_ids), chunk.text, _end(chunk))
        except QuireError as error:
            raise RequestFailed(error.code, str(error)) from error

    async def _embed(self, request: LoadRequest, num_texts: int) -> ReceivedChunk:
        """Embed the request's prompt `num_texts` times. Each text counts as a token of the answer."""
        prompt = request.prompt
        texts = [prompt if isinstance(prompt, str) else list(prompt)] * num_texts
        try:
            await next(self._turns).embed(texts, deadline_ms=self._target.deadline_ms)
        except QuireError as error:
            raise RequestFailed(error.code, str(error)) from error
        end = StreamEnd("stop", request.prompt_tokens * num_texts, num_texts)
        return ReceivedChunk(time.perf_counter(), num_texts, "", end)


def _end(chunk: OutputChunk) -> StreamEnd | None:
    usage = chunk.usage
    if usage is None:
        return None
    if chunk.finish_reason is None:
        raise GenerationFailed("the stream ended without a finish reason")
    return StreamEnd(
        chunk.finish_reason,
        usage.prompt_tokens,
        usage.completion_tokens,
        usage.cached_tokens,
        usage.queue_ms,
        usage.prefill_ms,
        usage.decode_ms,
        usage.stall_ms,
    )
