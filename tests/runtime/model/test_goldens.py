"""The logits of each family, from a folder that transformers wrote, compared with transformers in f32."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from quire.runtime.model import BUNDLED_MODEL, pack_model, read_spec
from quire.runtime.model.families.registry import FAMILIES as REGISTRY

from tests.support.families import FAMILIES, GOLDENS

LONG = [family for family in FAMILIES if (GOLDENS / family / "long.npz").exists()]
HELDOUT = Path(__file__).parents[2] / "data" / "heldout.json"


def distance(logits: Any, golden: Any) -> float:
    """Return the largest difference, relative to the range of the golden logits."""
    return float(np.abs(logits - golden).max() / (golden.max() - golden.min()))


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def golden(goldens: Path, family: str) -> tuple[list[int], Any]:
    with np.load(goldens / family / "golden.npz") as data:
        return data["token_ids"].tolist(), data["logits"]


def test_every_family_of_the_registry_has_a_golden(goldens: Path) -> None:
    configs = [json.loads((goldens / family / "config.json").read_text()) for family in FAMILIES]
    named = {name for config in configs for name in config["architectures"]}
    for family in REGISTRY:
        assert named & set(family.architectures), family.architectures


def test_the_program_on_the_reference_matches_transformers(
    goldens: Path, family: str, golden: tuple[list[int], Any], reference_logits: Callable[..., Any]
) -> None:
    token_ids, expected = golden
    assert distance(reference_logits(pack_model(goldens / family, "f32"), token_ids), expected) < 2e-5


@pytest.mark.parametrize("chunk", [None, 7])
def test_f32_kernels_are_within_2e_4(
    goldens: Path, family: str, golden: tuple[list[int], Any], compute_logits: Callable[..., Any], chunk: int | None
) -> None:
    token_ids, expected = golden
    logits = compute_logits(pack_model(goldens / family, "f32"), token_ids, chunk=chunk)
    assert distance(logits, expected) < 2e-4


@pytest.mark.parametrize("family", LONG)
def test_logits_are_exact_after_2_000_tokens(goldens: Path, family: str, compute_logits: Callable[..., Any]) -> None:
    with np.load(goldens / family / "long.npz") as data:
        token_ids, expected = data["token_ids"].tolist(), data["logits"]
    logits = compute_logits(pack_model(goldens / family, "f32"), token_ids, chunk=500)
    assert distance(logits[-len(expected) :], expected) < 2e-4


@pytest.mark.parametrize("weights", ["bf16", "q8"])
def test_smaller_weights_stay_close(
    goldens: Path, family: str, golden: tuple[list[int], Any], compute_logits: Callable[..., Any], weights: Any
) -> None:
    token_ids, expected = golden
    model = pack_model(goldens / family, weights)
    logits = compute_logits(model, token_ids, kv_dtype="bf16")
    assert distance(logits, expected) > 1e-5
    if model.spec.experts is None:
        assert distance(logits, expected) < 0.07
    else:  # a rounded row may choose another expert in a near tie: most rows stay close
        rows = [distance(row, golden_row) for row, golden_row in zip(logits, expected, strict=True)]
        assert statistics.median(rows) < 0.05


def test_both_styles_of_config_mean_the_same(goldens: Path, family: str, model_folder: Callable[..., Path]) -> None:
    other = json.loads((goldens / family / "other_config.json").read_text())
    folder = model_folder(family, lambda config: (config.clear(), config.update(other)))
    written = json.loads((goldens / family / "config.json").read_text())
    assert ("rope_parameters" in json.dumps(written)) != ("rope_parameters" in json.dumps(other))
    assert read_spec(folder) == read_spec(goldens / family)


@pytest.mark.parametrize(
    ("weights", "kv_dtype", "tolerance"), [("f32", "f32", 1e-4), ("bf16", "bf16", 0.01), ("q8", "bf16", 0.01)]
)
def test_the_bundled_model_predicts_text_it_never_saw(
    compute_logits: Callable[..., Any], weights: Any, kv_dtype: str, tolerance: float
) -> None:
    heldout = json.loads(HELDOUT.read_text())
    token_ids = heldout["token_ids"]
    reference = heldout["mean_nll_f32"]
    logits = compute_logits(pack_model(None, weights), token_ids, kv_dtype=kv_dtype, chunk=512).astype(np.float64)
    log_normalizer = np.log(np.exp(logits - logits.max(axis=1, keepdims=True)).sum(axis=1)) + logits.max(axis=1)
    nll = (log_normalizer - logits[np.arange(len(logits)), np.roll(token_ids, -1)])[:-1].mean()
    assert nll == pytest.approx(reference, abs=tolerance if weights == "f32" else tolerance * reference)


def test_the_bundled_model_can_be_read() -> None:
    assert read_spec(BUNDLED_MODEL).family == "qwen3"
