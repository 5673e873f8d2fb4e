"""`AsyncClient`: many concurrent streams over one connection to a Quire server.

It must not know frames beyond what it asks with, models or tokenizers. One invariant: every stream ends, with its last
chunk or with a QuireError; a lost connection ends with Unavailable what is not resumable.
"""

from __future__ import annotations

import contextlib
import itertools
import ssl
from collections.abc import AsyncGenerator, Mapping, Sequence
from types import TracebackType
from typing import Any, TypedDict, TypeVar, Unpack

from ..common.errors import ConfigError, GenerationFailed, ProtocolError, QuireError, Unavailable
from ..common.types import OutputChunk, RequestOutput, SamplingParams, join_chunks
from ..protocol.address import UnixAddress, parse_address
from ..protocol.frames import AskStats, Generate, ListModels, Model, Models, Stats, Tokenize, Tokenized
from .link import Link, Lost
from .links import Links
from .stream import OnAccepted, OnProgress, TokenStream

A = TypeVar("A", Tokenized, Models, Stats)


class RequestOptions(TypedDict, total=False):
    """What a request may say besides its prompt and how to sample."""

    messages: Sequence[Mapping[str, Any]]  # of a chat, instead of a prompt; the model's chat template renders them
    deadline_ms: int | None  # from arrival at the server
    priority: int  # lower runs earlier; default 0
    pin_ms: int | None  # keep the prompt in the prefix cache so long after the end
    idempotency_key: str | None  # a request sent again with its key gets the first one's stream, running or finished
    resumable: bool  # goes on over a new connection when its own is lost, without losing or repeating a token
    on_accepted: OnAccepted | None  # gets the server's ACCEPTED: position, pages, predicted wait
    on_progress: OnProgress | None  # gets PROGRESS of a prefill that takes several steps


class AsyncClient:
    """`async with AsyncClient("127.0.0.1:7070") as client: async for chunk in client.generate(…): …`

    `address` is `host:port`, `[v6]:port` or `unix:/path`; ConfigError otherwise. `tls`: True, or a context of your own.
    Entering raises Unavailable when nobody answers and Unauthenticated when the token is refused. A connection that is
    lost, or whose server drains, is replaced by the next call. Use it from one event loop.
    """

    def __init__(self, address: str, token: str | None = None, tls: bool | ssl.SSLContext = False) -> None:
        self._address = parse_address(address)
        if tls and isinstance(self._address, UnixAddress):
            raise ConfigError("a unix socket does not speak TLS; leave `tls` out, or give host:port")
        self._token = token
        self._tls = ssl.create_default_context() if tls is True else tls or None
        self._ids = itertools.count(1)  # over all connections: a resumed request keeps its id
        self._links: Links | None = None

    async def __aenter__(self) -> AsyncClient:
        links = Links(self._address, self._token, self._tls)
        await links.for_new_requests()
        self._links = links
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection; the server cancels what is still running. Idempotent."""
        if self._links is not None:
            await self._links.close()

    async def generate(
        self,
        prompt: str | Sequence[int] | None = None,
        sampling_params: SamplingParams | None = None,
        **options: Unpack[RequestOptions],
    ) -> AsyncGenerator[OutputChunk, None]:
        """Stream the continuation of a text, of token ids, or of `messages`; the last chunk has `usage`.

        Leaving the loop early cancels the request. Raises the server's typed error, or Unavailable when the connection
        is lost. Read on: a stream that waits for its reader longer than the server allows ends in DeadlineExceeded.
        With several choices, chunks of all of them come mixed, each with its `choice`; the last of each has its
        `finish_reason`. Callbacks run between two chunks.
        """
        messages = options.get("messages")
        frame = Generate(
            next(self._ids),
            tuple(prompt) if prompt is not None and not isinstance(prompt, str) else prompt,
            sampling_params or SamplingParams(),
            options.get("deadline_ms"),
            options.get("priority", 0),
            options.get("pin_ms"),
            None if messages is None else tuple(dict(message) for message in messages),
            idempotency_key=options.get("idempotency_key"),
            resumable=options.get("resumable", False),
        )
        stream = TokenStream(self._entered(), frame, options.get("on_accepted"), options.get("on_progress"))
        async with contextlib.aclosing(stream.chunks()) as chunks:
            async for chunk in chunks:
                yield chunk

    async def complete(
        self,
        prompt: str | Sequence[int] | None = None,
        sampling_params: SamplingParams | None = None,
        **options: Unpack[RequestOptions],
    ) -> RequestOutput:
        """`generate` to its end. Raises as it does."""
        async with contextlib.aclosing(self.generate(prompt, sampling_params, **options)) as chunks:
            received = [chunk async for chunk in chunks]
        usage = received[-1].usage
        if usage is None:
            raise GenerationFailed("the stream ended without its usage")
        return RequestOutput(outputs=join_chunks(received), usage=usage)

    async def tokenize(self, text: str, add_special_tokens: bool = True) -> tuple[int, ...]:
        """The model's token ids of `text`. Raises InvalidRequest when the model has no tokenizer."""
        return (await self._ask(Tokenize(next(self._ids), text, add_special_tokens), Tokenized)).token_ids

    async def models(self) -> tuple[Model, ...]:
        """What is served: names and limits."""
        return (await self._ask(ListModels(next(self._ids)), Models)).models

    async def stats(self) -> dict[str, int]:
        """The engine's counters and gauges by the names of `EngineStats`."""
        return (await self._ask(AskStats(next(self._ids)), Stats)).stats

    async def ping(self) -> float:
        """Seconds for a round trip to the server's event loop."""
        return await (await self._link()).ping()

    async def _ask(self, question: Tokenize | ListModels | AskStats, answer_type: type[A]) -> A:
        link = await self._link()
        inbox = link.ask(question)
        try:
            await link.flush()
            answer = await inbox.get()
        finally:
            link.leave(question.request_id)
        if isinstance(answer, Lost):
            raise answer.reason
        if isinstance(answer, QuireError):
            raise answer
        if not isinstance(answer, answer_type):
            raise ProtocolError(f"{type(answer).__name__} is no answer to {type(question).__name__}")
        return answer

    async def _link(self) -> Link:
        return await self._entered().for_new_requests()

    def _entered(self) -> Links:
        if self._links is None:
            raise Unavailable("this client is not connected; enter it with `async with` first")
        return self._links
