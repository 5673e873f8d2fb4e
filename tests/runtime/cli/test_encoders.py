"""`quire show` and `quire plan` of encoders."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from quire.runtime.cli.main import run
from quire.runtime.common.config import EngineConfig
from quire.runtime.model import BUNDLED_MODEL, read_spec
from quire.runtime.model.encoder import read_encoder
from quire.runtime.model.runner import capacity
from quire.runtime.model.runner.encoder_runner import load_encoder

FOLDER = Path(__file__).parents[2] / "goldens" / "encoders"


def test_show_prints_what_an_encoder_makes(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["show", str(FOLDER / "bert_dense")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "makes       a vector of 24 of a text, from its first row, of length 1" in lines
    assert "prompt      query: 'find: '" in lines
    assert not [line for line in lines if line.startswith("problem")]
    assert run(["show", str(FOLDER / "qwen3_answer")]) == 0
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


def test_texts_of_a_model_for_very_long_ones_are_shorter_unless_asked_for() -> None:
    spec = replace(read_encoder(FOLDER / "modernbert"), max_model_len=32_768)
    model = str(FOLDER / "modernbert")
    usual = capacity.decide_encoder_capacity(EngineConfig(model=model, threads=1), spec)
    assert (usual.max_model_len, usual.max_rows) == (8192, 8192)
    longer = capacity.decide_encoder_capacity(EngineConfig(model=model, threads=1, max_model_len=10_000), spec)
    assert (longer.max_model_len, longer.max_rows) == (10_000, 10_000)


def test_flags_about_decoding_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", str(FOLDER / "bert"), "--memory", "1GiB"]) == 2
    assert "--memory cannot be given with an encoder" in capsys.readouterr().err
    assert run(["plan", str(FOLDER / "bert"), "--kv-cache-memory", "1GiB"]) == 2
    assert "--kv-cache-memory cannot be given with an encoder" in capsys.readouterr().err
    assert run(["plan", str(FOLDER / "bert"), "--max-model-len", "191"]) == 2
    assert "191 is more than the 190 tokens" in capsys.readouterr().err


def test_the_plan_of_a_decoder_counts_the_encoder_beside_it(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--threads", "1", "--kv-cache-memory", "8MiB"]
    assert run(["plan", *flags, "--json"]) == 0
    alone = json.loads(capsys.readouterr().out)
    encoder = FOLDER / "qwen3"
    assert run(["plan", *flags, "--json", "--embedding-model", str(encoder)]) == 0
    both = json.loads(capsys.readouterr().out)
    assert run(["plan", *flags, "--embedding-model", str(encoder)]) == 0
    assert "embedding model" in capsys.readouterr().out
    runner = load_encoder(EngineConfig(embedding_model=str(encoder), threads=1, max_model_len=64))
    assert runner.max_rows == runner.spec.max_model_len == 512  # `max_model_len` is the decoder's
    planned = runner.capacity.memory.total_bytes
    assert both["engine_process"]["embedding_model"] == planned > 0 == alone["engine_process"]["embedding_model"]
    assert both["total_bytes"] == alone["total_bytes"] + planned


def test_memory_for_an_encoder_is_not_memory_for_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capacity, "free_memory_bytes", lambda: 64 << 20)
    spec = read_spec(BUNDLED_MODEL)
    config = EngineConfig(threads=1, kv_cache_share=0.5)
    beside = EngineConfig(threads=1, kv_cache_share=0.5, embedding_model=str(FOLDER / "bert"))
    encoder = capacity.decide_encoder_capacity(capacity.encoder_config(beside), read_encoder(FOLDER / "bert"))
    alone, both = (capacity.decide_capacity(each, spec).memory for each in (config, beside))
    assert alone.kv_bytes - both.kv_bytes == pytest.approx(encoder.memory.total_bytes / 2, abs=1 << 20)


def test_info_names_both_models(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_EMBEDDING_MODEL", str(FOLDER / "bert"))
    assert run(["info"]) == 0
    assert f"embedding  {FOLDER / 'bert'}" in capsys.readouterr().out.splitlines()
