"""`quire perplexity`: its figures, its comparison and its errors, on the bundled model."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from quire.runtime.cli.main import run
from quire.runtime.model import BUNDLED_MODEL

from tests.support.gguf_files import convert
from tests.support.gguf_metadata import byte_level_metadata

GOLDENS = Path(__file__).parents[2] / "goldens"
QUICK = ("--context", "32", "--windows", "2", "--threads", "1")


@pytest.fixture
def text(tmp_path: Path) -> str:
    file = tmp_path / "text.txt"
    file.write_text("This module provides a class that reads files, and a function that closes them.\n" * 8)
    return str(file)


def measure(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert run(["perplexity", str(BUNDLED_MODEL), *arguments, *QUICK, "--json"]) == 0
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return report


def test_it_prints_the_perplexity_and_its_error(capsys: pytest.CaptureFixture[str], text: str) -> None:
    report = measure(capsys, text)
    assert (report["windows"], report["window_tokens"], report["scored_tokens"]) == (2, 32, 30)
    assert 1 < report["perplexity"] < 4096
    assert run(["perplexity", str(BUNDLED_MODEL), text, *QUICK]) == 0
    first, last = capsys.readouterr().out.splitlines()
    assert first.endswith("30 tokens scored in 2 windows of 32")
    assert last == f"PPL = {report['perplexity']:.4f} +/- {report['perplexity_error']:.5f}"


def test_it_compares_with_other_weights(capsys: pytest.CaptureFixture[str], text: str) -> None:
    flags = ("--weights", "q4", "--compare-with", str(BUNDLED_MODEL), "--compare-weights", "f32")
    report = measure(capsys, text, *flags)
    assert report["perplexity"] == measure(capsys, text, "--weights", "q4")["perplexity"]
    assert report["base_perplexity"] == measure(capsys, text, "--weights", "f32")["perplexity"]
    assert report["mean_kl"] > 0
    assert run(["perplexity", str(BUNDLED_MODEL), text, *QUICK, *flags]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(re.fullmatch(rf"mean KL divergence +{report['mean_kl']:.6f} \+/- [\d.]+", line) for line in lines)
    assert any(re.fullmatch(r"same top token +[\d.]+% \+/- [\d.]+%", line) for line in lines)


def test_it_compares_with_another_type_of_the_kv_cache(capsys: pytest.CaptureFixture[str], text: str) -> None:
    flags = ("--kv-cache-dtype", "int8", "--compare-with", str(BUNDLED_MODEL))
    same = measure(capsys, text, *flags)
    other = measure(capsys, text, *flags, "--compare-kv-cache-dtype", "f32")
    assert (same["base_kv_cache_dtype"], same["mean_kl"], same["same_top"]) == ("int8", 0, 1)
    assert other["base_kv_cache_dtype"] == "f32"
    assert 0 < other["mean_kl"] < 0.01
    assert other["base_perplexity"] == measure(capsys, text, "--kv-cache-dtype", "f32")["perplexity"]


@pytest.mark.parametrize("kv_cache_dtype", ["bf16", "int8"])
def test_any_type_of_the_kv_cache_is_measured(
    capsys: pytest.CaptureFixture[str], text: str, kv_cache_dtype: str
) -> None:
    report = measure(capsys, text, "--kv-cache-dtype", kv_cache_dtype, "--stride", "16")
    assert report["window_tokens"] == 40
    assert report["kv_cache_dtype"] == kv_cache_dtype


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["/no/text"], "/no/text is not a readable file of text in UTF-8"),
        ([str(BUNDLED_MODEL / "model.safetensors")], "is not a readable file of text in UTF-8"),
        ([__file__, "--context", "100000"], "these windows need at least 100000, lower --context"),
        ([__file__, "--context", "8", "--stride", "9"], "--stride must be between 1 and --context 8, not 9"),
        ([__file__, "--compare-weights", "q8"], "--compare-weights needs --compare-with"),
        ([__file__, "--compare-kv-cache-dtype", "f32"], "--compare-kv-cache-dtype needs --compare-with"),
        ([__file__, "--compare-with", "/nowhere"], "/nowhere does not exist"),
        (["/no/text", "--compare-with", str(GOLDENS / "llama")], "the models have 4,096 and 320 tokens"),
        (["/no/text", "--compare-with", str(GOLDENS / "encoders" / "bert")], "is an encoder, which predicts no tokens"),
        ([__file__, "--embedding-model", "demo_embedding"], "unknown option --embedding-model"),
        ([__file__, "--max-num-seqs", "2"], "--max-num-seqs cannot be given to perplexity, which sets it for its"),
    ],
)
def test_errors(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert run(["perplexity", str(BUNDLED_MODEL), *arguments]) == 2
    out, errors = capsys.readouterr()
    assert out == ""
    assert message in errors


def test_a_text_needs_a_tokenizer(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    shutil.copytree(BUNDLED_MODEL, tmp_path / "model", ignore=shutil.ignore_patterns("tokenizer.json", "*.safetensors"))
    assert run(["perplexity", str(tmp_path / "model"), __file__]) == 2
    assert "has no tokenizer.json" in capsys.readouterr().err


def test_a_gguf_file_needs_nothing_beside_it(capsys: pytest.CaptureFixture[str], text: str, tmp_path: Path) -> None:
    file = convert(BUNDLED_MODEL, tmp_path / "alone.gguf", "BF16", byte_level_metadata(BUNDLED_MODEL, "gpt-2"))
    continued = []
    for model in (str(file), str(BUNDLED_MODEL)):
        flags = ("--max-tokens", "8", "--temperature", "0", "--threads", "1", "--max-num-seqs", "1")
        assert run(["generate", model, "This module", *flags]) == 0
        continued.append(capsys.readouterr().out)
    assert continued[0] == continued[1]
    assert run(["perplexity", str(file), text, *QUICK, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["perplexity"] == measure(capsys, text)["perplexity"]
