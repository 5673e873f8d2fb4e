"""Send requests to any OpenAI-compatible server over HTTP, and read its server-sent events. Needs aiohttp.

The time of a chunk is the time its bytes arrived, before they are parsed. As in vLLM, each event with a choice counts
as one token until the server's usage says otherwise, except the first event of a chat, which holds only the role.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from ...common.errors import ConfigError, MissingDependency, Unauthenticated, Unavailable
from .options import COMPLETIONS
from .records import LoadRequest, ReceivedChunk, RequestFailed, StreamEnd

if TYPE_CHECKING:
    import aiohttp

MODELS = "/v1/models"
CONNECT_TIMEOUT_S = 10.0
MAX_MESSAGE = 300  # characters of an error response that are kept


@dataclass(frozen=True, slots=True)
class OpenAITarget:
    """An OpenAI-compatible server: its address, and the common fields of all requests."""

    base_url: str  # http://HOST:PORT
    endpoint: str = COMPLETIONS
    model: str | None = None  # None: the first model that the server lists
    api_key: str | None = None
    body: Mapping[str, Any] = field(default_factory=dict)  # fields of every request: sampling parameters, ignore_eos
    num_connections: int = 1  # opened before the run; more are opened on demand

    @property
    def is_chat(self) -> bool:
        return self.endpoint.endswith("chat/completions")


class OpenAIBackend:
    """An OpenAI-compatible server under load."""

    def __init__(self, target: OpenAITarget, model: str, session: aiohttp.ClientSession) -> None:
        self.model = model
        self._target = target
        self._session = session
        self._url = target.base_url.rstrip("/") + target.endpoint

    @classmethod
    async def open(cls, target: OpenAITarget) -> OpenAIBackend:
        """Connect, and ask for the model. Raises MissingDependency, ConfigError, Unavailable or Unauthenticated."""
        if not target.base_url.startswith(("http://", "https://")):
            raise ConfigError(f"base_url: {target.base_url!r} is not allowed; write http://HOST:PORT")
        if not target.endpoint.endswith("/completions"):
            raise ConfigError(f"endpoint: {target.endpoint!r} is not allowed; it must end in /completions")
        session = _session(target)
        try:
            model = target.model or await _first_model(target.base_url, session)
            await _connect(target, session)
            return cls(target, model, session)
        except BaseException:
            await session.close()
            raise

    async def close(self) -> None:
        await self._session.close()

    async def stream(self, request: LoadRequest) -> AsyncGenerator[ReceivedChunk, None]:
        events = _EventStream()
        try:
            async with self._session.post(self._url, data=self._body(request)) as response:
                if response.status != 200:
                    raise await _http_error(response)
                async for data in response.content.iter_any():
                    arrived_s = time.perf_counter()
                    for event in events.feed(data):
                        yield ReceivedChunk(arrived_s, 1, _text(event))
        except OSError as error:
            raise RequestFailed("UNAVAILABLE", str(error) or type(error).__name__) from error
        except _aiohttp().ClientError as error:
            raise RequestFailed("UNAVAILABLE", f"{type(error).__name__}: {error}") from error
        yield ReceivedChunk(time.perf_counter(), 0, "", events.end())

    def _body(self, request: LoadRequest) -> bytes:
        body: dict[str, Any] = {"model": self.model, "stream": True, "stream_options": {"include_usage": True}}
        if self._target.is_chat:
            body["messages"] = [{"role": "user", "content": request.prompt}]
            body["max_completion_tokens"] = request.max_tokens
        else:
            body["prompt"] = request.prompt
            body["max_tokens"] = request.max_tokens
        return msgspec.json.encode({**body, **self._target.body})


class _Delta(msgspec.Struct):
    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None


class _EventStream:
    """Parser of one answer's events, from pieces of bytes that may be cut anywhere."""

    def __init__(self) -> None:
        self._decode = msgspec.json.Decoder(_Event).decode
        self._incomplete = b""
        self._finish_reason: str | None = None
        self._usage = _Usage()

    def feed(self, data: bytes) -> list[_Event]:
        """Return the events with tokens that `data` completes. Raises RequestFailed for malformed events."""
        *lines, self._incomplete = (self._incomplete + data).split(b"\n")
        return [event for line in lines if line.startswith(b"data:") and (event := self._event(line[5:].strip()))]

    def end(self) -> StreamEnd:
        """Return the end of the stream. Raises RequestFailed if it is incomplete."""
        if self._finish_reason is None:
            raise RequestFailed("INCOMPLETE", "the stream ended without a finish reason")
        details = self._usage.prompt_tokens_details
        return StreamEnd(
            self._finish_reason,
            self._usage.prompt_tokens,
            self._usage.completion_tokens,
            None if details is None else details.cached_tokens,
        )

    def _event(self, payload: bytes) -> _Event | None:
        if payload == b"[DONE]":
            self._finish_reason = self._finish_reason or "stop"
            return None
        try:
            event = self._decode(payload)
        except (msgspec.DecodeError, RecursionError) as error:
            raise RequestFailed("MALFORMED", f"not an event of this API: {error}") from error
        if event.error is not None:
            raise RequestFailed("SERVER_ERROR", str(event.error)[:MAX_MESSAGE])
        self._usage = event.usage or self._usage
        if not event.choices:
            return None
        self._finish_reason = event.choices[0].finish_reason or self._finish_reason
        return event if _has_token(event.choices[0]) else None


def _has_token(choice: _Choice) -> bool:
    delta = choice.delta
    return delta is None or delta.role is None or bool(delta.content or delta.reasoning_content)


def _text(event: _Event) -> str:
    choice = event.choices[0] if event.choices else _Choice()
    return choice.text or (choice.delta and choice.delta.content) or ""


async def _http_error(response: aiohttp.ClientResponse) -> RequestFailed:
    message = (await response.text(errors="replace"))[:MAX_MESSAGE]
    return RequestFailed(f"HTTP_{response.status}", message or response.reason or "")


async def _first_model(base_url: str, session: aiohttp.ClientSession) -> str:
    url = base_url.rstrip("/") + MODELS
    try:
        async with session.get(url) as response:
            if response.status in (401, 403):
                raise Unauthenticated(f"{url} answered {response.status}: set OPENAI_API_KEY or `token`")
            found = msgspec.json.decode(await response.read(), type=_Models).data
    except (OSError, _aiohttp().ClientError) as error:
        raise Unavailable(f"{url} does not answer: {error}") from error
    except msgspec.DecodeError as error:
        raise Unavailable(f"{url} does not list models ({error}); name one with `model`") from error
    if not found:
        raise Unavailable(f"{url} lists no models; name one with `model`")
    return found[0].id


async def _connect(target: OpenAITarget, session: aiohttp.ClientSession) -> None:
    """Open all connections with a request each: opening them during a burst would count as the server's time."""
    url = target.base_url.rstrip("/") + MODELS

    async def ask() -> None:
        async with session.get(url) as response:
            await response.read()

    try:
        await asyncio.gather(*(ask() for _ in range(target.num_connections)))
    except (OSError, _aiohttp().ClientError) as error:
        raise Unavailable(f"{url} does not answer: {error}") from error


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


def _session(target: OpenAITarget) -> aiohttp.ClientSession:
    http = _aiohttp()
    headers = {"Content-Type": "application/json"}
    if target.api_key is not None:
        headers["Authorization"] = f"Bearer {target.api_key}"
    session: aiohttp.ClientSession = http.ClientSession(
        headers=headers,
        connector=http.TCPConnector(limit=0),
        timeout=http.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
    )
    return session


def _aiohttp() -> Any:
    try:
        import aiohttp
    except ImportError:
        raise MissingDependency("`backend` openai needs aiohttp: pip install 'quire[loadtest]'") from None
    return aiohttp
