"""Promise 1 for models with states: a request has the same bits whatever happens to its state.

The state changes in place, is copied for forks, goes back over rejected draft tokens, and after a preemption is
computed again or read from the spill file. At the end every slot is free again (`running` checks it).
"""

from __future__ import annotations

import asyncio
import os
import shutil
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest
from quire.kernels.ops import StateDtype
from quire.pager import SpillFile
from quire.runtime.engine import LocalEngine
from quire.runtime.model import DecoderSpec, kv_layout, read_spec
from quire.runtime.model.states import lay_out_states
from quire.scheduler import CostModel, speculative

from tests.support import bits
from tests.support.bits import asked, chunks_of, one_by_one, prompt, together
from tests.support.families import GOLDENS
from tests.support.random_models import WITH_STATES

MODEL = GOLDENS / "lfm2"
SPEC = read_spec(MODEL)
OTHERS = tuple(name for name in WITH_STATES if name != MODEL.name and not name.endswith("_images"))
KINDS = ("qwen3_5", "granite_hybrid", "falcon_h1")  # one family of each kind of matrices
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


def memory_of(
    pages: int, *, seqs: int, drafts: int = 0, cached: int = 0, spec: DecoderSpec = SPEC, dtype: StateDtype = "f32"
) -> dict[str, Any]:
    """Return the settings of an engine with as many pages, sequences and cached states."""
    state_bytes = lay_out_states(spec, drafts, dtype).nbytes
    page_bytes = kv_layout(spec, "int8", 32).page_bytes
    memory = (seqs + cached) * state_bytes + pages * page_bytes
    limits = {"kv_cache_memory": memory, "state_cache_memory": cached * state_bytes, "max_model_len": 100}
    return limits | {"max_num_seqs": seqs, "num_speculative_tokens": drafts}


SETTINGS = {
    "chunks of one token": {"chunk": 1},
    "chunks of 7": {"chunk": 7},
    "chunks of 33": {"chunk": 33},
    "draft tokens": {"num_speculative_tokens": 4},
    "draft tokens and chunks": {"num_speculative_tokens": 2, "chunk": 9},
    "draft tokens in a small pool": memory_of(14, seqs=20, drafts=3),
    "a small pool": memory_of(12, seqs=32),
    "a small pool that keeps a few states": memory_of(14, seqs=32, cached=5),
    "no prefix cache": {"state_cache_memory": 0},
    "draft tokens in a small pool that keeps a state": memory_of(14, seqs=20, drafts=3, cached=1),
    "spilling": {**memory_of(12, seqs=32), "kv_spill_size": 8 << 20},
    "spilling with draft tokens and kept states": {
        **memory_of(14, seqs=20, drafts=3, cached=4),
        "kv_spill_size": 1 << 20,
    },
    "few sequence slots": {**memory_of(24, seqs=4), "scheduling_policy": "priority"},
}


@pytest.fixture(autouse=True)
def drafts_and_spilling_always_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Verify also drafts that are predicted to cost more time than they save, and spill wherever there is room."""
    monkeypatch.setattr(speculative, "MARGIN", 0.0)
    monkeypatch.setattr(CostModel, "predict_prefill", lambda self, num_tokens: 1e9)


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
        cached = engine.core.pager.cached_states
        assert (cached.capacity == 0) == (settings.get("state_cache_memory") == 0)
        assert (stats.preemptions_spilled > 0) == ("kv_spill_size" in settings)
        assert cached.capacity == 0 or 0 < cached.num_hits < cached.num_kept
        assert 0 < stats.accepted_draft_tokens < stats.draft_tokens or not settings.get("num_speculative_tokens")


@pytest.mark.parametrize("family", OTHERS)
async def test_states_of_other_families_change_no_bit(family: str) -> None:
    model = str(GOLDENS / family)
    async with running(model=model, threads=1, enable_prefix_caching=False) as engine:
        expected = await one_by_one(engine, REQUESTS)
    small = memory_of(14, seqs=20, drafts=3, cached=4, spec=read_spec(model))
    large = {"num_speculative_tokens": 2, "chunk": 9, "kv_cache_memory": 64 << 20}
    for settings in (small, large) if family in KINDS else (small,):
        async with running(model=model, **settings) as engine:
            assert await together(engine, REQUESTS) == expected
            assert await together(engine, REQUESTS[::-1]) == expected[::-1]
            stats = engine.stats()
            assert 0 < stats.accepted_draft_tokens < stats.draft_tokens
            assert stats.state_hits > 0
            assert stats.preemptions > 0 or settings is not small


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        ("lfm2", "f32"),
        *((family, dtype) for family in KINDS for dtype in ("f32", "bf16")),
    ],
)
async def test_spilled_states_are_not_computed_again(family: str, dtype: StateDtype) -> None:
    model = str(GOLDENS / family)
    requests = REQUESTS[7:20]
    async with running(model=model, threads=1, enable_prefix_caching=False, state_dtype=dtype) as engine:
        expected = await one_by_one(engine, requests)
    small = memory_of(8, seqs=12, cached=2, spec=read_spec(model), dtype=dtype)
    async with running(model=model, state_dtype=dtype, kv_spill_size=16 << 20, chunk=20, **small) as engine:
        assert await together(engine, requests) == expected
        assert await together(engine, requests[::-1]) == expected[::-1]
        stats = engine.stats()
        assert stats.preemptions == stats.preemptions_spilled > 0
        assert stats.recomputed_tokens == 0


async def test_damaged_states_are_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """One bit flips in every fourth slot that is written."""
    model = str(GOLDENS / "qwen3_5")
    requests = REQUESTS[15:20]
    async with running(model=model, threads=1, enable_prefix_caching=False) as engine:
        expected = await one_by_one(engine, requests)
    put = SpillFile._put
    slots = []

    def put_and_flip(file: SpillFile, slot: int, data: memoryview) -> None:
        put(file, slot, data)
        slots.append(slot)
        if len(slots) % 4 == 0:
            at = slot * file._page_bytes + 77 * len(slots) % len(data)
            (byte,) = os.pread(file._file, 1, at)
            os.pwrite(file._file, bytes([byte ^ 16]), at)

    monkeypatch.setattr(SpillFile, "_put", put_and_flip)
    small = memory_of(8, seqs=12, spec=read_spec(model))
    async with running(model=model, kv_spill_size=16 << 20, **small) as engine:
        assert await together(engine, requests) == expected
        assert engine.stats().preemptions_spilled > 0
        assert engine.stats().recomputed_tokens > 0


@pytest.mark.parametrize(("model", "chunk"), [("lfm2", 1), ("lfm2", 512), *((family, 7) for family in OTHERS)])
async def test_a_hit_at_any_depth_changes_no_bit(model: str, chunk: int) -> None:
    conversation = prompt(150, 6, 150)
    questions = [asked((*conversation[:length], 7, 8, 9), max_tokens=4) for length in range(20, 150, 13)]
    folder = str(GOLDENS / model)
    async with running(model=folder, enable_prefix_caching=False) as engine:
        expected = await one_by_one(engine, questions)
    async with running(model=folder, num_speculative_tokens=3, chunk=chunk) as engine:
        assert await one_by_one(engine, questions) == expected
        assert await together(engine, questions[::-1]) == expected[::-1]
        hits = [min(length // 32 * 32, (length + 2) // 32 * 32) for length in range(20, 150, 13)]
        assert engine.stats().prefix_hits_tokens >= sum(hits)


async def test_the_first_message_ends_at_an_id_of_generation_config(tmp_path: Path) -> None:
    """Models that chat often have the end of a message there only. No other rule keeps a state at token 32."""
    shutil.copytree(MODEL, tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").write_text('{"eos_token_id": [2, 77]}')
    system = (*[each for each in prompt(60, 9, 150) if each != 77][:50], 77)
    conversations = [asked((*system, *prompt(60, 10 + number, 70)), max_tokens=2) for number in range(2)]
    async with running(model=str(tmp_path / "model")) as engine:
        await one_by_one(engine, conversations)
        assert engine.stats().prefix_hits_tokens == 32


async def test_an_engine_that_restarts_has_as_many_pages_and_states() -> None:
    """A process that replaces a lost one gets the memory that this one derived."""
    memory = 4_000_000
    for _ in range(3):
        async with running(kv_cache_memory=memory, max_num_seqs=8) as engine:
            memory = engine.core.kv_bytes
            pager = engine.core.pager
            assert (pager.pool.num_pages, pager.states.num_slots) == (280, 40)


async def test_logits_leave_the_states_that_are_kept() -> None:
    request = asked(prompt(70, 1, 150), max_tokens=4)
    async with running() as engine:
        wanted = await one_by_one(engine, [request])
        await engine.logits(prompt(40, 2, 150))
        assert await one_by_one(engine, [request]) == wanted
        assert engine.stats().state_hits == 1


async def test_only_forks_copy_a_state() -> None:
    async with running(num_speculative_tokens=3, state_cache_memory=0) as engine:
        await together(engine, [each for each in REQUESTS if each.sampling_params.n == 1])
        assert engine.core.pager.states.num_copies == 0
        await together(engine, [asked(prompt(70, 1, 150), n=3, temperature=0.9, seed=3)])
        assert engine.core.pager.states.num_copies == 2


async def test_the_next_turn_computes_less_than_a_page_of_the_earlier_ones_again() -> None:
    async with running(num_speculative_tokens=3) as engine:
        text = prompt(45, 8, 150)
        known = 0  # tokens of the earlier turns that were computed
        for turn in range(6):
            before = engine.stats().prefix_hits_tokens
            chunks = await chunks_of(engine, asked(text, max_tokens=40 if turn % 2 else 7))
            assert engine.stats().prefix_hits_tokens - before == known // 32 * 32
            answer = tuple(token for chunk in chunks for token in chunk.token_ids)
            known = len(text) + len(answer) - 1
            text = (*text, *answer, *prompt(9, turn, 150))
