"""The loss of a smaller KV cache: logits with a bf16, f16 or int8 cache, and with an f32 cache; weights in f32.

Kullback-Leibler divergence per position, in nats, on the goldens (random weights, whose distributions are flat: the
hard case) and on held-out text with the bundled model. The bounds are three times the values in `tests/bench/LOG.md`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from quire.runtime.model import pack_model

HELDOUT = json.loads((Path(__file__).parents[2] / "data" / "heldout.json").read_text())["token_ids"]

MEASURED_KL = {  # mean, max over positions; nats
    ("llama", "bf16"): (4.8e-6, 2.7e-5),
    ("llama", "f16"): (4.6e-8, 2.5e-7),
    ("llama", "int8"): (3.1e-5, 1.6e-4),
    ("qwen2", "bf16"): (2.5e-5, 1.0e-4),
    ("qwen2", "f16"): (2.6e-7, 1.4e-6),
    ("qwen2", "int8"): (1.6e-4, 1.4e-3),
    ("qwen3", "bf16"): (8.3e-6, 3.0e-5),
    ("qwen3", "f16"): (6.8e-8, 3.2e-7),
    ("qwen3", "int8"): (5.9e-5, 2.4e-4),
    ("mistral", "bf16"): (3.0e-5, 1.0e-4),
    ("mistral", "f16"): (3.0e-7, 1.9e-6),
    ("mistral", "int8"): (3.7e-4, 2.4e-3),
    ("bundled", "bf16"): (1.6e-5, 3.3e-4),
    ("bundled", "f16"): (2.1e-7, 4.7e-6),
    ("bundled", "int8"): (1.1e-4, 5.0e-3),
}
MARGIN = 3
HELDOUT_LOSS = 5e-4  # nats; a divergence of 1e-4 at 2,047 positions changes their mean by up to 3e-4

LogProbs = Callable[[str, str], Any]


@pytest.fixture
def log_probs(goldens: Path, compute_logits: Callable[..., Any]) -> LogProbs:
    """Compute the log probabilities of every next token, [positions, vocabulary], by model and KV dtype."""

    def compute(name: str, kv_dtype: str) -> Any:
        model = pack_model(None if name == "bundled" else goldens / name, "f32")
        ids = HELDOUT if name == "bundled" else np.load(goldens / name / "golden.npz")["token_ids"].tolist()
        logits = compute_logits(model, ids, kv_dtype=kv_dtype, chunk=min(len(ids), 512)).astype(np.float64)
        logits -= logits.max(axis=1, keepdims=True)
        return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))

    return compute


@pytest.mark.parametrize(("name", "kv_dtype"), MEASURED_KL)
def test_a_smaller_cache_changes_the_distribution_no_more_than_measured(
    log_probs: LogProbs, name: str, kv_dtype: str
) -> None:
    exact = log_probs(name, "f32")
    rounded = log_probs(name, kv_dtype)
    divergence = (np.exp(exact) * (exact - rounded)).sum(axis=1)
    mean, largest = MEASURED_KL[name, kv_dtype]
    assert 0 < divergence.mean() < MARGIN * mean
    assert divergence.max() < MARGIN * largest


@pytest.mark.parametrize("kv_dtype", ["bf16", "int8"])
def test_a_smaller_cache_predicts_held_out_text_as_well(log_probs: LogProbs, kv_dtype: str) -> None:
    def loss(kv_dtype: str) -> float:
        return float(-log_probs("bundled", kv_dtype)[np.arange(len(HELDOUT) - 1), HELDOUT[1:]].mean())

    assert loss(kv_dtype) == pytest.approx(loss("f32"), abs=HELDOUT_LOSS)
