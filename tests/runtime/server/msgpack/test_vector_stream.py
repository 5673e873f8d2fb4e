"""Requests to embed or score: their options, their tenant's tokens, and frames as the client takes and reads them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock, call

import numpy as np
import pytest
from quire.runtime.common.errors import Cancelled, GenerationFailed, Unavailable
from quire.runtime.engine.facade import EmbeddedTexts
from quire.runtime.protocol.frames import Done, Scores, Vectors
from quire.runtime.protocol.wire_errors import error_frame
from quire.runtime.server.http.fields import Fields
from quire.runtime.server.monitoring.traces import NO_TRACE
from quire.runtime.server.msgpack.frame_writer import FrameWriter
from quire.runtime.server.msgpack.vector_stream import FRAME_BYTES, SCORE_BYTES, VALUE_BYTES, VectorStream
from quire.runtime.server.openai.embeddings import embedding_call, rerank_call, score_call
from quire.runtime.server.requests.live_embedding import LiveEmbedding
from quire.runtime.server.requests.output_reader import Pace
from quire.runtime.server.requests.send_buffer import SendBuffer
from quire.runtime.server.tenancy.tenants import Turns


class Buffer:
    """A send buffer that is short while `may_send` is set."""

    def __init__(self, room: int) -> None:
        self.max_frame_bytes = FRAME_BYTES + room
        self.sent: list[Any] = []
        self.may_send = asyncio.Event()

    def send(self, frame: Any) -> None:
        self.sent.append(frame)

    async def wait_until_short(self) -> None:
        await self.may_send.wait()


class Live:
    """A request with the vectors, or the scores, of five texts, in two chunks."""

    def __init__(self, size: int) -> None:
        self.values = np.arange(5 * size, dtype=np.float32).reshape(5, size)
        self.usage = None

    async def chunks(self) -> AsyncIterator[EmbeddedTexts]:
        for first, end in ((0, 4), (4, 5)):
            yield EmbeddedTexts(first_index=first, values=self.values[first:end], prompt_tokens=9)

    def cancel(self, cause: str) -> None:
        """Do nothing: all has been computed."""


def stream_of(live: Live, buffer: Buffer, *, is_score: bool = False, credit: int | None = None) -> VectorStream:
    pace = Pace(cast(SendBuffer, buffer), Turns(), credit, 60_000)
    return VectorStream(cast(LiveEmbedding, live), FrameWriter(3, pace.send_buffer, ()), pace, is_score=is_score)


async def run_until_idle(stream: VectorStream) -> asyncio.Task[Any]:
    """Run the stream for as long as it has anything to do at once."""
    task = asyncio.create_task(stream.run())
    for _ in range(20):
        await asyncio.sleep(0)
    return task


async def test_a_frame_has_the_vectors_that_the_client_takes() -> None:
    live = Live(6)
    buffer = Buffer(room=3 * 6 * VALUE_BYTES)
    buffer.may_send.set()
    await stream_of(live, buffer).run()
    pieces = [live.values[first:end].tobytes() for first, end in ((0, 3), (3, 4), (4, 5))]
    assert buffer.sent == [Vectors(3, first, 6, data) for first, data in zip((0, 3, 4), pieces, strict=True)]


async def test_a_frame_has_the_scores_that_the_client_takes() -> None:
    live = Live(1)
    buffer = Buffer(room=2 * SCORE_BYTES)
    buffer.may_send.set()
    await stream_of(live, buffer, is_score=True).run()
    assert buffer.sent == [Scores(3, 0, (0.0, 1.0)), Scores(3, 2, (2.0, 3.0)), Scores(3, 4, (4.0,))]


async def test_nothing_is_sent_to_a_client_that_does_not_read() -> None:
    buffer = Buffer(room=1000)
    task = await run_until_idle(stream_of(Live(6), buffer))
    assert buffer.sent == []
    buffer.may_send.set()
    await task
    assert [frame.first_index for frame in buffer.sent] == [0, 4]


@pytest.mark.parametrize(
    ("credit", "grants", "sent"),
    [(4, [], [0, 3]), (1, [], [0]), (1, [2], [0]), (1, [2, 1], [0, 3]), (1, [2, 2], [0, 3, 4]), (5, [], [0, 3, 4])],
)
async def test_credit_counts_texts_and_adds_up(credit: int, grants: list[int], sent: list[int]) -> None:
    """Frames have 3, 1 and 1 texts; one is sent while any credit is left."""
    buffer = Buffer(room=3 * 6 * VALUE_BYTES)
    buffer.may_send.set()
    stream = stream_of(Live(6), buffer, credit=credit)
    task = await run_until_idle(stream)
    for texts in grants:
        stream.grant(texts)
        for _ in range(20):
            await asyncio.sleep(0)
    assert [frame.first_index for frame in buffer.sent] == sent
    stream.cancel("client")
    await task


async def test_a_shutdown_ends_a_request_in_its_error_and_a_cancel_does_not() -> None:
    buffer = Buffer(room=1000)
    for end, expected in (
        (lambda stream: stream.cancel("client"), Done(3, "cancelled", None)),
        (lambda stream: stream.leave("disconnect"), Done(3, "cancelled", None)),
        (lambda stream: stream.shut_down(Unavailable("leaving")), error_frame(3, Unavailable("leaving"))),
    ):
        stream = stream_of(Live(6), buffer, credit=0)
        task = await run_until_idle(stream)
        end(stream)
        assert await task == expected


@pytest.mark.parametrize(
    ("read_call", "body"),
    [
        (embedding_call, {"input": "a"}),
        (rerank_call, {"query": "q", "documents": ["a"]}),
        (score_call, {"text_1": "q", "text_2": "a"}),
    ],
)
def test_options_of_http_requests_reach_the_engine(read_call: Any, body: dict[str, Any]) -> None:
    options = {"priority": 7, "deadline_ms": 900, "truncate_prompt_tokens": 5}
    request = read_call(Fields({**body, **options}), "tenant").request
    assert {name: getattr(request, name) for name in options} == options
    assert request.tenant == "tenant"


class Submitted(Live):
    """The engine's results for accepted texts; the second chunk may be an error."""

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__(2)
        self.admission = None
        self._error = error

    async def __aiter__(self) -> AsyncIterator[EmbeddedTexts]:
        async for chunk in self.chunks():
            if self._error is not None and chunk.first_index:
                raise self._error
            yield chunk

    def cancel(self) -> None:
        """Do nothing: all has been read."""


@pytest.mark.parametrize(("error", "counted"), [(None, 18), (GenerationFailed("a fault"), None)])
async def test_the_tokens_of_texts_are_counted_for_their_tenant(error: Exception | None, counted: int | None) -> None:
    """The texts of a request that ends in an error are not."""

    async def submit() -> Any:
        return Submitted(error)

    left: list[Any] = []
    log = Mock()
    live = LiveEmbedding(submit(), Mock(), tenant_that(left), 3, Mock(), log, Mock(), NO_TRACE)
    with pytest.raises(GenerationFailed) if error is not None else contextlib.nullcontext():
        assert [chunk.first_index async for chunk in live.chunks()] == [0, 4]
    assert [None if usage is None else usage.prompt_tokens for usage in left] == [counted]
    logged = call.embedded(3, 18) if error is None else call.failed(3, "INTERNAL", None, 0)
    assert log.mock_calls == [logged]


def tenant_that(left: list[Any]) -> Any:
    """Return a tenant that notes the usage of the requests that end."""
    return SimpleNamespace(name="tenant", leave=left.append)


async def test_a_request_shows_how_far_it_is_and_ends_between_two_chunks() -> None:
    async def submit() -> Any:
        return Submitted()

    observer = Mock()
    log = Mock()
    live = LiveEmbedding(submit(), Mock(), tenant_that([]), 3, observer, log, Mock(), NO_TRACE)
    assert (live.status().state, live.status().prefilled) == ("queued", 0)
    chunks = live.chunks()
    await anext(chunks)
    assert (live.status().state, live.status().prefilled) == ("prefill", 9)
    live.cancel("client")
    live.cancel("disconnect")
    with pytest.raises(Cancelled):
        await anext(chunks)
    assert observer.mock_calls == [call.on_cancelled("client")]
    assert log.mock_calls == [call.failed(3, "CANCELLED", "client", 0)]
