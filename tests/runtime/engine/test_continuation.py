"""Outputs that another server began: the engine continues after them with the same bytes, or refuses to."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec
import pytest
from quire.runtime.common.config import EngineConfig
from quire.runtime.common.errors import InvalidRequest
from quire.runtime.common.types import OutputChunk, SamplingParams, StructuredOutputs, ToolChoice, join_chunks
from quire.runtime.engine import Engine, GenerateRequest, LocalEngine
from quire.runtime.engine.continuation import replay

from .conftest import FakeObserver

PROMPT = "This module provides"
EOS = 0
KINDS = {
    "penalties and logprobs": SamplingParams(
        max_tokens=24,
        temperature=0.9,
        seed=3,
        repetition_penalty=1.3,
        presence_penalty=0.5,
        frequency_penalty=0.4,
        min_tokens=20,
        logprobs=2,
    ),
    "a stop string": SamplingParams(max_tokens=60, temperature=0.8, seed=11, stop=("e the", "s and", "  ")),
    "samples that end apart": SamplingParams(max_tokens=40, temperature=0.9, seed=2**64 - 1, n=3, stop=("e ",)),
    "a grammar": SamplingParams(
        max_tokens=40,
        temperature=1.0,
        seed=5,
        structured_outputs=StructuredOutputs(json={"type": "array", "items": {"type": "integer"}, "minItems": 3}),
    ),
    "characters of several tokens": SamplingParams(
        max_tokens=20, temperature=0.7, seed=4, logit_bias={200: 30.0, 130: 30.0}, ignore_eos=True
    ),
}


@pytest.fixture
async def engine() -> AsyncIterator[LocalEngine]:
    engine = await Engine.start(EngineConfig(kv_cache_memory=8 << 20, threads=1))
    yield engine
    assert engine.stats().pages_owned == 0
    await engine.close()


async def chunks_of(engine: LocalEngine, request: GenerateRequest) -> list[OutputChunk]:
    return [chunk async for chunk in await engine.submit(request)]


def continued(request: GenerateRequest, received: Sequence[OutputChunk]) -> GenerateRequest:
    """Return the request that continues after `received`."""
    generated: list[tuple[int, ...]] = [()] * request.sampling_params.n
    for chunk in received:
        generated[chunk.choice] += chunk.token_ids
    ended = tuple(chunk.choice for chunk in received if chunk.finish_reason is not None)
    return msgspec.structs.replace(request, generated=tuple(generated), ended=ended)


async def check_every_cut(engine: LocalEngine, request: GenerateRequest, step: int = 1) -> None:
    whole = await chunks_of(engine, request)
    usage = whole[-1].usage
    assert usage is not None
    for cut in range(0, len(whole), step):
        received = whole[:cut]
        rest = await chunks_of(engine, continued(request, received))
        assert join_chunks([*received, *rest]) == join_chunks(whole)
        assert rest[-1].usage is not None
        for name in ("prompt_tokens", "completion_tokens", "seed"):
            assert getattr(rest[-1].usage, name) == getattr(usage, name)
        for choice in range(request.sampling_params.n):
            indexes = [chunk.first_index for chunk in [*received, *rest] if chunk.choice == choice and chunk.token_ids]
            assert indexes == sorted(set(indexes))


@pytest.mark.parametrize("params", KINDS.values(), ids=KINDS)
async def test_what_was_begun_goes_on_with_the_same_bytes(engine: LocalEngine, params: SamplingParams) -> None:
    await check_every_cut(engine, GenerateRequest(prompt=PROMPT, sampling_params=params), step=5)


async def test_the_end_alone_is_sent_to_a_client_that_has_every_token(engine: LocalEngine) -> None:
    for params in (KINDS["a stop string"], KINDS["a grammar"], KINDS["penalties and logprobs"]):
        request = GenerateRequest(prompt=PROMPT, sampling_params=params)
        whole = await chunks_of(engine, request)
        tokens = [msgspec.structs.replace(chunk, finish_reason=None) for chunk in whole]
        (end,) = await chunks_of(engine, continued(request, tokens))
        assert (end.token_ids, end.text, end.finish_reason) == ((), "", whole[-1].finish_reason)
        assert end.first_index == sum(len(chunk.token_ids) for chunk in whole)
        assert end.usage is not None
        assert whole[-1].usage is not None
        assert end.usage.completion_tokens == whole[-1].usage.completion_tokens


async def test_the_time_per_output_token_counts_the_tokens_that_are_generated_here(engine: LocalEngine) -> None:
    observer = FakeObserver()
    engine.set_observer(observer)
    params = SamplingParams(max_tokens=24, ignore_eos=True, seed=3)
    request = GenerateRequest(prompt=PROMPT, sampling_params=params)
    whole = await chunks_of(engine, request)
    received: list[OutputChunk] = []
    while sum(len(chunk.token_ids) for chunk in received) < 20:
        received.append(whole[len(received)])
    rest = await chunks_of(engine, continued(request, received))
    for chunks, stats in zip((whole, rest), observer.finished, strict=True):
        num_tokens = sum(len(chunk.token_ids) for chunk in chunks)
        usage = chunks[-1].usage
        assert usage is not None
        assert stats.time_per_output_token_s == pytest.approx(usage.decode_ms / 1000 / (num_tokens - 1))


async def test_outputs_whose_end_was_lost_end_before_those_that_go_on(engine: LocalEngine) -> None:
    request = GenerateRequest(prompt=PROMPT, sampling_params=KINDS["samples that end apart"])
    whole = await chunks_of(engine, request)
    first = next(index for index, chunk in enumerate(whole) if chunk.finish_reason is not None)
    received = [*whole[:first], msgspec.structs.replace(whole[first], finish_reason=None)]
    rest = await chunks_of(engine, continued(request, received))
    assert (rest[0].choice, rest[0].finish_reason, rest[0].token_ids) == (whole[first].choice, "stop", ())
    assert join_chunks([*received, *rest]) == join_chunks(whole)


async def test_a_tool_call_goes_on_within_its_arguments() -> None:
    weather = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 12}, "days": {"type": "integer"}},
        "required": ["city", "days"],
    }
    request = GenerateRequest(
        prompt=None,
        messages=({"role": "user", "content": "Hello"},),
        tools=({"type": "function", "function": {"name": "weather", "parameters": weather}},),
        tool_choice=ToolChoice(needed="required", parallel=False),
        reads_output=True,
        sampling_params=SamplingParams(max_tokens=60, temperature=1.0, seed=6),
    )
    engine = await Engine.start(EngineConfig(kv_cache_memory=8 << 20, threads=1, tool_call_parser="hermes"))
    try:
        whole = await chunks_of(engine, request)
        (call,) = join_chunks(whole)[0].tool_calls
        assert call.name == "weather"
        assert call.arguments
        await check_every_cut(engine, request, step=3)
    finally:
        await engine.close()


def begun(generated: Any, ended: tuple[int, ...] = (), **params: Any) -> GenerateRequest:
    params = {"max_tokens": 8, "seed": 1, **params}
    return GenerateRequest(prompt=(5, 6, 7), sampling_params=SamplingParams(**params), generated=generated, ended=ended)


async def test_a_stop_token_before_min_tokens_ends_nothing(engine: LocalEngine) -> None:
    rest = await chunks_of(engine, begun(((5, EOS, 6),), min_tokens=4))
    assert rest[0].first_index == 3
    assert rest[0].token_ids


def test_tokens_are_replayed_in_slices() -> None:
    """A request with many tokens, which may take seconds, must not keep the prompts of other tenants waiting."""
    request = begun(((5,) * 2500, (6,) * 3, (7,) * 9), ended=(2,), n=3, max_tokens=9000)
    *slices, outputs = replay(request, request.sampling_params, (), lambda: None, None)
    assert slices == [None] * 4
    assert outputs is not None
    assert [len(output.token_ids) for output in outputs.open] == [2500, 3]
    assert outputs.num_former_tokens == 9


REFUSED = {
    "an id outside the vocabulary": (begun(((5, 1 << 40),)), "outside the vocabulary"),
    "a negative id": (begun(((-1,),)), "outside the vocabulary"),
    "more than max_tokens": (begun(((5,) * 9,)), "must be between 0 and 8"),
    "too few outputs": (begun(((5,),), n=2), "one array per output"),
    "no outputs": (begun(()), "one array per output"),
    "tokens after a stop token": (begun(((5, EOS, 6),)), "ends with its token 2"),
    "tokens after a stop string": (begun(((44, 44, 44),), stop=("LL",)), "ends with its token 2"),
    "no seed": (begun(((5,),), seed=None), "needs the seed"),
    "best_of": (begun(((5,),), best_of=2, temperature=1.0), "best_of"),
    "a beam search": (begun(((5,),), beam_width=2), "beam_width"),
    "all outputs ended": (begun(((5,),), ended=(0,)), "nothing to go on with"),
    "an output that ended many times": (begun(((5,), ()), ended=(0,) * 3, n=2), "must be between 0 and 2"),
    "an unknown output ended": (begun(((5,),), ended=(1,)), "must be between 0 and 0"),
    "ids that a grammar forbids": (begun(((5, 6),), structured_outputs=StructuredOutputs(regex="[0-9]+")), "match"),
}


@pytest.mark.parametrize(("request_", "reason"), REFUSED.values(), ids=REFUSED)
async def test_what_cannot_have_been_generated_is_refused(
    engine: LocalEngine, request_: GenerateRequest, reason: str
) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        await chunks_of(engine, request_)
