"""Promise 1 on the whole engine: a request's tokens and logprobs have the same bits in every batch composition, with
any chunking of its prompt and any number of threads, after a prefix hit or a preemption, at every ISA level.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

import msgspec
import pytest
from quire.kernels import supported_levels
from quire.pager import KVLayout
from quire.runtime.common.types import SamplingParams
from quire.runtime.engine import GenerateRequest, LocalEngine

from tests.support.bits import Preemptor, bits, chunks_of, one_by_one, outcome, prompt, running, together

Dtypes = tuple[str, str]  # dtypes of the weights and of the KV cache
Alone = Callable[[str, Dtypes], Awaitable[list[list[str]]]]

LEVELS = supported_levels()
DTYPES = [("f32", "f32"), ("bf16", "bf16"), ("q8", "bf16"), ("q8", "int8"), ("q4", "int8")]
PAGE_BYTES = KVLayout(4, 2, 64, "bf16").page_bytes  # size of a page of the bundled model

GREEDY = SamplingParams(max_tokens=12, ignore_eos=True, logprobs=2)
SEEDED = SamplingParams(max_tokens=12, ignore_eos=True, logprobs=2, temperature=0.9, top_p=0.9, top_k=50, seed=3)
PENALIZED = SamplingParams(
    max_tokens=12, ignore_eos=True, logprobs=0, temperature=0.7, repetition_penalty=1.2, frequency_penalty=0.3, seed=8
)


FAST_LEVELS = tuple(isa for isa in LEVELS if isa not in ("scalar", "amx-twin")) or LEVELS
SLOW_LEVELS = tuple(isa for isa in LEVELS if isa not in FAST_LEVELS)  # portable C, ten times as slow


def spread(values: Sequence[Any]) -> list[tuple[Dtypes, str, Any]]:
    """Return each pair of dtypes with each value, at one fast level; each level has all dtypes and all values."""
    return [
        (dtypes, FAST_LEVELS[(number + place) % len(FAST_LEVELS)], value)
        for number, dtypes in enumerate(DTYPES)
        for place, value in enumerate(values)
    ]


def of_slow_levels(value: Any, first: int = 0) -> list[tuple[Dtypes, str, Any]]:
    """Return each slow level with dtypes from the first on: it has the loops of the others, which run each value."""
    return [(dtypes, isa, value) for isa in SLOW_LEVELS for dtypes in DTYPES[first:]]


def name_of(argument: object) -> str:
    return "-".join(map(str, argument)) if isinstance(argument, tuple) else str(argument)


def prompt_of(length: int) -> tuple[int, ...]:
    return prompt(length, seed=length, vocabulary=4096)


REQUESTS = [
    GenerateRequest(prompt=prompt_of(length), sampling_params=params)
    for length, params in [(100, GREEDY), (33, SEEDED), (64, PENALIZED), (1, SEEDED), (65, GREEDY)]
]


def engine_of(isa: str, dtypes: Dtypes, **settings: Any) -> AbstractAsyncContextManager[LocalEngine]:
    weights, kv = dtypes
    return running(weights=weights, kv_cache_dtype=kv, isa=isa, **{"kv_cache_memory": 16 << 20, **settings})


@pytest.fixture(scope="module")
def alone() -> Alone:
    """Return the outcome of each request run alone; computed once per ISA level and dtypes."""
    outcomes: dict[tuple[str, Dtypes], list[list[str]]] = {}

    async def run(isa: str, dtypes: Dtypes) -> list[list[str]]:
        if (isa, dtypes) not in outcomes:
            async with engine_of(isa, dtypes, enable_prefix_caching=False, threads=1) as engine:
                outcomes[isa, dtypes] = await one_by_one(engine, REQUESTS)
        return outcomes[isa, dtypes]

    return run


@pytest.mark.parametrize(
    ("dtypes", "isa", "threads_and_chunk"),
    [*spread([(1, None), (2, 1), (1, 7), (2, 32), (1, 33)]), *of_slow_levels((2, 33))],
    ids=name_of,
)
async def test_requests_together_match_requests_alone(
    isa: str, dtypes: Dtypes, threads_and_chunk: tuple[int, int | None], alone: Alone
) -> None:
    threads, chunk = threads_and_chunk
    async with engine_of(isa, dtypes, threads=threads, chunk=chunk) as engine:
        assert await together(engine, REQUESTS) == await alone(isa, dtypes)


@pytest.mark.parametrize(
    ("dtypes", "isa", "batch"),
    [*spread([3, 8, 33]), *of_slow_levels(17, first=DTYPES.index(("q8", "int8")))],
    ids=name_of,
)
async def test_any_batch(isa: str, dtypes: Dtypes, batch: int, alone: Alone) -> None:
    others = [
        GenerateRequest(prompt=prompt(3 + i % 40, 1000 + i, 4096), sampling_params=(GREEDY, SEEDED, PENALIZED)[i % 3])
        for i in range(batch - 1)
    ]
    wanted = (await alone(isa, dtypes))[1]
    async with engine_of(isa, dtypes) as engine:
        results = await together(engine, [*others[: batch // 2], REQUESTS[1], *others[batch // 2 :]])
    assert results[batch // 2] == wanted


@pytest.mark.parametrize("isa", FAST_LEVELS)
@pytest.mark.parametrize("dtypes", DTYPES, ids="-".join)
async def test_a_prefix_hit_changes_only_the_tokens_computed(isa: str, dtypes: Dtypes, alone: Alone) -> None:
    async with engine_of(isa, dtypes) as engine:
        first = await outcome(engine, REQUESTS[0])
        chunks = await chunks_of(engine, REQUESTS[0])
    assert chunks[-1].usage.cached_tokens == 96
    assert first == bits(chunks) == (await alone(isa, dtypes))[0]


@pytest.mark.parametrize("isa", FAST_LEVELS)
async def test_preempted_when_pages_run_out(isa: str) -> None:
    """Three requests grow to four pages each in a pool of six: the scheduler must preempt and recompute."""
    dtypes = ("bf16", "bf16")
    growing = [
        GenerateRequest(prompt=prompt_of(length), sampling_params=msgspec.structs.replace(params, max_tokens=80))
        for length, params in ((33, GREEDY), (20, SEEDED), (30, PENALIZED))
    ]
    async with engine_of(isa, dtypes, enable_prefix_caching=False) as engine:
        wanted = await one_by_one(engine, growing)
    async with engine_of(isa, dtypes, kv_cache_memory=6 * PAGE_BYTES) as engine:
        assert await together(engine, growing) == wanted
        assert engine.stats().preemptions > 0


@pytest.mark.parametrize("after", [1, 4, 11])
@pytest.mark.parametrize("dtypes", DTYPES, ids="-".join)
async def test_preempted_at_any_token(dtypes: Dtypes, after: int, alone: Alone) -> None:
    async with engine_of(LEVELS[-1], dtypes, enable_prefix_caching=False) as engine:
        engine.set_observer(Preemptor(engine, after))
        chunks = await chunks_of(engine, REQUESTS[2])
    assert chunks[-1].usage.recomputed_tokens > 0
    assert bits(chunks) == (await alone(LEVELS[-1], dtypes))[2]


# Several outputs, draft tokens and policies

REPEATED = (11, 12, 13, 14) * 12
KINDS = [
    GenerateRequest(prompt=request_prompt, sampling_params=msgspec.structs.replace(params, **more))
    for request_prompt, params, more in [
        (REPEATED, GREEDY, {"max_tokens": 40}),
        (prompt_of(70), SEEDED, {"n": 3}),
        (prompt_of(40), SEEDED, {"n": 2, "best_of": 4, "max_tokens": 30}),
        (prompt_of(50), GREEDY, {"n": 3, "beam_width": 3, "logprobs": 0, "max_tokens": 20}),
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


@pytest.mark.parametrize("isa", LEVELS[-2:])  # independent of the kernels, and scalar is slow
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
async def test_outputs_draft_tokens_and_policies(isa: str, settings: dict[str, Any]) -> None:
    """Sampling, draft tokens, scheduling order, forks, preemption and caching do not change the outcome."""
    dtypes = ("q8", "int8")
    async with engine_of(isa, dtypes, enable_prefix_caching=False) as engine:
        wanted = await one_by_one(engine, KINDS)
    async with engine_of(isa, dtypes, **settings) as engine:
        for _ in range(2):  # the second time with a warm prefix cache
            assert await together(engine, KINDS) == wanted
