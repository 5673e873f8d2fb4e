"""Promise 1 on the whole engine: a request's tokens and logprobs have the same bits in every batch composition, with
any chunking of its prompt and any number of threads, after a prefix hit or a preemption, at every ISA level.
"""

from __future__ import annotations

import asyncio
import random
from contextlib import asynccontextmanager

import msgspec
import pytest
from quire.kernels import supported_levels
from quire.pager import KVLayout
from quire.runtime.common.config import EngineConfig
from quire.runtime.common.types import SamplingParams, join_chunks
from quire.runtime.engine import GenerateRequest

from tests.support.bits import Preemptor, start_chunked

LEVELS = supported_levels()
DTYPES = [("f32", "f32"), ("bf16", "bf16"), ("q8", "bf16"), ("q8", "int8"), ("q4", "int8")]
PAGE_BYTES = KVLayout(4, 2, 64, "bf16").page_bytes  # size of a page of the bundled model

GREEDY = SamplingParams(max_tokens=12, ignore_eos=True, logprobs=2)
SEEDED = SamplingParams(max_tokens=12, ignore_eos=True, logprobs=2, temperature=0.9, top_p=0.9, top_k=50, seed=3)
PENALIZED = SamplingParams(
    max_tokens=12, ignore_eos=True, logprobs=0, temperature=0.7, repetition_penalty=1.2, frequency_penalty=0.3, seed=8
)


def of_each_level(fast: tuple[int, ...], slow: tuple[int, ...]) -> list[tuple[str, int]]:
    """Return each ISA level with each number; levels in portable C, which take ten times as long, have few numbers."""
    return [(isa, number) for isa in LEVELS for number in (slow if isa in ("scalar", "amx-twin") else fast)]


def prompt(length: int, seed: int) -> tuple[int, ...]:
    return tuple(random.Random(seed).randrange(1, 4096) for _ in range(length))


REQUESTS = [
    GenerateRequest(prompt=prompt(length, length), sampling_params=params)
    for length, params in [(100, GREEDY), (33, SEEDED), (64, PENALIZED), (1, SEEDED), (65, GREEDY)]
]


@asynccontextmanager
async def running(isa, dtypes, *, chunk=None, **settings):
    weights, kv = dtypes
    settings = {"kv_cache_memory": 32 << 20, **settings}
    config = EngineConfig(weights=weights, kv_cache_dtype=kv, isa=isa, **settings)
    engine = await start_chunked(config, chunk)
    try:
        yield engine
        stats = engine.stats()
        assert stats.pages_owned == 0
        assert stats.pages_free + stats.pages_cached == stats.pages_total
    finally:
        await engine.close()


async def outcome(engine, request):
    """Return the token ids and logprobs, to the last bit."""
    return bits([chunk async for chunk in await engine.submit(request)])


def bits(chunks):
    return tuple((token.token_id, token.logprob.hex(), token.top) for chunk in chunks for token in chunk.logprobs)


async def together(engine, requests):
    return await asyncio.gather(*(outcome(engine, request) for request in requests))


_alone: dict = {}


async def alone(isa, dtypes):
    """Return the outcome of each request run alone; computed once per ISA level and dtypes."""
    key = (isa, dtypes)
    if key not in _alone:
        async with running(isa, dtypes, enable_prefix_caching=False, threads=1) as engine:
            _alone[key] = [await outcome(engine, request) for request in REQUESTS]
    return _alone[key]


@pytest.mark.parametrize("isa", LEVELS)
@pytest.mark.parametrize("dtypes", DTYPES, ids="-".join)
@pytest.mark.parametrize("threads", [1, 2])
async def test_requests_together_match_requests_alone(isa, dtypes, threads):
    async with running(isa, dtypes, threads=threads) as engine:
        assert await together(engine, REQUESTS) == await alone(isa, dtypes)


@pytest.mark.parametrize(("isa", "chunk"), of_each_level(fast=(1, 7, 32, 33), slow=(1, 33)))
@pytest.mark.parametrize("dtypes", DTYPES, ids="-".join)
async def test_any_chunking_of_the_prompt(isa, dtypes, chunk):
    async with running(isa, dtypes, chunk=chunk) as engine:
        assert await together(engine, REQUESTS) == await alone(isa, dtypes)


@pytest.mark.parametrize(("isa", "batch"), of_each_level(fast=(2, 3, 8, 32, 33), slow=(3, 17)))
@pytest.mark.parametrize("dtypes", DTYPES, ids="-".join)
async def test_any_batch(isa, dtypes, batch):
    others = [
        GenerateRequest(prompt=prompt(3 + i % 40, 1000 + i), sampling_params=(GREEDY, SEEDED, PENALIZED)[i % 3])
        for i in range(batch - 1)
    ]
    wanted = (await alone(isa, dtypes))[1]
    async with running(isa, dtypes) as engine:
        results = await together(engine, [*others[: batch // 2], REQUESTS[1], *others[batch // 2 :]])
    assert results[batch // 2] == wanted


@pytest.mark.parametrize("isa", LEVELS)
@pytest.mark.parametrize("dtypes", DTYPES, ids="-".join)
async def test_a_prefix_hit_changes_only_the_tokens_computed(isa, dtypes):
    async with running(isa, dtypes) as engine:
        first = await outcome(engine, REQUESTS[0])
        chunks = [chunk async for chunk in await engine.submit(REQUESTS[0])]
    assert chunks[-1].usage.cached_tokens == 96
    assert first == bits(chunks) == (await alone(isa, dtypes))[0]


@pytest.mark.parametrize("isa", LEVELS)
async def test_preempted_when_pages_run_out(isa):
    """Three requests grow to four pages each in a pool of six: the scheduler must preempt and recompute."""
    dtypes = ("bf16", "bf16")
    growing = [
        GenerateRequest(prompt=prompt(length, length), sampling_params=msgspec.structs.replace(params, max_tokens=80))
        for length, params in ((33, GREEDY), (20, SEEDED), (30, PENALIZED))
    ]
    async with running(isa, dtypes, enable_prefix_caching=False) as engine:
        wanted = [await outcome(engine, request) for request in growing]
    async with running(isa, dtypes, kv_cache_memory=6 * PAGE_BYTES) as engine:
        assert await together(engine, growing) == wanted
        assert engine.stats().preemptions > 0


@pytest.mark.parametrize("after", [1, 4, 11])
@pytest.mark.parametrize("dtypes", DTYPES, ids="-".join)
async def test_preempted_at_any_token(dtypes, after):
    async with running(LEVELS[-1], dtypes, enable_prefix_caching=False) as engine:
        engine.set_observer(Preemptor(engine, after))
        chunks = [chunk async for chunk in await engine.submit(REQUESTS[2])]
    assert chunks[-1].usage.recomputed_tokens > 0
    assert bits(chunks) == (await alone(LEVELS[-1], dtypes))[2]


# Several outputs, draft tokens and policies

REPEATED = (11, 12, 13, 14) * 12
KINDS = [
    GenerateRequest(prompt=request_prompt, sampling_params=msgspec.structs.replace(params, **more))
    for request_prompt, params, more in [
        (REPEATED, GREEDY, {"max_tokens": 40}),
        (prompt(70, 70), SEEDED, {"n": 3}),
        (prompt(40, 40), SEEDED, {"n": 2, "best_of": 4, "max_tokens": 30}),
        (prompt(50, 50), GREEDY, {"n": 3, "beam_width": 3, "logprobs": 0, "max_tokens": 20}),
        (REPEATED, PENALIZED, {"max_tokens": 30, "logit_bias": {11: 8.0, 12: 8.0, 13: 8.0, 14: 8.0}}),
        (REPEATED[1:], SEEDED, {"n": 2, "temperature": 0.3, "logit_bias": {11: 9.0, 12: 9.0}, "stop_token_ids": (14,)}),
    ]
]
SETTINGS = {
    "draft tokens": {"num_speculative_tokens": 4},
    "draft tokens in a small pool": {"num_speculative_tokens": 3, "kv_cache_memory": 24 * PAGE_BYTES},
    "spilling from a small pool": {"kv_spill_size": 8 << 20, "kv_cache_memory": 24 * PAGE_BYTES},
    "few sequence slots": {"max_num_seqs": 4, "scheduling_policy": "priority", "num_speculative_tokens": 2},
    "a latency target": {"itl_target_ms": 0.5, "scheduling_policy": "fair", "max_num_batched_tokens": 64},
}


async def choices_of(engine, request):
    chunks = [chunk async for chunk in await engine.submit(request)]
    usage = chunks[-1].usage
    return usage.completion_tokens, tuple(
        (
            choice.text,
            choice.finish_reason,
            choice.cumulative_logprob.hex(),
            tuple((token.token_id, token.logprob.hex(), token.top) for token in choice.logprobs),
        )
        for choice in join_chunks(chunks)
    )


@pytest.mark.parametrize("isa", LEVELS[-2:])  # independent of the kernels, and scalar is slow
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
async def test_outputs_draft_tokens_and_policies(isa, settings):
    """Sampling, draft tokens, scheduling order, forks, preemption and caching do not change the outcome."""
    dtypes = ("q8", "int8")
    async with running(isa, dtypes, enable_prefix_caching=False) as engine:
        wanted = [await choices_of(engine, request) for request in KINDS]
    async with running(isa, dtypes, **settings) as engine:
        for _ in range(2):  # the second time with a warm prefix cache
            assert await asyncio.gather(*(choices_of(engine, request) for request in KINDS)) == wanted
