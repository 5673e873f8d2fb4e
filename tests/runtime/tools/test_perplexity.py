"""Perplexity: llama.cpp's windows, torch's likelihoods, and comparisons of two models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from quire.runtime.common.config import EngineConfig
from quire.runtime.common.errors import ConfigError, GenerationFailed
from quire.runtime.model import read_spec
from quire.runtime.model.runner import ModelRunner, load_model
from quire.runtime.tools import perplexity
from quire.runtime.tools.perplexity import (
    Windows,
    measure_divergence,
    measure_perplexity,
    plan_windows,
    scoring_config,
)

GOLDENS = Path(__file__).parents[2] / "goldens"


@pytest.mark.parametrize(
    ("arguments", "starts", "length", "first"),
    [
        ((2047, 512), [0, 512, 1024], 512, 256),  # the rest of the text is not scored
        ((1024, 512, None, 1), [0], 512, 256),
        ((9, 9), [0], 9, 4),
        ((2000, 512, 512), [0, 512, 1024], 768, 255),
        ((769, 512, 512), [0], 768, 255),
        ((1000, 512, 100), [0, 100, 200, 300, 400], 562, 461),
    ],
)
def test_windows_are_those_of_llama_perplexity(arguments: Any, starts: list[int], length: int, first: int) -> None:
    windows = plan_windows(*arguments)
    assert (list(windows.starts), windows.length, windows.first_scored) == (starts, length, first)
    assert windows.begins_with_bos is (len(arguments) < 3 or arguments[2] is None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((511, 512), "has 511 tokens; these windows need at least 512, lower `context`"),
        ((768, 512, 512), "has 768 tokens; these windows need at least 769"),
        ((99, 3), "context must be at least 4 tokens, not 3"),
        ((99, 8, 0), "stride must be between 1 and `context` 8, not 0"),
        ((99, 8, 9), "stride must be between 1 and `context` 8, not 9"),
        ((99, 8, None, 0), "windows must be at least 1, not 0"),
    ],
)
def test_windows_that_do_not_fit_are_refused(arguments: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_windows(*arguments)


@pytest.fixture
def load(request: pytest.FixtureRequest) -> Callable[..., ModelRunner]:
    def load_golden(family: str, windows: Windows, **options: Any) -> ModelRunner:
        folder = GOLDENS / family
        config = EngineConfig(model=str(folder), kv_cache_dtype="f32", threads=1, **options)
        runner = load_model(scoring_config(config, read_spec(folder), windows))
        request.addfinalizer(runner.close)
        return runner

    return load_golden


def golden(family: str) -> tuple[list[int], Any]:
    with np.load(GOLDENS / family / "golden.npz") as data:
        return data["token_ids"].tolist(), data["logits"].astype(np.float64)


def log_softmax(logits: Any) -> Any:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral"])
@pytest.mark.parametrize("rows", [1, 5, 128])
def test_likelihoods_are_those_of_torch(
    load: Callable[..., ModelRunner], monkeypatch: pytest.MonkeyPatch, family: str, rows: int
) -> None:
    monkeypatch.setattr(perplexity, "MAX_SCORED_ROWS", rows)
    token_ids, logits = golden(family)
    windows = plan_windows(len(token_ids), len(token_ids))
    runner = load(family, windows, weights="f32", max_num_batched_tokens=max(rows, 7))
    assert runner.capacity.max_num_samples == rows
    seen: list[float] = []
    measured = measure_perplexity(runner, token_ids, windows, None, seen.append)
    first = len(token_ids) // 2
    expected = -log_softmax(logits)[np.arange(first, len(token_ids) - 1), token_ids[first + 1 :]]
    np.testing.assert_allclose(measured.nlls, expected, atol=2e-4)
    assert measured.value == pytest.approx(np.exp(expected.mean()), rel=2e-4)
    error = np.sqrt((np.square(expected).mean() - expected.mean() ** 2) / (len(expected) - 1))
    assert measured.error == pytest.approx(error * np.exp(expected.mean()), rel=2e-3)
    assert seen == [pytest.approx(measured.value)]


def test_every_window_begins_with_an_empty_cache_and_the_begin_token(load: Callable[..., ModelRunner]) -> None:
    token_ids, _ = golden("llama")
    windows = plan_windows(2 * 12, 12)
    runner = load("llama", windows)
    both = measure_perplexity(runner, token_ids[:24], windows, 3, lambda value: None).nlls
    alone = Windows(range(1), 12, 6, begins_with_bos=False)
    for part, start in ((both[:5], 0), (both[5:], 12)):
        again = measure_perplexity(runner, [3, *token_ids[start + 1 : start + 12]], alone, 3, lambda value: None)
        assert part.tolist() == again.nlls.tolist()


def test_a_model_does_not_differ_from_itself(load: Callable[..., ModelRunner]) -> None:
    token_ids, _ = golden("qwen2")
    windows = plan_windows(len(token_ids), 16, 8)
    runners = load("qwen2", windows), load("qwen2", windows)
    measured = measure_divergence(*runners, token_ids, windows, None, lambda value: None)
    figures = measured.as_dict()
    assert figures["mean_kl"] == pytest.approx(0, abs=1e-12)
    assert figures["same_top"] == 1
    assert figures["log_perplexity_ratio"] == figures["rms_delta_p"] == 0
    assert figures["perplexity"] == figures["base_perplexity"]


def test_the_divergence_is_that_of_the_distributions(load: Callable[..., ModelRunner]) -> None:
    token_ids, logits = golden("llama")
    windows = plan_windows(len(token_ids), len(token_ids))
    runner = load("llama", windows, weights="q4")
    base = load("llama", windows, weights="f32")
    seen: list[float] = []
    measured = measure_divergence(runner, base, token_ids, windows, None, seen.append)
    first, last = len(token_ids) // 2, len(token_ids) - 1
    p = log_softmax(logits)[first:last]
    only = measure_perplexity(runner, token_ids, windows, None, lambda value: None)
    assert measured.model.nlls.tolist() == only.nlls.tolist()
    assert (measured.kl > 0).all()
    assert seen == [pytest.approx(measured.kl.mean())]
    entropy = -(np.exp(p) * p).sum(axis=1)
    assert (measured.kl < entropy + 20).all()
    figures = measured.as_dict()
    percentiles = list(figures["kl_percentiles"].values())
    assert percentiles == sorted(percentiles, reverse=True)
    assert figures["min_kl"] <= percentiles[-1] <= percentiles[0] <= figures["max_kl"]


def test_kl_divergence_of_two_rows() -> None:
    logits, base = np.array([0, 1, 3], np.float32), np.array([2, 1, 0], np.float32)  # not mirrored: KL has a direction
    p, q = np.exp(log_softmax(base.astype(np.float64))), np.exp(log_softmax(logits.astype(np.float64)))
    nll, base_nll, kl, same_top = perplexity._compare(logits, base, 0)
    assert (nll, base_nll) == (pytest.approx(-np.log(q[0])), pytest.approx(-np.log(p[0])))
    assert kl == pytest.approx((p * np.log(p / q)).sum())
    assert same_top is False


def test_logits_that_are_not_finite_are_an_error() -> None:
    with pytest.raises(GenerationFailed, match="not finite"):
        perplexity._nll(np.array([1, np.nan], np.float32), 0)


def test_no_step_is_larger_than_the_configuration_says() -> None:
    spec = read_spec(GOLDENS / "llama")
    windows = plan_windows(32, 16)
    config = scoring_config(EngineConfig(max_num_batched_tokens=3), spec, windows)
    assert (config.max_num_seqs, config.max_num_batched_tokens) == (3, 3)


def test_a_window_must_fit_the_model() -> None:
    spec = read_spec(GOLDENS / "llama")
    with pytest.raises(ConfigError, match=f"do not fit the {spec.max_position_embeddings} positions"):
        scoring_config(EngineConfig(), spec, plan_windows(10**6, spec.max_position_embeddings + 1))
