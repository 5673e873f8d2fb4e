"""`quire models` and `quire plan` of encoders."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from quire.runtime.cli.main import run
from quire.runtime.common.config import EngineConfig
from quire.runtime.model.runner.encoder_runner import load_encoder

FOLDER = Path(__file__).parents[2] / "goldens" / "encoders"


def test_models_shows_what_an_encoder_makes(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["models", str(FOLDER / "bert_dense")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "makes       a vector of 24 of a text, from its first row, of length 1" in lines
    assert "prompt      query: 'find: '" in lines
    assert not [line for line in lines if line.startswith("problem")]
    assert run(["models", str(FOLDER / "qwen3_answer")]) == 0
    assert "makes       1 score of a pair of texts, from its last row" in capsys.readouterr().out


def test_the_plan_is_what_loading_allocates(capsys: pytest.CaptureFixture[str]) -> None:
    model = str(FOLDER / "modernbert")
    flags = ["--weights", "q8", "--max-model-len", "100", "--max-num-batched-tokens", "300"]
    assert run(["plan", model, "--json", "--threads", "1", *flags]) == 0
    plan = json.loads(capsys.readouterr().out)
    config = EngineConfig(model=model, weights="q8", max_model_len=100, max_num_batched_tokens=300, threads=1)
    runner = load_encoder(config)
    assert plan["parts"]["batch arena"] == runner.arena_bytes
    assert (plan["max_model_len"], plan["max_batch_tokens"], plan["max_batch_texts"]) == (100, 300, 256)
    assert plan["total_bytes"] == sum(plan["parts"].values())
    assert run(["plan", model, *flags, "--arena"]) == 0
    assert "keys, values" in capsys.readouterr().out


def test_flags_about_decoding_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", str(FOLDER / "bert"), "--memory", "1GiB"]) == 2
    assert "--memory cannot be given with an encoder" in capsys.readouterr().err
    assert run(["plan", str(FOLDER / "bert"), "--max-model-len", "191"]) == 2
    assert "191 is more than the 190 tokens" in capsys.readouterr().err
