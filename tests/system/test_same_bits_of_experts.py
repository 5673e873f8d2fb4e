"""Promise 1 for mixtures of experts: neither the other rows that chose an expert nor threads nor ISA levels matter."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest
from quire.kernels import supported_levels
from quire.runtime.engine import GenerateRequest, LocalEngine

from tests.system import bits
from tests.system.bits import asked, one_by_one, prompt, together

GOLDENS = Path(__file__).parents[1] / "goldens"
LEVELS = supported_levels()
FAMILIES = ("mixtral", "qwen3_moe")
PAIRS = [("f32", "f32"), ("q8", "int8"), ("q4", "int8"), ("bf16", "bf16")]


def requests() -> Sequence[GenerateRequest]:
    return [
        asked(prompt(90, 1), max_tokens=8),
        asked(prompt(33, 2), max_tokens=8, temperature=0.9, top_p=0.9, seed=3),
        *(asked(prompt(1 + i, 4), max_tokens=6, temperature=0.7, seed=i) for i in range(6)),
    ]


def running(family: str, weights: str, kv: str, **settings: Any) -> AbstractAsyncContextManager[LocalEngine]:
    model = str(GOLDENS / family)
    return bits.running(model=model, weights=weights, kv_cache_dtype=kv, max_model_len=200, **settings)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("weights", "kv"), PAIRS)
async def test_requests_together_match_requests_alone(family: str, weights: str, kv: str) -> None:
    async with running(family, weights, kv, threads=1, enable_prefix_caching=False) as engine:
        alone = await one_by_one(engine, requests())
    for threads, chunk in [(1, None), (2, 7), (3, 64)]:
        async with running(family, weights, kv, threads=threads, chunk=chunk) as engine:
            assert await together(engine, requests()) == alone


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("weights", "kv"), PAIRS[:3])
async def test_every_level_computes_the_same_bits(family: str, weights: str, kv: str) -> None:
    outcomes = []
    for isa in LEVELS:
        async with running(family, weights, kv, isa=isa) as engine:
            outcomes.append(await together(engine, requests()))
    assert all(outcome == outcomes[0] for outcome in outcomes)
