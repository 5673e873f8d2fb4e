"""`AsyncClient`: many concurrent requests over one connection to a Quire server.

Every stream ends with its last chunk or raises a QuireError. A lost connection raises Unavailable if the client has one
address and the request is not resumable.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import AsyncGenerator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar, Unpack

from ..common.errors import ConfigError, GenerationFailed, InvalidRequest, NotOpen, ProtocolError, QuireError
from ..common.images import extract_images
from ..common.prompts import as_documents, as_prompts, as_token_ids, chat_messages, shown
from ..common.types import ChatOptions, OutputChunk, RequestOutput, SamplingParams, check_arguments, join_chunks
from ..net.address import UnixAddress, parse_address
from ..protocol.frames import (
    AskScores,
    AskStats,
    AskVectors,
    Generate,
    ListModels,
    Models,
    ServedModel,
    Stats,
    Tokenize,
    Tokenized,
)
from .connection import ClientConnection, ConnectionLost
from .connection_pool import ConnectionPool
from .embedding import OnEmbedded, receive_values
from .stream import OnAccepted, OnProgress, TokenStream
from .tls import TLSOption, tls_context

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

A = TypeVar("A", Tokenized, Models, Stats)


class RequestOptions(TypedDict, total=False):
    """Options of a request besides its prompt and its sampling parameters."""

    # Chat messages instead of a prompt, rendered by the model's chat template. Parts of their content may be images:
    # {"type": "image", "image": the bytes of a file}, or OpenAI's image_url with a data URL.
    messages: Sequence[Mapping[str, Any]]
    chat: ChatOptions | None  # options of a chat: tools; reasoning and tool calls apart from the text
    model: str  # name of a served model; default: the server's first one that generates text
    deadline_ms: int | None  # milliseconds from arrival at the server
    priority: int  # requests with a lower number run earlier; default 0
    pin_ms: int | None  # how long the prompt stays in the prefix cache after the request has ended
    prompt_cache_key: str  # requests with the same key go to the same engine, which caches their prompts
    traceparent: str  # W3C's context of the caller's trace, to which the server's spans then belong
    idempotency_key: str | None  # a second request with this key receives the first one's stream, running or finished
    resumable: bool  # continue after a lost connection even with a single address; the server keeps the request
    on_accepted: OnAccepted | None  # called with ACCEPTED: queue position, pages, predicted wait
    on_progress: OnProgress | None  # called with each PROGRESS of a prefill that takes several steps


class EmbedOptions(TypedDict, total=False):
    """Options of a request to embed or to score texts."""

    model: str  # name of a served model; default: the server's first one that makes vectors or scores
    truncate_prompt_tokens: int | None  # keep this many tokens of a text that is too long; -1: as many as possible
    deadline_ms: int | None  # milliseconds from arrival at the server
    priority: int  # requests with a lower number run earlier; default 0
    traceparent: str  # W3C's context of the caller's trace, to which the server's spans then belong


class AsyncClient:
    """Client of a Quire server for asyncio programs.

    `async with AsyncClient("127.0.0.1:7070") as client: async for chunk in client.generate(…): …`

    `address` is `host:port`, `[v6]:port` or `unix:/path`, or several of them; ConfigError otherwise. If there are
    several servers, the client uses the first one that answers. If that server fails, every stream continues at another
    server with the same build and model, with the same bytes, without losing or repeating a token. `tls` is True for a
    certificate that the system trusts, the path of a CA file in PEM, or an `ssl.SSLContext`. Entering the context
    raises Unavailable if the server does not answer, TLSError if its certificate is not trusted and Unauthenticated if
    it refuses the token. Calls outside the context raise NotOpen. The next call replaces a connection that is lost or
    whose server is shutting down. Use a client from one event loop.
    """

    def __init__(self, address: str | Sequence[str], token: str | None = None, tls: TLSOption = False) -> None:
        given = [address] if isinstance(address, str) else address
        if not isinstance(given, list | tuple) or not given or not all(isinstance(each, str) for each in given):
            raise ConfigError(f"address must be text such as '127.0.0.1:7070', or several, not {shown(address)}")
        if not isinstance(token, str | None):
            raise ConfigError(f"token must be text or None, not {type(token).__name__}")
        self._addresses = list(dict.fromkeys(map(parse_address, given)))
        if tls and any(isinstance(each, UnixAddress) for each in self._addresses):
            raise ConfigError("TLS is not supported over a unix socket; leave out `tls`, or give host:port")
        self._token = token
        self._tls = tls_context(tls)
        self._ids = itertools.count(1)  # shared by all connections: a resumed request keeps its id
        self._pool: ConnectionPool | None = None

    async def __aenter__(self) -> AsyncClient:
        pool = ConnectionPool(self._addresses, self._token, self._tls)
        await pool.for_new_requests()
        self._pool = pool
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections; the server cancels running requests. Idempotent."""
        if self._pool is not None:
            await self._pool.close()

    def generate(
        self,
        prompt: str | Sequence[int] | None = None,
        sampling_params: SamplingParams | None = None,
        **options: Unpack[RequestOptions],
    ) -> AsyncGenerator[OutputChunk, None]:
        """Stream the continuation of a text, of token ids or of `messages`; the last chunk has `usage`.

        Leaving the loop early cancels the request. The call itself raises TypeError for an unknown argument and
        InvalidRequest for a prompt, `messages`, `chat`, `sampling_params` or a callback of another form. The loop
        raises the server's error by its class, or Unavailable if the connection is lost and the stream cannot continue:
        it has one address and is not `resumable`, or no server answered for a minute. Keep reading: the server
        ends a stream that is not read in time with DeadlineExceeded. The chunks of several choices arrive
        interleaved, each with its `choice`; the last one of a choice has its `finish_reason`. Callbacks run between
        two chunks.
        """
        _check_options(options)
        if not isinstance(sampling_params, SamplingParams | None):
            kind = type(sampling_params).__name__
            raise InvalidRequest(f"sampling_params must be a SamplingParams such as SamplingParams(), not {kind}")
        messages, images = extract_images(options.get("messages"))
        chat = options.get("chat")
        if not isinstance(chat, ChatOptions | None):
            raise InvalidRequest(f"chat must be a ChatOptions such as ChatOptions(tools=[…]), not {shown(chat)}")
        frame = Generate(
            next(self._ids),
            prompt if prompt is None or isinstance(prompt, str) else as_token_ids(prompt),
            sampling_params or SamplingParams(),
            options.get("deadline_ms"),
            options.get("priority", 0),
            options.get("pin_ms"),
            None if messages is None else chat_messages(messages),
            idempotency_key=options.get("idempotency_key"),
            resumable=options.get("resumable", False),
            chat=chat,
            prompt_cache_key=options.get("prompt_cache_key", ""),
            images=images,
            model=options.get("model", ""),
            traceparent=options.get("traceparent", ""),
        )
        return TokenStream(self._entered(), frame, options.get("on_accepted"), options.get("on_progress")).chunks()

    async def complete(
        self,
        prompt: str | Sequence[int] | None = None,
        sampling_params: SamplingParams | None = None,
        **options: Unpack[RequestOptions],
    ) -> RequestOutput:
        """Return the whole continuation at once. Raises as `generate` does."""
        async with contextlib.aclosing(self.generate(prompt, sampling_params, **options)) as chunks:
            received = [chunk async for chunk in chunks]
        usage = received[-1].usage
        if usage is None:
            raise GenerationFailed("the stream ended without usage")
        return RequestOutput(outputs=join_chunks(received), usage=usage)

    async def embed(
        self,
        inputs: str | Sequence[int] | Sequence[str | Sequence[int]],
        *,
        dimensions: int | None = None,
        prompt_name: str | None = None,
        on_progress: OnEmbedded | None = None,
        **options: Unpack[EmbedOptions],
    ) -> npt.NDArray[np.float32]:
        """Return one vector per input, f32 [inputs, dimensions], as `LLM.embed` does.

        `on_progress` is called with the number of finished inputs and of all inputs. Cancelling the call cancels the
        request. Raises InvalidRequest if the server makes no embeddings, or for an input of another form; the server's
        error by its class; Unavailable if the connection is lost.
        """
        check_arguments(options, ("inputs", "dimensions", "prompt_name", "on_progress", *EmbedOptions.__annotations__))
        frame = AskVectors(next(self._ids), tuple(as_prompts(inputs)), dimensions, prompt_name, **options)
        return await receive_values(self._entered(), frame, on_progress)

    async def score(
        self,
        query: str,
        documents: Sequence[str],
        *,
        on_progress: OnEmbedded | None = None,
        **options: Unpack[EmbedOptions],
    ) -> npt.NDArray[np.float32]:
        """Return a score of each document as an answer to the query, f32 [documents], as `LLM.score` does.

        Raises as `embed`.
        """
        check_arguments(options, ("query", "documents", "on_progress", *EmbedOptions.__annotations__))
        frame = AskScores(next(self._ids), query, as_documents(query, documents), **options)
        return (await receive_values(self._entered(), frame, on_progress))[:, 0]

    async def tokenize(self, text: str, add_special_tokens: bool = True, *, model: str = "") -> tuple[int, ...]:
        """Return the token ids of `text` by a model of this name; by default, the first one that generates text.

        Raises InvalidRequest if the model has no tokenizer.
        """
        if not isinstance(text, str) or not isinstance(add_special_tokens, bool):
            raise InvalidRequest(f"tokenize takes text and a bool, not {shown(text)} and {shown(add_special_tokens)}")
        return (await self._ask(Tokenize(next(self._ids), text, add_special_tokens, model), Tokenized)).token_ids

    async def models(self) -> tuple[ServedModel, ...]:
        """Return the names and limits of the served models."""
        return (await self._ask(ListModels(next(self._ids)), Models)).models

    async def stats(self) -> dict[str, int]:
        """Return counters and gauges by name: the engine's, or this tenant's own if the server has several tenants."""
        return (await self._ask(AskStats(next(self._ids)), Stats)).stats

    async def ping(self) -> float:
        """Return the seconds of a round trip to the server's event loop."""
        return await (await self._connection()).ping()

    async def _ask(self, question: Tokenize | ListModels | AskStats, answer_type: type[A]) -> A:
        connection = await self._connection()
        inbox = connection.ask(question)
        try:
            await connection.flush()
            answer = await inbox.get()
        finally:
            connection.leave(question.request_id)
        if isinstance(answer, ConnectionLost):
            raise answer.reason
        if isinstance(answer, QuireError):
            raise answer
        if not isinstance(answer, answer_type):
            raise ProtocolError(f"{type(answer).__name__} is no answer to {type(question).__name__}")
        return answer

    async def _connection(self) -> ClientConnection:
        return await self._entered().for_new_requests()

    def _entered(self) -> ConnectionPool:
        if self._pool is None or self._pool.is_closed:
            state = "not connected" if self._pool is None else "closed"
            raise NotOpen(f"this client is {state}; use `async with AsyncClient(…) as client:`")
        return self._pool


def _check_options(options: Mapping[str, object]) -> None:
    """Raise TypeError that names the right argument if one does not exist, InvalidRequest for a wrong callback."""
    check_arguments(options, ("prompt", "sampling_params", *RequestOptions.__annotations__))
    for name in ("on_accepted", "on_progress"):
        callback = options.get(name)
        if callback is not None and not callable(callback):
            raise InvalidRequest(f"{name} must be a function or None, not {shown(callback)}")
