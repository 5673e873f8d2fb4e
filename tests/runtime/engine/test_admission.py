"""A request on its way to the core: preparing its prompt, refusals and cancellation, and what they leave behind."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from quire.runtime.common.errors import (
    ContextLengthExceeded,
    GenerationFailed,
    InvalidRequest,
    Overloaded,
    QuireError,
    QuotaExceeded,
    Unavailable,
)
from quire.runtime.common.types import SamplingParams
from quire.runtime.engine import Engine, GenerateRequest
from quire.scheduler import NotAccepting, PageQuotaExceeded, QueueFull, Request, RequestUpdate, SampledToken

from .conftest import ESTIMATE, FakeCore, FakeObserver, FakeTextProcessor

CHAT = ({"role": "user", "content": "hi "},)
PREPARED: dict[str, dict[str, Any]] = {"text": {"prompt": "hi"}, "chat": {"prompt": None, "messages": CHAT}}


def request(prompt: str | tuple[int, ...] | None = "hi", tenant: str = "", **options: Any) -> GenerateRequest:
    messages = options.pop("messages", None)
    params = SamplingParams(**{"max_tokens": 4, **options})
    return GenerateRequest(prompt=prompt, messages=messages, sampling_params=params, tenant=tenant)


async def turns(count: int = 5) -> None:
    """Let other tasks run until each of them waits."""
    for _ in range(count):
        await asyncio.sleep(0)


# Room in the queue while a prompt is prepared


async def test_requests_being_tokenized_count_as_queued(
    engine: Engine[FakeCore], core: FakeCore, text_processor: FakeTextProcessor
) -> None:
    core.max_num_waiting, text_processor.gate = 3, asyncio.Event()
    preparing = [asyncio.ensure_future(engine.submit(request())), asyncio.ensure_future(engine.submit(request(n=2)))]
    await turns()
    with pytest.raises(Overloaded):
        engine.submit(request())  # refused by the call itself, not only once it is awaited
    with pytest.raises(Overloaded):
        engine.submit(request((1, 2)))
    text_processor.gate.set()
    await asyncio.gather(*preparing)
    assert len(core.requests) == 3
    assert text_processor.calls == ["encode", "encode"]


async def test_room_is_checked_again_before_tokenizing(
    engine: Engine[FakeCore], core: FakeCore, text_processor: FakeTextProcessor
) -> None:
    """Requests submitted at the same moment all pass the first check; only those with room are tokenized."""
    core.max_num_waiting = 2
    submitted = [engine.submit(request()) for _ in range(4)]
    text_processor.gate = asyncio.Event()
    tasks = [asyncio.ensure_future(each) for each in submitted]
    await turns()
    assert text_processor.calls == ["encode", "encode"]
    text_processor.gate.set()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes[2:]] == [Overloaded, Overloaded]
    assert len(core.requests) == 2


@pytest.mark.parametrize("prompt", PREPARED.values(), ids=PREPARED)
async def test_a_failed_preparation_releases_its_place(
    engine: Engine[FakeCore],
    core: FakeCore,
    text_processor: FakeTextProcessor,
    observer: FakeObserver,
    prompt: dict[str, Any],
) -> None:
    core.max_num_waiting = 1
    for error in (InvalidRequest("no"), GenerationFailed("no"), MemoryError("no")):
        text_processor.error = error
        with pytest.raises(type(error)):
            await engine.submit(request(**prompt))
    assert [type(error) for error in observer.rejected] == [InvalidRequest, GenerationFailed]
    text_processor.error = None
    await engine.submit(request(**prompt))
    assert len(core.requests) == 1


@pytest.mark.parametrize("prompt", PREPARED.values(), ids=PREPARED)
async def test_a_cancelled_preparation_releases_its_place(
    engine: Engine[FakeCore],
    core: FakeCore,
    text_processor: FakeTextProcessor,
    observer: FakeObserver,
    prompt: dict[str, Any],
) -> None:
    core.max_num_waiting, text_processor.gate = 1, asyncio.Event()
    for _ in range(3):
        preparing = asyncio.ensure_future(engine.submit(request(**prompt)))
        await turns()
        preparing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await preparing
    text_processor.gate = None
    await engine.submit(request(**prompt))
    assert len(core.requests) == 1
    assert observer.rejected == []


async def test_a_prompt_that_is_too_long_releases_its_place(
    engine: Engine[FakeCore], core: FakeCore, observer: FakeObserver
) -> None:
    core.max_num_waiting = 1
    for prompt in ({"prompt": "a b c d " * 100}, {"prompt": None, "messages": ({"content": "a b c d " * 100},)}):
        with pytest.raises(ContextLengthExceeded):
            await engine.submit(request(**prompt))
    assert [type(error) for error in observer.rejected] == [ContextLengthExceeded] * 2
    await engine.submit(request())


async def test_the_text_of_a_chat_is_checked_before_it_is_tokenized(
    engine: Engine[FakeCore], text_processor: FakeTextProcessor
) -> None:
    for content, error in (("x" * 1_000_000, ContextLengthExceeded), ("", InvalidRequest), ("\ud800", InvalidRequest)):
        with pytest.raises(error):
            await engine.submit(request(None, messages=({"content": content},)))
    assert "encode" not in text_processor.calls


# Refusals


@pytest.mark.parametrize(
    ("refusal", "error"),
    [
        (QueueFull("full", ESTIMATE), Overloaded),
        (PageQuotaExceeded("quota", ESTIMATE), QuotaExceeded),
        (NotAccepting("draining"), Unavailable),
        (Unavailable("no engine process"), Unavailable),
    ],
)
async def test_a_refused_request_leaves_nothing_in_the_engine(
    engine: Engine[FakeCore],
    core: FakeCore,
    observer: FakeObserver,
    refusal: Exception,
    error: type[QuireError],
) -> None:
    core.refusal = refusal
    with pytest.raises(error):
        await engine.submit(request(n=3))
    assert [type(each) for each in observer.rejected] == [error]
    assert core.dropped == [0, 1, 2]
    core.refusal = None
    stream = await engine.submit(request())
    (accepted,) = core.requests
    assert accepted.request_id == 3, "ids are not used twice"
    core.listener.publish([RequestUpdate(accepted.request_id, (SampledToken(3, 5),), "length")])
    assert [chunk.token_ids async for chunk in stream] == [(5,)]
    core.listener.ended()
    assert [stats.finish_reason for stats in observer.finished] == ["length"], "the refused one never ran"


async def test_cancelling_while_the_core_decides_drops_the_request(
    engine: Engine[FakeCore], core: FakeCore, observer: FakeObserver
) -> None:
    core.gate = asyncio.Event()
    submitting = asyncio.ensure_future(engine.submit(request((1, 2), n=2)))
    await turns()
    submitting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await submitting
    assert core.dropped == [0, 1]
    core.listener.ended()
    assert (observer.rejected, observer.finished) == ([], [])


async def test_a_refusal_is_reported_once(engine: Engine[FakeCore], core: FakeCore, observer: FakeObserver) -> None:
    for wrong in (request(max_tokens=0), request(None), request(""), request((9999,)), request((1,) * 300)):
        with pytest.raises(InvalidRequest):
            await engine.submit(wrong)
    core.accepting = False
    with pytest.raises(Unavailable):
        await engine.submit(request())
    assert len(observer.rejected) == 6
    assert observer.finished == []


async def test_updates_may_come_before_the_cores_answer(engine: Engine[FakeCore], core: FakeCore) -> None:
    def publish(requests: Sequence[Request]) -> None:
        core.listener.publish([RequestUpdate(requests[0].request_id, (SampledToken(0, 7),), "length")])

    core.on_add = publish
    stream = await engine.submit(request((1, 2)))
    assert [chunk.token_ids async for chunk in stream] == [(7,)]
