"""The same bits on any number of threads: more than there are CPUs, and more than an op has work for."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from quire.kernels.ops import Linear
from quire.runtime.engine import GenerateRequest

from tests.support.bits import asked, one_by_one, prompt, running, together

OVERSUBSCRIBED = [3, 7, 16, 64]
ROWS = 64  # rows of a step; the prompts below take several steps
PAIRS = [("q8", "int8"), ("q4", "int8"), ("bf16", "bf16")]


def requests() -> Sequence[GenerateRequest]:
    return [
        asked(prompt(70, 1), max_tokens=4),
        asked(prompt(300, 2), max_tokens=3, temperature=0.9, top_p=0.9, seed=3),  # a decode row with two splits
        asked(prompt(1, 3), max_tokens=4, temperature=0.7, repetition_penalty=1.2, seed=8),
    ]


@pytest.mark.parametrize(("weights", "kv"), PAIRS)
@pytest.mark.parametrize("threads", OVERSUBSCRIBED)
async def test_more_threads_than_cpus_compute_the_same_bits(threads: int, weights: str, kv: str) -> None:
    settings = {"weights": weights, "kv_cache_dtype": kv, "max_num_seqs": 4, "max_num_batched_tokens": ROWS}
    async with running(**settings, threads=1, enable_prefix_caching=False) as engine:
        expected = await one_by_one(engine, requests())
    async with running(**settings, threads=threads, enable_prefix_caching=False) as engine:
        assert await one_by_one(engine, requests()) == expected
        assert await together(engine, requests()) == expected


async def test_the_most_threads_are_more_than_most_layers_have_blocks() -> None:
    async with running(threads=1) as engine:
        widths = [op.weight.out_features for op in engine.core.runner.ops if isinstance(op, Linear)]
    assert sum(width < 32 * OVERSUBSCRIBED[-1] for width in widths) > len(widths) // 2
