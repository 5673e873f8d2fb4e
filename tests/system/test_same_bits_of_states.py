"""Promise 1 for models with states: a request has the same bits whatever happens to its state.

The state changes in place, is copied for forks, goes back over rejected draft tokens, and is computed again after a
preemption. At the end every slot is free again (`running` checks it).
"""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest
from quire.runtime.engine import LocalEngine
from quire.runtime.model import kv_layout, read_spec
from quire.runtime.model.states import lay_out_states
from quire.scheduler import speculative

from tests.support import bits
from tests.support.bits import asked, one_by_one, prompt, together
from tests.support.families import GOLDENS

MODEL = GOLDENS / "lfm2"
SPEC = read_spec(MODEL)
REPEATED = (11, 12, 13, 14) * 12
REQUESTS = [
    asked(REPEATED, max_tokens=40),
    asked(prompt(70, 1, 150), n=3, temperature=0.9, seed=3),
    asked(prompt(40, 2, 150), n=2, best_of=4, temperature=0.8, seed=4, max_tokens=30),
    asked(prompt(50, 3, 150), n=3, beam_width=3, logprobs=0, max_tokens=20),
    asked(REPEATED, temperature=0.4, seed=5, max_tokens=30, logit_bias={11: 8.0, 12: 8.0, 13: 8.0, 14: 8.0}),
    asked(REPEATED, temperature=1.0, seed=7, max_tokens=40, logit_bias={11: 7.0, 12: 7.0, 13: 7.0, 14: 7.0}),
    asked(REPEATED[1:], n=2, temperature=0.3, seed=6, logit_bias={11: 9.0, 12: 9.0}, stop_token_ids=(14,)),
    *(asked(prompt(1 + i, 4, 150), max_tokens=6, temperature=0.7, seed=i) for i in range(8)),
    *(asked(prompt(9 + i, 5, 150), max_tokens=80, temperature=0.8, seed=i) for i in range(5)),
    asked(REPEATED[2:], temperature=0.6, seed=7, max_tokens=30, logit_bias={11: 8.0, 12: 8.0, 13: 8.0, 14: 8.0}),
]


def running(**settings: Any) -> AbstractAsyncContextManager[LocalEngine]:
    return bits.running(
        **{"model": str(MODEL), "weights": "q8", "kv_cache_dtype": "int8", "max_num_seqs": 40, "threads": 2, **settings}
    )


def memory_of(pages: int, *, seqs: int, drafts: int = 0) -> dict[str, Any]:
    """Return the settings of an engine with as many pages and sequences."""
    states = seqs * lay_out_states(SPEC, drafts).nbytes
    page_bytes = kv_layout(SPEC, "int8", 32).page_bytes
    memory = {"kv_cache_memory": states + pages * page_bytes, "max_num_seqs": seqs, "max_model_len": 100}
    return memory | {"num_speculative_tokens": drafts}


SETTINGS = {
    "chunks of one token": {"chunk": 1},
    "chunks of 7": {"chunk": 7},
    "chunks of 33": {"chunk": 33},
    "draft tokens": {"num_speculative_tokens": 4},
    "draft tokens and chunks": {"num_speculative_tokens": 2, "chunk": 9},
    "draft tokens in a small pool": memory_of(14, seqs=20, drafts=3),
    "a small pool": memory_of(12, seqs=32),
    "spilling, which keeps no states": {**memory_of(12, seqs=32), "kv_spill_size": 8 << 20},
    "few sequence slots": {**memory_of(24, seqs=4), "scheduling_policy": "priority"},
}


@pytest.fixture(autouse=True)
def every_draft_is_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    """Verify also drafts that are predicted to cost more time than they save."""
    monkeypatch.setattr(speculative, "MARGIN", 0.0)


@pytest.fixture(scope="module")
def alone() -> list[list[str]]:
    """Compute each request alone, on one thread."""

    async def compute() -> list[list[str]]:
        async with running(threads=1) as engine:
            return await one_by_one(engine, REQUESTS)

    return asyncio.run(compute())


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
async def test_states_change_no_bit(settings: dict[str, Any], alone: list[list[str]]) -> None:
    async with running(**settings) as engine:
        assert await together(engine, REQUESTS) == alone
        assert await together(engine, REQUESTS[::-1]) == alone[::-1]
        stats = engine.stats()
        assert stats.preemptions > 0 or "kv_cache_memory" not in settings or settings["max_num_seqs"] == 4
        assert 0 < stats.accepted_draft_tokens < stats.draft_tokens or not settings.get("num_speculative_tokens")


async def test_only_forks_copy_a_state() -> None:
    async with running(num_speculative_tokens=3) as engine:
        await together(engine, [each for each in REQUESTS if each.sampling_params.n == 1])
        assert engine.core.pager.states.num_copies == 0
        await together(engine, [asked(prompt(70, 1, 150), n=3, temperature=0.9, seed=3)])
        assert engine.core.pager.states.num_copies == 2
