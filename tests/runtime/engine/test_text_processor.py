"""The text files of a model folder: broken and missing ones."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from quire.runtime.common.config import EngineConfig
from quire.runtime.common.errors import ConfigError, CorruptCheckpoint, InvalidRequest
from quire.runtime.common.types import SamplingParams
from quire.runtime.engine import Engine, GenerateRequest, TextProcessor
from quire.runtime.model import BUNDLED_MODEL
from structlog.testing import capture_logs

from tests.support.gguf_files import write


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(BUNDLED_MODEL, tmp_path / "model"))


def test_a_broken_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(CorruptCheckpoint, match="tokenizer"):
        TextProcessor.load(folder)


async def test_a_model_without_a_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    engine = await Engine.start(EngineConfig(model=str(folder), kv_cache_memory=1 << 20))
    try:
        assert engine.core.info.eos_token_ids == {0}
        assert not engine.info.has_tokenizer
        for prompt, params in (("text", SamplingParams()), ((5,), SamplingParams(stop=("x",)))):
            with pytest.raises(InvalidRequest, match=r"no tokenizer\.json|without a tokenizer\.json"):
                engine.submit(GenerateRequest(prompt=prompt, sampling_params=params))
        with pytest.raises(InvalidRequest, match="no tokenizer"):
            await engine.tokenize("text")
        stream = await engine.submit(
            GenerateRequest(prompt=(5,), sampling_params=SamplingParams(max_tokens=3, logit_bias={0: 100.0}))
        )
        chunks = [chunk async for chunk in stream]
        assert [chunk.token_ids for chunk in chunks] == [(0,)]
        assert chunks[-1].finish_reason == "stop"
    finally:
        await engine.close()


@pytest.mark.parametrize("source", ["{{ .Prompt }}", "{{ x | unheard_of }}", "{% if %}", "x" * ((1 << 20) + 1)])
async def test_a_chat_template_that_cannot_be_used_costs_chats_only(folder: Path, source: str) -> None:
    (folder / "chat_template.jinja").write_text(source)
    with capture_logs() as logs:
        engine = await Engine.start(EngineConfig(model=str(folder), kv_cache_memory=1 << 20))
    try:
        problem = "this model's chat template cannot be used: the chat template .*; --chat-template FILE replaces it"
        assert [entry["log_level"] for entry in logs if entry["event"] == "chats are refused"] == ["warning"]
        with pytest.raises(InvalidRequest, match=problem):
            engine.submit(GenerateRequest(prompt=None, messages=({"role": "user", "content": "x"},)))
        stream = await engine.submit(GenerateRequest(prompt="def", sampling_params=SamplingParams(max_tokens=2)))
        assert [chunk async for chunk in stream]
    finally:
        await engine.close()


def test_a_given_chat_template_must_be_usable(folder: Path, tmp_path: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ .Prompt }}")
    given = tmp_path / "given.jinja"
    given.write_text("{{ messages[0].content }}!")
    processor = TextProcessor.load(folder, chat_template=str(given))
    assert processor.render([{"role": "user", "content": "x"}]).text == "x!"
    assert processor.chat_problem == ""
    given.write_text("{% if %}")
    with pytest.raises(ConfigError, match=r"chat_template: .*given\.jinja: the chat template is broken at line 1"):
        TextProcessor.load(folder, chat_template=str(given))


def test_recommended_sampling_parameters(folder: Path) -> None:
    (folder / "generation_config.json").write_text(
        '{"temperature": 0.6, "top_k": 20, "min_p": null, "do_sample": true}'
    )
    assert TextProcessor.load(folder).default_sampling == {"temperature": 0.6, "top_k": 20}


def test_given_sampling_parameters_replace_recommended_ones(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"temperature": 0.6, "top_k": 20}')
    processor = TextProcessor.load(folder, default_sampling={"top_k": 5.0, "min_p": 0.1})
    assert processor.default_sampling == {"temperature": 0.6, "top_k": 5, "min_p": 0.1}
    assert type(processor.default_sampling["top_k"]) is int


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"seed": 1}, "default_sampling: 'seed' is not one of temperature, top_k, top_p, min_p, repetition_penalty"),
        ({"top_p": 2}, "default_sampling: top_p must be between .* and 1, not 2"),
        ({"top_k": 1.5}, r"default_sampling: top_k must be a whole number, not 1\.5"),
    ],
)
def test_given_sampling_parameters_must_be_allowed(folder: Path, given: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TextProcessor.load(folder, default_sampling=given)


def test_the_system_prompt_is_for_chats_without_a_system_message(folder: Path, tmp_path: Path) -> None:
    template = tmp_path / "t.jinja"
    template.write_text("{% for m in messages %}{{ m.role }}={{ m.content }};{% endfor %}")
    processor = TextProcessor.load(folder, chat_template=str(template), system_prompt="be brief")
    user = {"role": "user", "content": "x"}
    assert processor.render([user]).text == "system=be brief;user=x;"
    assert processor.render([{"role": "system", "content": "own"}, user]).text == "system=own;user=x;"


def test_a_system_prompt_needs_a_chat_template(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{% if %}")
    with pytest.raises(ConfigError, match="system_prompt cannot be used: this model's chat template cannot be used"):
        TextProcessor.load(folder, system_prompt="x")


def test_sampling_parameters_that_a_gguf_file_recommends(tmp_path: Path) -> None:
    metadata = {
        "general.architecture": "llama",
        "general.sampling.temp": 0.6,
        "general.sampling.top_k": 20,
        "general.sampling.top_p": 0.95,
        "general.sampling.min_p": 7.0,
        "general.sampling.penalty_repeat": "high",
    }
    (tmp_path / "generation_config.json").write_text('{"temperature": 1.0, "min_p": 0.1}')
    path = tmp_path / "model.gguf"
    write(path, metadata, {})
    (tmp_path / "tokenizer.json").write_bytes((BUNDLED_MODEL / "tokenizer.json").read_bytes())
    with capture_logs() as logs:
        found = TextProcessor.load(path).default_sampling
    assert found == {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.1}
    assert [entry["key"] for entry in logs] == ["general.sampling.min_p", "general.sampling.penalty_repeat"]


@pytest.mark.parametrize(
    ("config", "generation_config", "ids"),
    [
        ({"eos_token_id": [0, 4096, 9999]}, {"eos_token_id": 0}, [4096, 9999]),
        ({"eos_token_id": 4096}, None, [4096]),
        ({"eos_token_id": -1}, {"eos_token_id": [0]}, [-1]),
        ({"eos_token_id": 0, "text_config": {"eos_token_id": 4097}}, {"eos_token_id": 0}, [4097]),
        ({"eos_token_id": [0, 4095]}, None, None),
        ({"eos_token_id": None}, {"eos_token_id": 0}, None),
    ],
)
def test_end_ids_of_the_config_beyond_the_vocabulary_are_logged(
    folder: Path, config: dict[str, object], generation_config: dict[str, object] | None, ids: list[int] | None
) -> None:
    """A folder without generation_config.json has no tokenizer here: the tokenizer would refuse the ids."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
    (folder / "generation_config.json").write_text(json.dumps(generation_config or {}))
    if generation_config is None:
        (folder / "tokenizer.json").unlink()
    with capture_logs() as logs:
        TextProcessor.load(folder)
    event = "end ids beyond the vocabulary are ignored"
    expected = {"key": f"{path}: eos_token_id", "ids": ids, "vocab_size": 4096}
    assert logs == ([{"log_level": "warning", "event": event, **expected}] if ids else [])


@pytest.mark.parametrize(
    ("recommended", "expected"),
    [
        ({"top_p": "high"}, {}),
        ({"temperature": -1, "top_p": 0.9}, {"top_p": 0.9}),
        ({"temperature": float("nan")}, {}),
        ({"temperature": float("inf"), "top_k": float("inf")}, {}),
        ({"top_p": 0}, {}),
        ({"top_k": 20.0, "min_p": True}, {"top_k": 20}),
        ({"top_k": 20.5}, {}),
        ({"top_k": 10**400, "temperature": 10**400}, {}),
        ({"repetition_penalty": 0, "temperature": [1]}, {}),
        ({"top_k": -1, "temperature": 0}, {"top_k": -1, "temperature": 0}),
    ],
)
def test_a_recommendation_that_no_request_may_have_is_left_out(
    folder: Path, recommended: dict[str, object], expected: dict[str, float]
) -> None:
    (folder / "generation_config.json").write_text(json.dumps(recommended))
    with capture_logs() as logs:
        assert TextProcessor.load(folder).default_sampling == expected
    assert len(logs) == len(recommended) - len(expected)
