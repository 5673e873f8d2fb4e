"""Assembling a machine: every refusal is typed, and letting go is at once."""

from __future__ import annotations

import pytest
from quire.runtime.common.config import EngineConfig
from quire.runtime.common.errors import ConfigError, ModelNotFound
from quire.runtime.model.runner import Rows, assemble


def test_what_was_planned_is_what_is_taken() -> None:
    machine = assemble(EngineConfig(kv_cache_memory=1 << 20, threads=2))
    assert machine.arena.memory.nbytes == machine.capacity.memory.kv_bytes == 1 << 20
    machine.close()


def test_steps_too_big_for_the_system() -> None:
    with pytest.raises(ConfigError, match="lower --max-num-batched-tokens"):
        assemble(EngineConfig(kv_cache_memory=1 << 20, max_num_batched_tokens=10**9))


def test_a_pool_too_big_for_the_system() -> None:
    with pytest.raises(ConfigError, match="--kv-cache-memory: cannot map"):
        assemble(EngineConfig(kv_cache_memory=1 << 60))


@pytest.mark.parametrize("model", ["/nowhere", __file__])
def test_a_model_that_is_no_folder(model: str) -> None:
    with pytest.raises(ModelNotFound, match="is not a folder"):
        assemble(EngineConfig(model=model))


def test_time_by_op_is_told_once() -> None:
    machine = assemble(EngineConfig(kv_cache_memory=1 << 20))
    machine.executor.forward([Rows([1, 2, 3], 0, [[0]], [2])])
    spent = machine.op_seconds()
    assert {"linear", "attention", "lm_head"} <= spent.keys()
    assert spent.pop("sampling") == 0
    assert all(seconds > 0 for seconds in spent.values())
    assert not any(machine.op_seconds().values())
    machine.close()
    machine.close()
