"""Loading a model: every refusal is typed, memory is as planned, and `close` releases it."""

from __future__ import annotations

import pytest
from quire.runtime.common.config import EngineConfig
from quire.runtime.common.errors import ConfigError, ModelNotFound
from quire.runtime.model.runner import load_model


def test_the_allocated_memory_is_the_planned_memory() -> None:
    runner = load_model(EngineConfig(kv_cache_memory=1 << 20, threads=2))
    assert runner.arena.memory.nbytes == runner.capacity.memory.kv_bytes == 1 << 20
    runner.close()


def test_steps_too_large_for_the_system_are_refused() -> None:
    with pytest.raises(ConfigError, match="lower max_num_batched_tokens"):
        load_model(EngineConfig(kv_cache_memory=1 << 20, max_num_batched_tokens=10**9))


def test_a_pool_too_large_for_the_system_is_refused() -> None:
    with pytest.raises(ConfigError, match="kv_cache_memory: cannot map"):
        load_model(EngineConfig(kv_cache_memory=1 << 60))


@pytest.mark.parametrize(
    ("model", "error", "message"),
    [
        (
            "/nowhere",
            ModelNotFound,
            "^/nowhere does not exist; give a folder or a GGUF file, or download a model with "
            "`quire pull ORGANIZATION/NAME`$",
        ),
        (
            "a/b",
            ModelNotFound,
            "^a/b does not exist; give a folder or a GGUF file, or download a model with "
            "`quire pull ORGANIZATION/NAME`$",
        ),
        ("/", ModelNotFound, "^/ has no config.json; a Hugging Face model folder or a .gguf file is needed$"),
        (__file__, ModelNotFound, "is neither a folder nor a .gguf file"),
        ("a/b.gguf", ModelNotFound, "a/b.gguf does not exist$"),
    ],
)
def test_a_model_that_is_not_a_folder_is_refused(model: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        load_model(EngineConfig(model=model))


def test_time_by_op_is_reset_by_each_call() -> None:
    runner = load_model(EngineConfig(kv_cache_memory=1 << 20))
    runner.score([1, 2, 3], 0, [[0]], 1)
    spent = runner.op_seconds()
    assert {"linear", "attention", "lm_head"} <= spent.keys()
    assert spent.pop("sampling") == 0
    assert all(seconds > 0 for seconds in spent.values())
    assert not any(runner.op_seconds().values())
    runner.close()
    runner.close()
