"""Promise 1 for every family: neither other requests, chunks, threads, ISA levels nor a replay change a bit, and every
page returns to the pool. In mixtures, requests share experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from itertools import cycle
from typing import Any

import pytest
from quire.kernels import supported_levels
from quire.runtime.engine import GenerateRequest, LocalEngine

from tests.support import bits
from tests.support.bits import Preemptor, asked, chunks_of, one_by_one, outcome, prompt, together
from tests.support.families import FAMILIES, GOLDENS
from tests.support.grids import IS_FULL

LEVELS = supported_levels()
# A family chooses ops and their sizes, and `tests/kernels` runs each op with each dtype: a family has two pairs, one of
# them with the same bits at all levels.
PAIRS = [(("f32", "f32"), ("q8", "int8")), (("q4", "int8"), ("bf16", "bf16"))]
LIMITS = {"kv_cache_memory": 2 << 20, "max_num_seqs": 8}  # enough for all requests; more pages take longer to check
CASES = [
    *((family, *pair) for number, family in enumerate(FAMILIES) for pair in PAIRS[number % len(PAIRS)]),
    ("gpt_oss_mxfp4", "auto", "int8"),
]


def requests() -> Sequence[GenerateRequest]:
    return [
        asked(prompt(90, 1, 150), max_tokens=8),
        asked(prompt(33, 2, 150), max_tokens=8, temperature=0.9, top_p=0.9, seed=3),
        *(asked(prompt(1 + i, 4, 150), max_tokens=6, temperature=0.7, seed=i) for i in range(6)),
    ]


def running(family: str, weights: str, kv: str, **settings: Any) -> AbstractAsyncContextManager[LocalEngine]:
    model = str(GOLDENS / family)
    return bits.running(model=model, weights=weights, kv_cache_dtype=kv, max_model_len=120, **LIMITS, **settings)


@pytest.mark.parametrize(("family", "weights", "kv"), CASES)
async def test_requests_together_match_requests_alone(family: str, weights: str, kv: str) -> None:
    async with running(family, weights, kv, threads=1, enable_prefix_caching=False) as engine:
        alone = await one_by_one(engine, requests())
    for settings in settings_of(family, weights):
        async with running(family, weights, kv, **settings) as engine:
            assert await together(engine, requests()) == alone


def settings_of(family: str, weights: str) -> list[dict[str, Any]]:
    """Return threads, chunks and levels. In f32 and q4 every level has the bits of one request on one thread.

    A family has two levels, and its neighbors have others: its ops have the same bits at every level.
    """
    settings: list[dict[str, Any]] = [{"threads": 2, "chunk": 7}, {"threads": 3, "chunk": None}]
    if weights not in ("f32", "q4"):
        return settings
    first = FAMILIES.index(family) // len(PAIRS)
    levels = LEVELS if IS_FULL else [LEVELS[(first + place) % len(LEVELS)] for place in range(2)]
    return [{**each, "isa": isa} for isa, each in zip(levels, cycle(settings), strict=False)]


@pytest.mark.parametrize("family", FAMILIES)
async def test_a_request_that_is_computed_again_keeps_its_bits(family: str) -> None:
    """After a preemption, as after a crash, the prompt and the generated tokens are one prompt."""
    async with running(family, "q8", "int8", enable_prefix_caching=False) as engine:
        undisturbed = await outcome(engine, requests()[1])
    async with running(family, "q8", "int8", enable_prefix_caching=False) as engine:
        engine.set_observer(Preemptor(engine, 4))
        chunks = await chunks_of(engine, requests()[1])
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.recomputed_tokens > 0
    assert bits.bits(chunks) == undisturbed
