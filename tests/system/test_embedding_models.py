"""Real encoders behind `LLM`, together with a model that generates, and in an engine process that is killed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import signal
from collections.abc import Callable
from os import kill
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from quire import LLM
from quire.runtime.cli.app import app
from quire.runtime.common.config import EngineConfig
from quire.runtime.common.errors import ConfigError, ContextLengthExceeded, InvalidRequest, UnsupportedModel
from quire.runtime.common.server_config import ServerConfig
from quire.runtime.common.types import SamplingParams
from quire.runtime.engine import EmbedRequest, Engine, load_texts
from quire.runtime.server import Server
from quire.runtime.workers import EnginePool

GOLDENS = Path(__file__).resolve().parents[1] / "goldens" / "encoders"
OPTIONS: dict[str, Any] = {"weights": "f32", "max_num_batched_tokens": 256, "threads": 2}


def golden(name: str) -> tuple[str, dict[str, Any]]:
    return str(GOLDENS / name), json.loads((GOLDENS / name / "golden.json").read_text("utf-8"))


@pytest.mark.parametrize("name", ["bert", "xlm_roberta", "qwen3", "gte"])
def test_vectors_are_those_of_the_reference(name: str) -> None:
    path, expected = golden(name)
    with LLM(path, **OPTIONS) as llm:
        prompt = expected["prompt"]
        together = llm.embed(expected["texts"], prompt_name=prompt)
        alone = np.concatenate([llm.embed(text, prompt_name=prompt) for text in expected["texts"]])
        with pytest.raises(InvalidRequest, match="generates no text"):
            llm.generate("a")
    assert np.allclose(together, np.float32(expected["values"]), atol=2e-4)
    assert np.array_equal(together, alone)


@pytest.mark.parametrize("name", ["distilbert_scores", "gte_scores"])
def test_probabilities_are_those_of_the_reference(name: str) -> None:
    """Token ids, because the reference has values of pairs."""
    path, expected = golden(name)
    with LLM(path, **OPTIONS) as llm:
        found = llm.classify(expected["token_ids"])
        with pytest.raises(InvalidRequest, match="makes no embeddings"):
            llm.embed("a")
    weights = np.exp(np.array(expected["values"]))
    assert np.allclose(found, weights / weights.sum(axis=1, keepdims=True), atol=2e-4)


def copy_of(name: str, folder: Path, file: str, **values: Any) -> str:
    """Copy a golden folder, and set values in one of its JSON files."""
    shutil.copytree(GOLDENS / name, folder)
    content = json.loads((folder / file).read_text("utf-8"))
    (folder / file).write_text(json.dumps({**content, **values}), "utf-8")
    return str(folder)


def test_labels_that_may_all_be_right_have_probabilities_of_their_own(tmp_path: Path) -> None:
    path = copy_of("distilbert_scores", tmp_path / "labels", "config.json", problem_type="multi_label_classification")
    expected = golden("distilbert_scores")[1]
    with LLM(path, **OPTIONS) as llm:
        found = llm.classify(expected["token_ids"])
    assert np.allclose(found, 1 / (1 + np.exp(-np.array(expected["values"]))), atol=2e-4)


def test_texts_without_a_prompt_have_the_folders_default_one(tmp_path: Path) -> None:
    settings = "config_sentence_transformers.json"
    path = copy_of("bert_dense", tmp_path / "prompts", settings, default_prompt_name="query")
    expected = golden("bert_dense")[1]  # vectors with this prompt
    with LLM(path, **OPTIONS) as llm:
        assert np.allclose(llm.embed(expected["texts"]), np.float32(expected["values"]), atol=2e-4)


def score(llm: LLM, text: str, **options: Any) -> Any:
    return llm.score("the owner", [text], **options)


@pytest.mark.parametrize(
    ("name", "call"),
    [("bert", LLM.embed), ("bert", score), ("bert_scores", score), ("distilbert_scores", LLM.classify)],
)
def test_a_text_that_is_too_long_may_be_truncated(name: str, call: Callable[..., Any]) -> None:
    with LLM(golden(name)[0], **OPTIONS) as llm:
        with pytest.raises(ContextLengthExceeded, match="the limit of this model is"):
            call(llm, "pool " * 999)
        cut = call(llm, "pool " * 999, truncate_prompt_tokens=16)
        assert np.array_equal(cut, call(llm, "pool " * 99, truncate_prompt_tokens=16))


HOSTILE = {
    "nul": "\0" * 99,
    "spaces": " \t\n\u3000" * 999,
    "one word": "a" * 9999,
    "marks without a letter": "\u0301" * 999,
    "directions": "\u202e\u2066" * 99,
    "special tokens": "[CLS][SEP][PAD][MASK]<s></s><|endoftext|>" * 9,
    "no characters": "\ufffe\U0010ffff" * 99,
}


@pytest.mark.parametrize("name", ["bert", "xlm_roberta", "qwen3"])
def test_hostile_texts_have_vectors_or_typed_errors_and_change_no_other(name: str) -> None:
    usual = "The pool owns the pages."
    with LLM(golden(name)[0], **OPTIONS) as llm:
        (expected,) = llm.embed(usual)
        for text in HOSTILE.values():
            for truncation in (None, -1):
                with contextlib.suppress(InvalidRequest, ContextLengthExceeded):
                    values = llm.embed([text, usual], truncate_prompt_tokens=truncation)
                    assert np.isfinite(values).all()
                    assert np.array_equal(values[1], expected)
        assert np.array_equal(llm.embed([usual] * 70), np.stack([expected] * 70))
        megabytes = "pages " * 2_000_000
        with pytest.raises(ContextLengthExceeded, match=r"inputs\[0\] has 12000000 characters"):
            llm.embed(megabytes)
        assert np.array_equal(llm.embed([megabytes, usual], truncate_prompt_tokens=-1)[1], expected)
        for inputs, message in (
            (["a"] * 100_000, "inputs has 100000 entries"),
            ("a\ud800", "lone surrogate"),
            ([[llm.engine.info.vocab_size]], "outside the vocabulary"),
            ([[1 << 70]], "outside the vocabulary"),
            ([[-1]], "outside the vocabulary"),
        ):
            with pytest.raises(InvalidRequest, match=message):
                llm.embed(inputs)  # type: ignore[arg-type]


def test_a_reranker_scores_pairs() -> None:
    path, expected = golden("bert_scores")
    with LLM(path, **OPTIONS) as llm:
        scores = [float(llm.score(query, [document])[0]) for query, document in expected["texts"]]
        query = expected["texts"][0][0]
        assert llm.score(query, [pair[1] for pair in expected["texts"][:3]]).tolist() == scores[:3]
        with pytest.raises(InvalidRequest, match="makes no embeddings"):
            llm.embed("a")
    logits = np.float32(expected["values"])[:, 0]
    assert np.allclose(scores, logits, atol=1e-3) or np.allclose(scores, 1 / (1 + np.exp(-logits)), atol=1e-3)


def test_an_encoder_beside_a_model_that_generates_changes_no_token() -> None:
    path, expected = golden("bert")
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    with LLM(kv_cache_memory=1 << 20, threads=2) as llm:
        text = llm.generate("A page", params)[0].text
        with pytest.raises(InvalidRequest, match="no embedding model"):
            llm.embed("a")
    with LLM(kv_cache_memory=1 << 20, threads=2, embedding_model=path, itl_target_ms=50) as llm:
        assert llm.generate("A page", params)[0].text == text
        assert llm.embed(expected["texts"]).shape == (len(expected["texts"]), len(expected["values"][0]))
        assert llm.engine.info.generates


async def test_a_load_test_counts_texts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, _ = golden("bert")
    config = EngineConfig(model=path, **OPTIONS)
    engine = await Engine.start(config)
    server = Server()
    await server.start(engine, ServerConfig(port=0, operator_port=0, openai_port=0))
    flags = ("--task", "embed", "--num-prompts", "4", "--random-input-len", "12", "--max-concurrency", "2")
    saving = ("--save-result", "--result-dir", str(tmp_path), "--result-filename", "r.json", "--texts-per-request", "5")
    try:
        arguments = ["loadtest", "--base-url", str(server.address), *flags, *saving]
        await asyncio.to_thread(app, arguments, exit_on_error=False, print_error=False, result_action="return_value")
    finally:
        await server.close()
        await engine.close()
    result = json.loads((tmp_path / "r.json").read_text())
    assert (result["completed"], result["total_output_tokens"], result["total_input_tokens"]) == (4, 20, 240)
    assert "Text throughput (texts/s):" in capsys.readouterr().out


def test_models_that_do_not_fit_the_option_are_refused(tmp_path: Path) -> None:
    path, _ = golden("bert")
    with pytest.raises(ConfigError, match="embedding_model cannot be given with a model that is an encoder"):
        LLM(path, embedding_model=path)
    decoder = tmp_path / "decoder"
    decoder.mkdir()
    (decoder / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}', "utf-8")
    with pytest.raises(UnsupportedModel):
        LLM(kv_cache_memory=1 << 20, embedding_model=str(decoder))


async def test_texts_go_on_after_the_engine_process_is_killed() -> None:
    path, expected = golden("bert")
    config = EngineConfig(model=path, **OPTIONS)
    texts = expected["texts"] * 200
    pool = await EnginePool.launch(config)
    engine = Engine(pool, *load_texts(config))
    try:
        async with asyncio.timeout(120):
            rows = []
            async for chunk in await engine.embed(EmbedRequest(inputs=tuple(texts))):
                rows.append(chunk.values)
                if len(rows) == 2:
                    pid = pool.members[0].pid
                    assert pid is not None
                    kill(pid, signal.SIGKILL)
        values = np.concatenate(rows)
        assert np.array_equal(values, np.tile(values[: len(expected["texts"])], (200, 1)))
        assert np.allclose(values[: len(expected["texts"])], np.float32(expected["values"]), atol=2e-4)
    finally:
        await engine.close()
