"""An engine's plan is its size and its description before it is loaded."""

from __future__ import annotations

import msgspec
import pytest
from quire.runtime.common.config import EngineConfig
from quire.runtime.common.errors import ConfigError
from quire.runtime.engine import Engine
from quire.runtime.engine.planned_engine import plan_engine
from quire.runtime.model import BUNDLED_MODEL

MIB = 1 << 20
FROM_FILES = {
    "fingerprint",
    "eos_token_ids",
    "has_tool_calls",
    "has_reasoning",
}  # decided by files that only loading reads


@pytest.mark.parametrize(
    "config",
    [
        EngineConfig(kv_cache_memory=2 * MIB, threads=1),
        EngineConfig(model="demo_embedding", threads=1),
        EngineConfig(embedding_model="demo_embedding", kv_cache_memory=2 * MIB, threads=1),
    ],
    ids=["generates", "embeds", "both"],
)
async def test_the_description_is_that_of_the_loaded_engine(config: EngineConfig) -> None:
    planned = plan_engine(config, 512 * MIB)
    engine = await Engine.start(config)
    try:
        expected = msgspec.structs.asdict(engine.info)
    finally:
        await engine.close()
    found = msgspec.structs.asdict(planned.info)
    assert {name: found[name] for name in expected if name not in FROM_FILES} == {
        name: value for name, value in expected.items() if name not in FROM_FILES
    }


def test_a_cache_without_a_size_takes_its_share_of_the_rest() -> None:
    config = EngineConfig(threads=1, kv_cache_share=0.5)
    small, large = plan_engine(config, 160 * MIB), plan_engine(config, 200 * MIB)
    assert small.config.kv_cache_memory is not None
    assert large.config.kv_cache_memory is not None
    assert large.config.kv_cache_memory - small.config.kv_cache_memory == pytest.approx(20 * MIB, abs=MIB / 4)
    assert small.total_bytes <= 160 * MIB


def test_the_pages_of_a_draft_model_are_a_part_of_the_cache() -> None:
    config = EngineConfig(draft_model=str(BUNDLED_MODEL), num_speculative_tokens=4, kv_cache_memory=64 * MIB, threads=1)
    assert plan_engine(config, 512 * MIB).kv_bytes == 64 * MIB


def test_an_engine_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"the model takes 9.* bytes; models_memory is 1000000"):
        plan_engine(EngineConfig(kv_cache_memory=16 * MIB, threads=1), 1_000_000)
    with pytest.raises(ConfigError, match=r"takes .* leaves no page of a KV cache; models_memory is 1000000"):
        plan_engine(EngineConfig(threads=1), 1_000_000)
