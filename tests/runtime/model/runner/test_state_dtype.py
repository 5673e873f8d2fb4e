"""States with matrices in bf16: half the memory, rounded after every token, so that chunks change no bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from quire.runtime.common.config import EngineConfig
from quire.runtime.model import read_spec
from quire.runtime.model.runner import ModelRunner, load_model
from quire.runtime.model.runner.capacity import decide_capacity
from quire.runtime.tools.perplexity import plan_windows, scoring_config

from tests.support.families import GOLDENS

FAMILIES = ("granite_hybrid", "qwen3_5")  # Mamba-2, and the gated delta rule
EXACT: dict[str, Any] = {"weights": "f32", "kv_cache_dtype": "f32", "kv_cache_memory": 8 << 20, "max_num_seqs": 2}

Load = Callable[..., ModelRunner]


@pytest.fixture
def load() -> Iterator[Load]:
    runners: list[ModelRunner] = []

    def make(family: str, **settings: Any) -> ModelRunner:
        runners.append(load_model(EngineConfig(model=str(GOLDENS / family), threads=1, **EXACT, **settings)))
        return runners[-1]

    yield make
    for runner in runners:
        runner.close()


def logits_of(runner: ModelRunner, token_ids: list[int], chunk: int) -> Any:
    """Return the logits after the last token of each chunk."""
    capacity = runner.capacity
    tables = [range(capacity.layout.pages_for(len(token_ids)))] * len(capacity.layout.groups)
    starts = range(0, len(token_ids), chunk)
    return np.stack([runner.score(token_ids[at : at + chunk], at, tables, 1)[0].copy() for at in starts])


@pytest.mark.parametrize("family", FAMILIES)
def test_matrices_in_bf16_are_close_and_the_same_in_all_chunks(load: Load, family: str) -> None:
    with np.load(GOLDENS / family / "golden.npz") as golden:
        token_ids, expected = golden["token_ids"].tolist(), golden["logits"]
    runner = load(family, state_dtype="bf16")
    one, ten = logits_of(runner, token_ids, 1), logits_of(runner, token_ids, 10)
    assert one[9::10].tobytes() == ten[: len(one) // 10].tobytes()
    distance = np.abs(one - expected).max() / np.ptp(expected)
    assert 2e-4 < distance < 0.05, distance


@pytest.mark.parametrize("family", FAMILIES)
def test_matrices_in_bf16_take_half_the_memory(family: str) -> None:
    spec = read_spec(GOLDENS / family)
    layouts = {}
    for dtype in ("f32", "bf16"):
        capacity = decide_capacity(EngineConfig(state_dtype=dtype, state_cache_memory=0, **EXACT), spec)
        layouts[dtype] = capacity.state_layout
        assert capacity.memory.state_bytes == 2 * capacity.state_layout.nbytes
    for layer, matrix in layouts["f32"].matrices.items():
        size = matrix.num_heads * matrix.segments * matrix.key_dim * matrix.width
        saved = matrix.nbytes - layouts["bf16"].matrices[layer].nbytes
        assert abs(saved - 2 * size) <= 64 * matrix.num_heads * matrix.segments  # each matrix fills whole cache lines
    assert layouts["bf16"].rings.keys() == layouts["f32"].rings.keys()


def test_scoring_has_memory_for_the_states_of_its_rows() -> None:
    spec = read_spec(GOLDENS / "granite_hybrid")
    windows = plan_windows(200, 64, None, None)
    for dtype in ("f32", "bf16"):
        config = scoring_config(EngineConfig(weights="f32", state_dtype=dtype), spec, windows)
        capacity = decide_capacity(config, spec)
        assert capacity.num_pages >= 2
        assert (capacity.max_model_len, capacity.num_cached_states) == (64, 0)
