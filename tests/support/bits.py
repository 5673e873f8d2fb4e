"""Helpers for the tests of equal bits: requests, engines that must release every page, and exact outcomes."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any
from unittest.mock import patch

import msgspec
from quire.pager import check
from quire.runtime.common.config import EngineConfig
from quire.runtime.common.types import OutputChunk, SamplingParams, join_chunks
from quire.runtime.engine import Engine, GenerateRequest, LocalEngine, build
from quire.runtime.engine.facade import SilentObserver
from quire.scheduler import TokenBudget

from tests.support.chunked_budget import ChunkedBudget
from tests.support.forced_preemption import preempt

EVERYTHING: dict[str, dict[str, Any]] = {  # one entry per parameter that affects sampling, the end or the output
    "greedy": {},
    "sampled": {"temperature": 0.9, "top_p": 0.9, "top_k": 50, "seed": 3},
    "min_p": {"temperature": 1.1, "min_p": 0.02, "seed": 2**64 - 1},
    "repetition": {"repetition_penalty": 1.3},
    "presence": {"presence_penalty": 1.5, "temperature": 0.6, "seed": 5},
    "frequency": {"frequency_penalty": 0.7, "repetition_penalty": 0.9, "temperature": 0.5, "seed": 6},
    "bias": {"logit_bias": {13: 4.0, 200: 3.5, 7: -100.0}, "temperature": 1.0, "seed": 7},
    "min_tokens": {"ignore_eos": False, "logit_bias": {0: 100.0}, "min_tokens": 9},
    "min_tokens with a seed": {
        "ignore_eos": False,
        "logit_bias": {0: 4.0},
        "min_tokens": 3,
        "temperature": 1.0,
        "seed": 9,
    },
    "one token": {"max_tokens": 1},
    "two tokens": {"max_tokens": 2, "temperature": 1.0, "seed": 1},
    "no logprobs": {"logprobs": None, "temperature": 0.8, "seed": 4},
}


def asked(prompt: str | tuple[int, ...], tenant: str = "", priority: int = 0, **params: Any) -> GenerateRequest:
    params = {"max_tokens": 24, "ignore_eos": True, "logprobs": 2, **params}
    return GenerateRequest(prompt=prompt, sampling_params=SamplingParams(**params), tenant=tenant, priority=priority)


def prompt(length: int, seed: int = 0, vocabulary: int = 300) -> tuple[int, ...]:
    generator = random.Random(seed * 10_000 + length)
    return tuple(generator.randrange(4, vocabulary) for _ in range(length))


async def start_chunked(config: EngineConfig, max_chunk: int | None) -> LocalEngine:
    """Start an engine that computes at most `max_chunk` tokens of a prompt per step."""
    if max_chunk is None:
        return await Engine.start(config)
    with patch.object(build, "TokenBudget", lambda rows: ChunkedBudget(TokenBudget(rows), max_chunk)):
        return await Engine.start(config)


@asynccontextmanager
async def running(chunk: int | None = None, **settings: Any) -> AsyncIterator[LocalEngine]:
    """Run an engine, then check that no request and no owned or spilled page or state is left."""
    config = EngineConfig(**{"kv_cache_memory": 8 << 20, "threads": 2, **settings})
    engine = await start_chunked(config, chunk)
    try:
        yield engine
        stats = engine.stats()
        assert (stats.running, stats.waiting, stats.pages_owned, stats.pages_spilled) == (0, 0, 0, 0)
        assert engine.core.pager.num_spilled_states == 0
        check(engine.core.pager, [])
    finally:
        await engine.close()


async def chunks_of(engine: LocalEngine, request: GenerateRequest) -> list[OutputChunk]:
    return [chunk async for chunk in await engine.submit(request)]


def bits(chunks: list[OutputChunk]) -> list[str]:
    """Return every choice as JSON, which keeps all bits of each number, and the number of completion tokens."""
    assert chunks[-1].usage is not None
    choices = [msgspec.json.encode(choice).decode() for choice in join_chunks(chunks)]
    return [*choices, f"{chunks[-1].usage.completion_tokens} tokens"]


async def outcome(engine: LocalEngine, request: GenerateRequest) -> list[str]:
    return bits(await chunks_of(engine, request))


async def one_by_one(engine: LocalEngine, requests: Iterable[GenerateRequest]) -> list[list[str]]:
    return [await outcome(engine, request) for request in requests]


async def together(engine: LocalEngine, requests: Iterable[GenerateRequest]) -> list[list[str]]:
    return await asyncio.gather(*(outcome(engine, request) for request in requests))


class Preemptor(SilentObserver):
    """Observer that preempts request 0 between two steps, once it has `after` tokens."""

    def __init__(self, engine: LocalEngine, after: int) -> None:
        self.engine = engine
        self.after = after
        self.seen = 0

    def on_tokens(self, count: int, since_last_s: float | None) -> None:
        self.seen += count
        if self.seen >= self.after > self.seen - count:
            assert preempt(self.engine.core.scheduler, 0)
