"""The prefix cache of a real engine across restarts. The file itself is tested in `tests/pager/test_snapshot.py`."""

from __future__ import annotations

from collections.abc import AsyncIterator, MutableMapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from quire.runtime.common.config import EngineConfig
from quire.runtime.common.errors import ConfigError, Unavailable
from quire.runtime.common.types import SamplingParams
from quire.runtime.engine import Engine, GenerateRequest, LocalEngine, prefix_snapshot

from tests.support.bits import asked, one_by_one, prompt

GOLDENS = Path(__file__).parents[2] / "goldens"


@asynccontextmanager
async def started(**settings: Any) -> AsyncIterator[LocalEngine]:
    engine = await Engine.start(EngineConfig(**{"kv_cache_memory": 8 << 20, **settings}))
    try:
        yield engine
    finally:
        await engine.close()


def new_request(max_tokens: int, prompt_tokens: int = 100) -> GenerateRequest:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return GenerateRequest(prompt=tuple(range(1, prompt_tokens + 1)), sampling_params=params)


@pytest.mark.parametrize(
    ("changed", "is_loaded"),
    [({}, True), ({"weights": "q8"}, False), ({"kv_cache_dtype": "f32"}, False), ({"page_size": 64}, False)],
    ids=["same", "weights", "kv_cache_dtype", "page_size"],
)
async def test_pages_are_loaded_only_into_settings_that_compute_the_same_bits(
    tmp_path: Path, logs: list[MutableMapping[str, Any]], changed: dict[str, Any], is_loaded: bool
) -> None:
    path = tmp_path / "prefixes"
    async with started() as engine, prefix_snapshot(engine.core, path):
        async for _ in await engine.submit(new_request(2)):
            pass
        num_cached = engine.stats().pages_cached
    assert num_cached > 0
    async with started(**changed) as engine, prefix_snapshot(engine.core, path):
        assert engine.stats().pages_cached == (num_cached if is_loaded else 0)
    refusals = [log["reason"] for log in logs if log["event"] == "prefix snapshot not used, starting cold"]
    assert ["belongs to another model" in reason for reason in refusals] == [True] * (not is_loaded)


async def test_a_damaged_file_is_replaced_by_the_cache_of_an_engine_that_starts_cold(
    tmp_path: Path, logs: list[MutableMapping[str, Any]]
) -> None:
    path = tmp_path / "prefixes"
    async with started() as engine, prefix_snapshot(engine.core, path):
        wanted = await one_by_one(engine, [asked(prompt(70))])
        num_cached = engine.stats().pages_cached
    path.write_bytes(path.read_bytes()[:-1000])
    async with started() as engine, prefix_snapshot(engine.core, path):
        assert engine.stats().pages_cached == 0
        assert await one_by_one(engine, [asked(prompt(70))]) == wanted
    (reason,) = [log["reason"] for log in logs if log["event"] == "prefix snapshot not used, starting cold"]
    assert "too short" in reason
    async with started() as engine, prefix_snapshot(engine.core, path):
        assert engine.stats().pages_cached == num_cached


@pytest.mark.parametrize(("max_model_len", "is_loaded"), [(65, True), (64, False)])
async def test_keys_of_longrope_are_loaded_only_where_the_same_factors_apply(
    tmp_path: Path, max_model_len: int, is_loaded: bool
) -> None:
    """The checkpoint's factors for long contexts apply from a context of 65 tokens on."""
    path = tmp_path / "prefixes"
    model = str(GOLDENS / "phi3")
    async with started(model=model) as engine, prefix_snapshot(engine.core, path):
        async for _ in await engine.submit(new_request(2, prompt_tokens=60)):
            pass
        num_cached = engine.stats().pages_cached
    assert num_cached > 0
    async with started(model=model, max_model_len=max_model_len) as engine, prefix_snapshot(engine.core, path):
        assert engine.stats().pages_cached == (num_cached if is_loaded else 0)


@pytest.mark.parametrize("family", ["lfm2", "granite_hybrid"])
async def test_a_model_with_states_continues_from_loaded_ones_with_the_same_bits(tmp_path: Path, family: str) -> None:
    path = tmp_path / "prefixes"
    settings = {"model": str(GOLDENS / family), "num_speculative_tokens": 2}
    requests = [asked(prompt(70 + 9 * i, i, 150), max_tokens=20, temperature=0.7, seed=i) for i in range(3)]
    async with started(**settings) as engine, prefix_snapshot(engine.core, path):
        expected = await one_by_one(engine, requests)
        assert engine.stats().prefix_hits_tokens == 0
    async with started(**settings) as engine, prefix_snapshot(engine.core, path):
        assert await one_by_one(engine, requests) == expected
        assert (engine.stats().state_hits, engine.stats().prefix_hits_tokens) == (3, 3 * 64)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"enable_prefix_caching": False}, "needs enable_prefix_caching, which is off"),
        ({"state_cache_memory": 0}, "no room for a state of 5760 bytes; raise kv_cache_memory or state_cache_memory"),
    ],
)
async def test_without_a_prefix_cache_the_error_says_why(
    tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    async with started(model=str(GOLDENS / "lfm2"), **settings) as engine:
        with pytest.raises(ConfigError, match=message):
            async with prefix_snapshot(engine.core, tmp_path / "prefixes"):
                pass


async def test_the_core_has_stopped_when_pages_are_saved(tmp_path: Path) -> None:
    async with started() as engine:
        async with prefix_snapshot(engine.core, tmp_path / "prefixes"):
            chunks = aiter(await engine.submit(new_request(100)))
            await anext(chunks)
        with pytest.raises(Unavailable):
            await engine.submit(new_request(2))
        assert engine.stats().running == 0
