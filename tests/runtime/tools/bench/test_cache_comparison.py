"""The comparison with and without the KV cache, on layers whose windows reuse pages."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from quire.runtime.common.config import EngineConfig
from quire.runtime.common.errors import ConfigError
from quire.runtime.model.runner import load_model
from quire.runtime.tools.bench import compare_cache


@pytest.mark.parametrize("layers", ["s.s.ss", "ss", ".."])
def test_the_tokens_are_the_same_with_and_without_the_cache(hybrid_folder: Callable[[str], Path], layers: str) -> None:
    runner = load_model(EngineConfig(model=str(hybrid_folder(layers)), max_num_seqs=1, max_num_batched_tokens=32))
    comparison = compare_cache(runner, 500, 3)
    assert comparison.same_tokens
    runner.close()


def test_a_pool_that_is_too_small_is_refused(hybrid_folder: Callable[[str], Path]) -> None:
    runner = load_model(EngineConfig(model=str(hybrid_folder("..")), max_num_seqs=1, max_model_len=64))
    with pytest.raises(ConfigError, match="65 tokens need 3 pages, there are 2"):
        compare_cache(runner, 60, 5)
    runner.close()
