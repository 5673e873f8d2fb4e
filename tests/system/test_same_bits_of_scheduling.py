"""A request has the same bits under every scheduling policy, for every tenant, with and without a latency target."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.support.bits import EVERYTHING, asked, one_by_one, prompt, running, together

REQUESTS = [
    asked(prompt(150 if i % 4 == 0 else 20 + i), tenant="abc"[i % 3], priority=i % 5 - 2, **params)
    for i, params in enumerate([*EVERYTHING.values(), {"max_tokens": 70}, {"n": 3, "temperature": 1.0, "seed": 1}])
] + [asked(prompt(70), tenant="b", beam_width=3, n=2, logprobs=0, max_tokens=12)]
SETTINGS: list[dict[str, Any]] = [
    {"scheduling_policy": "fcfs"},
    {"scheduling_policy": "fcfs", "itl_target_ms": 0.5},
    {"scheduling_policy": "priority"},
    {"scheduling_policy": "priority", "itl_target_ms": 3.0},
    {"scheduling_policy": "fair"},
    {
        "scheduling_policy": "fair",
        "tenant_weights": {"a": 3.0},
        "max_kv_share_per_tenant": 0.9,
        "itl_target_ms": 1000.0,
    },
]


@pytest.fixture(scope="module")
def alone() -> list[list[str]]:
    async def outcomes() -> list[list[str]]:
        async with running(enable_prefix_caching=False, threads=1) as engine:
            return await one_by_one(engine, REQUESTS)

    return asyncio.run(outcomes())


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
async def test_same_bits_under_every_policy(alone: list[list[str]], settings: dict[str, Any]) -> None:
    few = {"max_num_seqs": 4, "max_num_batched_tokens": 48, "kv_cache_memory": 2 << 20}
    async with running(**settings, **few, num_speculative_tokens=3) as engine:
        assert await together(engine, REQUESTS) == alone
