"""A request on its way to the core: preparing its prompt, refusals and cancellation, and their cleanup."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import msgspec
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
from quire.runtime.common.fair_executor import NUM_THREADS
from quire.runtime.common.types import SamplingParams
from quire.runtime.engine import Engine, GenerateRequest, Prefilled, StepStats
from quire.scheduler import NotAccepting, PageQuotaExceeded, QueueFull, Request, RequestUpdate, SampledToken

from tests.support.waiting import until

from .conftest import ESTIMATE, INFO, FakeCore, FakeObserver, FakeTextProcessor

CHAT = ({"role": "user", "content": "hi "},)
PREPARED: dict[str, dict[str, Any]] = {"text": {"prompt": "hi"}, "chat": {"prompt": None, "messages": CHAT}}


def request(prompt: str | tuple[int, ...] | None = "hi", tenant: str = "", **options: Any) -> GenerateRequest:
    messages = options.pop("messages", None)
    params = SamplingParams(**{"max_tokens": 4, **options})
    return GenerateRequest(prompt=prompt, messages=messages, sampling_params=params, tenant=tenant)


async def test_the_core_learns_the_conversation_of_a_request(engine: Engine[FakeCore], core: FakeCore) -> None:
    given = GenerateRequest(prompt=(1, 2), prompt_cache_key="a", sampling_params=SamplingParams(max_tokens=4))
    turns = [CHAT, (*CHAT, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "go on"})]
    for each in (*(request(None, messages=turn) for turn in turns), given, request((3, 4), n=2)):
        await engine.submit(each)
    first, second, *others = [each.spec.conversation for each in core.requests]
    assert first == second
    assert others[1] == others[2], "samples of one prompt"
    assert len({first, *others}) == 3


# The queue while prompts are prepared


async def test_requests_being_tokenized_count_as_queued(
    engine: Engine[FakeCore], core: FakeCore, text_processor: FakeTextProcessor
) -> None:
    core.max_num_waiting = 3
    text_processor.gate = threading.Event()
    preparing = [engine.submit(request()), engine.submit(request(n=2))]
    with pytest.raises(Overloaded):
        engine.submit(request())  # refused by the call itself, before it is awaited
    with pytest.raises(Overloaded):
        engine.submit(request((1, 2)))
    text_processor.gate.set()
    await asyncio.gather(*preparing)
    assert len(core.requests) == 3
    assert text_processor.calls == ["encode", "encode"]


async def test_texts_of_one_tenant_do_not_count_for_another(
    engine: Engine[FakeCore], core: FakeCore, text_processor: FakeTextProcessor
) -> None:
    core.max_num_waiting = 2
    text_processor.gate = threading.Event()
    preparing = [engine.submit(request(tenant=tenant)) for tenant in "aab"]
    with pytest.raises(Overloaded):
        engine.submit(request(tenant="a"))
    text_processor.gate.set()
    results = await asyncio.gather(*preparing, return_exceptions=True)
    assert [type(result) for result in results].count(Overloaded) == 1, "the core decides once they are tokenized"


@pytest.mark.parametrize("prompt", PREPARED.values(), ids=PREPARED)
async def test_a_failed_preparation_frees_its_queue_slot(
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
async def test_a_cancelled_preparation_frees_its_queue_slot(
    engine: Engine[FakeCore],
    core: FakeCore,
    text_processor: FakeTextProcessor,
    observer: FakeObserver,
    prompt: dict[str, Any],
) -> None:
    core.max_num_waiting = 1
    text_processor.gate = threading.Event()
    for count in range(1, NUM_THREADS + 2):  # the last one waits for a thread
        preparing = asyncio.ensure_future(engine.submit(request(**prompt)))
        await asyncio.sleep(0)  # the coroutine begins, and waits
        await until(lambda: len(text_processor.calls) == min(count, NUM_THREADS))  # noqa: B023
        preparing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await preparing
    text_processor.gate.set()
    await engine.submit(request(**prompt))
    assert len(core.requests) == 1
    assert observer.rejected == []


async def test_a_prompt_that_is_too_long_frees_its_queue_slot(
    engine: Engine[FakeCore], core: FakeCore, observer: FakeObserver
) -> None:
    core.max_num_waiting = 1
    for prompt in (
        {"prompt": "a b c d " * 100},
        {"prompt": None, "messages": ({**CHAT[0], "content": "a b c d " * 100},)},
    ):
        with pytest.raises(ContextLengthExceeded):
            await engine.submit(request(**prompt))
    assert [type(error) for error in observer.rejected] == [ContextLengthExceeded] * 2
    await engine.submit(request())


async def test_the_text_of_a_chat_is_checked_before_it_is_tokenized(
    engine: Engine[FakeCore], text_processor: FakeTextProcessor
) -> None:
    for content, error in (("x" * 1_000_000, ContextLengthExceeded), ("", InvalidRequest), ("\ud800", InvalidRequest)):
        with pytest.raises(error):
            await engine.submit(request(None, messages=({**CHAT[0], "content": content},)))
    assert "encode" not in text_processor.calls


async def test_only_a_plain_prompt_gets_special_tokens(
    engine: Engine[FakeCore], text_processor: FakeTextProcessor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The template of a chat has written its own."""
    encode = text_processor.encode
    added = []

    def note(text: str, add_special_tokens: bool = True) -> tuple[int, ...]:
        added.append(add_special_tokens)
        return encode(text, add_special_tokens)

    monkeypatch.setattr(text_processor, "encode", note)
    for prompt in PREPARED.values():
        await engine.submit(request(**prompt))
    assert added == [True, False]


async def test_a_message_without_a_role_is_refused(engine: Engine[FakeCore], observer: FakeObserver) -> None:
    with pytest.raises(InvalidRequest, match=r"messages\[0\] has no 'role'"):
        await engine.submit(request(None, messages=({"content": "x"},)))
    assert [type(error) for error in observer.rejected] == [InvalidRequest]


async def test_text_parts_are_rendered_as_text(engine: Engine[FakeCore], text_processor: FakeTextProcessor) -> None:
    content = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    stream = await engine.submit(request(None, messages=({"role": "user", "content": content},)))
    assert stream.prompt_token_ids == text_processor.encode("one\ntwo" * 2, add_special_tokens=False)


async def test_a_submission_that_is_never_awaited_frees_its_queue_slot(
    engine: Engine[FakeCore], core: FakeCore, text_processor: FakeTextProcessor, observer: FakeObserver
) -> None:
    """A connection may be lost between the call of `submit` and the first step of the task that awaits it."""
    core.max_num_waiting = 1
    for error in (None, InvalidRequest("no")):
        text_processor.error = error
        engine.submit(request()).close()
        with pytest.raises(Overloaded):
            engine.submit(request())
        await until(lambda: not engine._prompts._num_preparing)
    assert core.requests == []
    text_processor.error = None
    await engine.submit(request())


async def test_end_tokens_outside_the_vocabulary_are_ignored(core: FakeCore, text_processor: FakeTextProcessor) -> None:
    core.info = msgspec.structs.replace(INFO, eos_token_ids=frozenset({3, INFO.vocab_size}))
    await Engine(core, text_processor).submit(request((1, 2)))
    assert core.requests[0].spec.stop_token_ids == {0, 3}, "the tokenizer's and the model's"


async def test_the_core_counts_pins_in_seconds(engine: Engine[FakeCore], core: FakeCore) -> None:
    await engine.submit(msgspec.structs.replace(request((1, 2)), pin_ms=1500))
    await engine.submit(request((1, 2)))
    assert [each.spec.pin_s for each in core.requests] == [1.5, None]


async def test_progress_never_exceeds_the_prompt(engine: Engine[FakeCore], core: FakeCore) -> None:
    """A beam that was preempted computes its tokens again together with the prompt."""
    stream = await engine.submit(request((1, 2, 3), beam_width=2))
    computed: list[int] = []
    stream.watch_prefill(computed.append)
    stats = StepStats(
        duration_s=0.1,
        prefill_tokens=5,
        decode_tokens=0,
        context_tokens=(5,),
        schedule_s=0.0,
        commit_s=0.0,
        publish_s=0.0,
    )
    core.listener.observe(stats, [Prefilled(0, 2), Prefilled(0, 5)])
    assert computed == [2, 3]


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


async def test_cancelling_while_the_core_adds_a_request_drops_it(
    engine: Engine[FakeCore], core: FakeCore, observer: FakeObserver
) -> None:
    core.gate = asyncio.Event()
    submitting = asyncio.ensure_future(engine.submit(request((1, 2), n=2)))
    await asyncio.sleep(0)
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


async def test_updates_may_come_before_add_returns(engine: Engine[FakeCore], core: FakeCore) -> None:
    def publish(requests: Sequence[Request]) -> None:
        core.listener.publish([RequestUpdate(requests[0].request_id, (SampledToken(0, 7),), "length")])

    core.on_add = publish
    stream = await engine.submit(request((1, 2)))
    assert [chunk.token_ids async for chunk in stream] == [(7,)]
