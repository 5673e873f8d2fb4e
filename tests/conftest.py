"""Settings of Hypothesis, captured log lines, quick engine processes, and a checkpoint with sliding and full layers."""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Callable, Iterator, MutableMapping
from pathlib import Path
from typing import Any

os.environ["OPENBLAS_NUM_THREADS"] = "1"  # idle threads spin: a third of the time of tests with numpy
import numpy as np

del os.environ["OPENBLAS_NUM_THREADS"]  # processes that tests start are as users start them
import pytest
from hypothesis import HealthCheck, settings
from quire.runtime.common.tuning import GC_OBJECTS
from quire.runtime.model import read_spec
from quire.runtime.model.weights.tensors import expected_tensors
from quire.runtime.workers import engine_process
from safetensors.numpy import save_file
from structlog.testing import capture_logs

from tests.support.forked_engines import ForkedEngines

# An example may take any time: on a busy machine, each may be interrupted for longer than the default of 200 ms.
settings.register_profile("any machine", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

# Engines of tests run the code of their level, whatever is faster on this machine. Their processes inherit it.
os.environ["QUIRE_TUNE"] = "off"

gc.disable()  # Modules and tests are a million objects that live to the end.


def pytest_collection_finish() -> None:
    """Exclude tests, modules and libraries from garbage collections, which are rare from now on, as in servers."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_OBJECTS)
    gc.enable()


WINDOW = 100
HYBRID: dict[str, Any] = {
    "vocab_size": 307,
    "hidden_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "max_position_embeddings": 4096,
    "use_sliding_window": True,
    "sliding_window": WINDOW,
    # of Gemma 4 alone
    "global_head_dim": 32,
    "num_kv_shared_layers": 4,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": 307,
}


@pytest.fixture
def logs() -> Iterator[list[MutableMapping[str, Any]]]:
    """Capture log lines instead of printing them."""
    with capture_logs() as captured:
        yield captured


@pytest.fixture(scope="session")
def engine_forks() -> Iterator[ForkedEngines]:
    engines = ForkedEngines()
    yield engines
    engines.close()


@pytest.fixture
def forked_engines(engine_forks: ForkedEngines, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork the engine processes of this process from one that has imported everything, which takes most of a start."""
    monkeypatch.setattr(engine_process, "_started", engine_forks.start)


@pytest.fixture
def hybrid_folder(tmp_path: Path) -> Callable[..., Path]:
    """Write a checkpoint: `hybrid_folder("s.s.ss")` has sliding layers (s) and full ones (.)."""

    def write(layers: str, architecture: str = "Qwen2ForCausalLM") -> Path:
        types = ["sliding_attention" if kind == "s" else "full_attention" for kind in layers]
        folder = tmp_path / "hybrid"
        folder.mkdir()
        (folder / "config.json").write_text(
            json.dumps(
                {**HYBRID, "architectures": [architecture], "num_hidden_layers": len(types), "layer_types": types}
            )
        )
        rng = np.random.default_rng(5)
        tensors = {
            name: rng.standard_normal(shape, np.float32) * np.float32(2 / shape[-1] ** 0.5)
            for name, shape in expected_tensors(read_spec(folder))
        }
        save_file(tensors, folder / "model.safetensors")
        return folder

    return write
