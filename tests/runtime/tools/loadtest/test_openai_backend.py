"""The OpenAI backend against a fake server on a real socket, which sends valid and broken streams."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from quire.runtime.common.errors import ConfigError, Unauthenticated, Unavailable
from quire.runtime.tools.loadtest.openai_backend import OpenAIBackend, OpenAITarget
from quire.runtime.tools.loadtest.options import CHAT_COMPLETIONS, COMPLETIONS, TargetOptions
from quire.runtime.tools.loadtest.records import LoadRequest, RequestRecord
from quire.runtime.tools.loadtest.sender import LoadProgress, send_closed_loop
from quire.runtime.tools.loadtest.target import given_address

DONE = "[DONE]"
USAGE = {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 3}}


def text(piece: str, finish_reason: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": piece, "finish_reason": finish_reason}]}


def delta(finish_reason: str | None = None, **fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": finish_reason}]}


class FakeOpenAIServer:
    """Answers every request with `events`, as they are or cut into single bytes."""

    def __init__(self) -> None:
        self.events: list[Any] = []
        self.status = self.models = 200
        self.cut = False
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[Any] = []
        self.peers: set[Any] = set()  # addresses of the clients that listed models

    async def complete(self, request: web.Request) -> web.StreamResponse:
        self.bodies.append(await request.json())
        self.headers.append(request.headers)
        if self.status != 200:
            return web.Response(status=self.status, text="the queue is full")
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for event in self.events:
            line = event if isinstance(event, str) else json.dumps(event, ensure_ascii=False)
            data = f"{line if line.startswith(':') else f'data: {line}'}\r\n\r\n".encode()
            for piece in [data[at : at + 1] for at in range(len(data))] if self.cut else [data]:
                await response.write(piece)
        return response

    async def list_models(self, request: web.Request) -> web.Response:
        assert request.transport is not None
        self.peers.add(request.transport.get_extra_info("peername"))
        body = {"object": "list", "data": [{"id": "tiny", "object": "model"}] if self.models == 200 else []}
        return web.json_response(body, status=self.models if self.models > 0 else 200)


Serve = Callable[..., Any]


@pytest.fixture
async def fake() -> AsyncIterator[tuple[FakeOpenAIServer, Serve]]:
    server = FakeOpenAIServer()
    app = web.Application()
    app.router.add_post("/v1/{rest:.*}", server.complete)
    app.router.add_get("/v1/models", server.list_models)
    async with TestServer(app) as http:

        @asynccontextmanager
        async def backend(**options: Any) -> AsyncIterator[OpenAIBackend]:
            opened = await OpenAIBackend.open(OpenAITarget(str(http.make_url("/")), **options))
            try:
                yield opened
            finally:
                await opened.close()

        yield server, backend


async def send(backend: OpenAIBackend, prompt: Any = "Hello", **fields: Any) -> RequestRecord:
    sent = await send_closed_loop(backend, [LoadRequest(prompt, 1, 3, **fields)], LoadProgress(), max_concurrency=1)
    return sent.records[0]


@pytest.mark.parametrize("cut", [False, True], ids=["whole", "byte by byte"])
async def test_completions(fake: tuple[FakeOpenAIServer, Serve], cut: bool) -> None:
    server, backend = fake
    server.cut = cut
    server.events = [": ping", text("é"), text(""), text("日", "length"), USAGE, DONE]
    async with backend(model="m", api_key="secret", body={"temperature": 0.5}) as opened:
        record = await send(opened, (1, 2))
    assert server.bodies == [
        {
            "model": "m",
            "prompt": [1, 2],
            "max_tokens": 3,
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": 0.5,
        }
    ]
    assert server.headers[0]["Authorization"] == "Bearer secret"
    assert (record.text, record.token_counts, record.prompt_tokens) == ("é日", [1, 1, 1], 5)
    assert (record.finish_reason, record.error, record.queue_ms) == ("length", None, None)
    assert record.sent_s < record.token_times[0] <= record.token_times[-1] <= record.ended_s


async def test_chat_completions(fake: tuple[FakeOpenAIServer, Serve]) -> None:
    server, backend = fake
    usage = {"usage": {"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}}}
    server.events = [delta(role="assistant", content=""), delta(content="a"), delta("stop", content="b"), usage, DONE]
    async with backend(endpoint=CHAT_COMPLETIONS) as opened:
        assert opened.model == "tiny"
        record = await send(opened)
    (body,) = server.bodies
    assert body["messages"] == [{"role": "user", "content": "Hello"}]
    assert body["max_completion_tokens"] == 3
    assert (record.text, record.token_counts) == ("ab", [1, 1])  # the event with the role is not a token
    assert (record.prompt_tokens, record.cached_tokens, record.finish_reason) == (9, 4, "stop")


async def test_the_servers_token_count_is_used(fake: tuple[FakeOpenAIServer, Serve]) -> None:
    server, backend = fake
    server.events = [text("a b"), text(" c", "stop"), USAGE, DONE]
    async with backend(model="m") as opened:
        assert (await send(opened)).token_counts == [2, 1]


async def test_a_cancelled_request_closes_its_stream(fake: tuple[FakeOpenAIServer, Serve]) -> None:
    server, backend = fake
    server.events = [text("a"), text("b"), text("c", "stop"), DONE]
    async with backend(model="m") as opened:
        record = await send(opened, cancel_after=1)
        assert (record.cancelled, record.text, record.error) == (True, "a", None)
        assert (await send(opened)).text == "abc"


@pytest.mark.parametrize(
    ("events", "code", "message"),
    [
        ([text("a")], "INCOMPLETE", "without a finish reason"),
        ([], "INCOMPLETE", "without a finish reason"),
        ([USAGE, DONE], "NO_TOKENS", "without a token"),
        (["nonsense"], "MALFORMED", "not an event of this API"),
        ([text("a"), {"error": {"message": "out of memory"}}], "SERVER_ERROR", "out of memory"),
        ([{"choices": "many"}], "MALFORMED", r"at `\$.choices`"),
    ],
)
async def test_broken_streams_fail(
    fake: tuple[FakeOpenAIServer, Serve], events: list[Any], code: str, message: str
) -> None:
    server, backend = fake
    server.events = events
    async with backend(model="m") as opened:
        record = await send(opened)
    assert (record.error_code, record.finish_reason) == (code, None)
    assert record.error is not None
    assert message.replace("\\", "") in record.error


async def test_a_refusal_is_counted_by_its_http_status(fake: tuple[FakeOpenAIServer, Serve]) -> None:
    server, backend = fake
    server.status = 503
    async with backend(model="m") as opened:
        record = await send(opened)
    assert (record.error_code, record.error) == ("HTTP_503", "the queue is full")


async def test_connections_are_opened_before_a_burst_needs_them(fake: tuple[FakeOpenAIServer, Serve]) -> None:
    server, backend = fake
    async with backend(num_connections=4):
        assert len(server.peers) == 4


async def test_a_server_that_does_not_answer_is_unavailable(fake: tuple[FakeOpenAIServer, Serve]) -> None:
    _, backend = fake
    async with backend(model="m") as opened:
        opened._url = "http://127.0.0.1:9/v1/completions"
        assert (await send(opened)).error_code == "UNAVAILABLE"
    with pytest.raises(Unavailable, match="does not answer"):
        await OpenAIBackend.open(OpenAITarget("http://127.0.0.1:9"))


@pytest.mark.parametrize("end", ["", "/", "/v1", "/v1/"])
def test_a_base_url_may_end_as_that_of_other_clients(end: str) -> None:
    assert given_address(TargetOptions(backend="openai", base_url=f"http://host:1{end}")) == "http://host:1"


async def test_unusable_servers_and_addresses_are_refused(fake: tuple[FakeOpenAIServer, Serve]) -> None:
    server, backend = fake
    for status, error, message in (
        (401, Unauthenticated, "OPENAI_API_KEY"),
        (0, Unavailable, "lists no models"),
    ):
        server.models = status
        with pytest.raises(error, match=message):
            async with backend():
                pass
    with pytest.raises(ConfigError, match="base_url"):
        await OpenAIBackend.open(OpenAITarget("127.0.0.1:8000", COMPLETIONS, "m"))
    with pytest.raises(ConfigError, match="endpoint"):
        await OpenAIBackend.open(OpenAITarget("http://127.0.0.1:8000", "/v1/embeddings", "m"))
