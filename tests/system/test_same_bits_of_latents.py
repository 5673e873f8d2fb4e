"""A request has the same bits whether the latents of its prompt are computed, cached, shared, spilled or loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from quire.pager import spill
from quire.runtime.engine import prefix_snapshot
from quire.runtime.model import kv_layout, read_spec
from quire.scheduler import CostModel

from tests.support.bits import asked, bits, chunks_of, one_by_one, prompt, running, together
from tests.support.families import GOLDENS

MODEL = str(GOLDENS / "deepseek_v3")
PAIRS = [("bf16", "bf16"), ("q8", "int8")]
LATENT = asked(prompt(100, 1, 150), max_tokens=8, temperature=0.8, seed=2)
SAMPLES = asked(prompt(70, 2, 150), max_tokens=8, temperature=0.9, seed=5, n=3)


def settings_of(weights: str, kv: str, **more: Any) -> dict[str, Any]:
    return {"model": MODEL, "weights": weights, "kv_cache_dtype": kv, "kv_cache_memory": 1 << 20, **more}


@pytest.mark.parametrize(("weights", "kv"), PAIRS)
async def test_latents_of_a_prefix_are_cached_and_loaded_from_a_snapshot(weights: str, kv: str, tmp_path: Path) -> None:
    async with running(**settings_of(weights, kv, enable_prefix_caching=False)) as engine:
        (alone,) = await one_by_one(engine, [LATENT])
    settings = settings_of(weights, kv)
    async with running(**settings) as engine, prefix_snapshot(engine.core, tmp_path / "prefixes"):
        for cached_tokens in (0, 96):
            chunks = await chunks_of(engine, LATENT)
            assert bits(chunks) == alone
            assert chunks[-1].usage is not None
            assert chunks[-1].usage.cached_tokens == cached_tokens
    async with running(**settings) as engine, prefix_snapshot(engine.core, tmp_path / "prefixes"):
        chunks = await chunks_of(engine, LATENT)
        assert bits(chunks) == alone
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.cached_tokens == 96


@pytest.mark.parametrize(("weights", "kv"), PAIRS)
async def test_samples_share_the_latents_of_their_prompt(weights: str, kv: str) -> None:
    single = [asked(prompt(70, 2, 150), max_tokens=8, temperature=0.9, seed=seed) for seed in (5, 6, 7)]
    async with running(**settings_of(weights, kv)) as engine:
        alone = [choices[0] for choices in await one_by_one(engine, single)]
    async with running(**settings_of(weights, kv)) as engine:
        (samples,) = await together(engine, [SAMPLES])
    assert samples[:-1] == alone


@pytest.mark.parametrize(("weights", "kv"), PAIRS)
async def test_latents_are_read_back_from_the_spill_file(
    weights: str, kv: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CostModel, "predict_prefill", lambda self, num_tokens: 1e9)  # spilling always pays
    monkeypatch.setattr(spill, "PAUSE_S", 0.0)
    requests = [asked(prompt(30, seed, 150), max_tokens=60, temperature=1.0, seed=seed) for seed in range(4)]
    async with running(**settings_of(weights, kv, enable_prefix_caching=False)) as engine:
        alone = await one_by_one(engine, requests)
    small = {
        "kv_cache_memory": 7 * kv_layout(read_spec(MODEL), kv, 32).page_bytes,
        "kv_spill_size": 1 << 20,
        "kv_spill_dir": str(tmp_path),
        "max_model_len": 96,
    }
    async with running(**settings_of(weights, kv, **small)) as engine:
        assert await together(engine, requests) == alone
        assert engine.stats().preemptions == engine.stats().preemptions_spilled > 0
        assert engine.stats().recomputed_tokens == 0
