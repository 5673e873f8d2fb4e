"""ollama-python against a real server: every answer is of its types, and a stream adds up to the whole answer."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import ollama
import pytest

from tests.support.scripted_model import write_scripted_model
from tests.support.sdk_types import check_types

ENCODER = Path(__file__).resolve().parents[1] / "goldens" / "encoders" / "bert"
PARIS = '{"city": "Paris"}'
SCRIPTS = {
    "<|0|>": "A queue is first in, first out.",
    "<|1|>": "<think>\nHm, rain.\n</think>\n\nI look.\n"
    f'<tool_call>\n{{"name": "weather", "arguments": {PARIS}}}\n</tool_call>\n'
    '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>',
    "<|2|>": "It rains.",
    "<|3|>": '{"a": "b"} It is.',
}
TEMPLATE = (
    "{# <tool_call> </think> #}{{ tools | tojson if tools }}{% for m in messages %}[{{ m.role }}] "
    "{{ m.reasoning_content }}{{ m.tool_calls | tojson if m.tool_calls }}{{ m.content }}{% endfor %}{{ end }}"
)
CITY = {"type": "object", "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}}, "required": ["city"]}
WEATHER: Any = {"type": "function", "function": {"name": "weather", "description": "d", "parameters": CITY}}
CLOCK: Any = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}}}
DURATIONS = {"created_at", "total_duration", "load_duration", "prompt_eval_duration", "eval_duration"}


@pytest.fixture
async def client(serving: Callable[..., Any], tmp_path: Path) -> AsyncIterator[ollama.AsyncClient]:
    model = write_scripted_model(tmp_path / "model", SCRIPTS, template=TEMPLATE, context=4096)
    async with serving(model=str(model), ollama_port=0) as real:
        client = ollama.AsyncClient(f"http://{real.server.ollama_address}")
        yield client
        await client._client.aclose()


def asks(script: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": f"Hello {script}"}]


def added_up(parts: list[Any]) -> dict[str, Any]:
    """Return the answer that the parts of a stream add up to, without times."""
    whole: dict[str, Any] = {}
    for part in parts:
        check_types(part)
        shown = part.model_dump(exclude_none=True, exclude=DURATIONS)
        message = shown.pop("message", {})
        for name in ("content", "thinking"):
            if name in message:
                message[name] = whole.get("message", {}).get(name, "") + message[name]
        for name in ("response", "thinking", "logprobs"):
            if name in shown and name in whole:
                shown[name] = whole[name] + shown[name]
        calls = [*whole.get("message", {}).get("tool_calls", []), *message.pop("tool_calls", [])]
        message = {**whole.get("message", {}), **message, **({"tool_calls": calls} if calls else {})}
        whole |= {**shown, **({"message": message} if message else {})}
    return whole


async def test_a_chat_stream_adds_up_to_the_whole_answer(client: ollama.AsyncClient) -> None:
    options = {"temperature": 0, "num_ctx": 4096, "num_gpu": 0}
    for script, fields, reason in (
        ("<|0|>", {}, "stop"),
        ("<|0|>", {"options": {**options, "num_predict": 3}}, "length"),
        ("<|0|>", {"logprobs": True, "top_logprobs": 2}, "stop"),
        ("<|1|>", {"tools": [WEATHER, CLOCK], "think": True, "keep_alive": "5m"}, "stop"),
    ):
        params: Any = {"model": "quire:latest", "messages": asks(script), "options": options, **fields}
        whole = await client.chat(**params)
        parts = [part async for part in await client.chat(**params, stream=True)]
        assert added_up(parts) == added_up([whole])
        assert (whole.model, whole.done, whole.done_reason) == ("quire:latest", True, reason)
        assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
        assert whole.eval_duration is not None
        assert whole.total_duration is not None
        assert 0 < whole.eval_duration <= whole.total_duration
        if fields.get("logprobs"):
            assert whole.logprobs is not None
            assert [len(each.top_logprobs or ()) for each in whole.logprobs] == [2] * len(whole.logprobs)
            assert "".join(each.token for each in whole.logprobs) == SCRIPTS[script]


async def test_calls_thinking_and_results(client: ollama.AsyncClient) -> None:
    whole = await client.chat("quire", asks("<|1|>"), tools=[WEATHER, CLOCK], think="high")
    assert (whole.message.thinking or "").strip() == "Hm, rain."
    assert (whole.message.content or "").strip() == "I look."
    calls = whole.message.tool_calls or []
    called = [(each.function.name, each.function.arguments) for each in calls]
    assert called == [("weather", {"city": "Paris"}), ("clock", {})]
    texts = {"clock": "7", "weather": "rain"}
    results = [{"role": "tool", "tool_name": name, "content": text} for name, text in texts.items()]
    messages = [*asks("<|1|>"), whole.message, *results, *asks("<|2|>")]
    assert (await client.chat("quire", messages, tools=[WEATHER, CLOCK])).message.content == "It rains."


async def test_a_prompt_is_a_chat_unless_it_is_raw(client: ollama.AsyncClient) -> None:
    for raw in (False, True):
        params: Any = {"model": "quire", "prompt": "Hello <|0|>", "raw": raw, "options": {"temperature": 0}}
        params |= {} if raw else {"system": "Be short."}
        whole = await client.generate(**params)
        assert whole.response == SCRIPTS["<|0|>"]
        assert added_up([part async for part in await client.generate(**params, stream=True)]) == added_up([whole])
        # With a template the prompt has the system text and roles.
        assert whole.prompt_eval_count == (7 if raw else 32)


async def test_an_answer_matches_a_format(client: ollama.AsyncClient) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": ["b"]}}, "required": ["a"], "additionalProperties": False}
    options = {"temperature": 0, "num_predict": 100}
    answer = await client.chat("quire", asks("<|3|>"), format=schema, options=options)
    assert json.loads(answer.message.content or "") == {"a": "b"}


async def test_models_are_listed_shown_and_not_pulled(client: ollama.AsyncClient) -> None:
    listed = await client.list()
    check_types(listed)
    assert [model.model for model in listed.models] == ["quire:latest"]
    running = await client.ps()
    check_types(running)
    assert [(model.model, model.context_length) for model in running.models] == [("quire:latest", 4096)]
    shown = await client.show("quire")
    check_types(shown)
    assert shown.capabilities == ["completion", "tools"]
    assert (shown.modelinfo or {})["quire.context_length"] == 4096
    assert (await client.pull("quire")).status == "success"
    assert [part.status async for part in await client.pull("quire", stream=True)] == ["success"]
    for refused in (client.pull("llama3.2"), client.chat("llama3.2", asks("<|0|>"))):
        with pytest.raises(ollama.ResponseError, match="not found; this server has 'quire'") as caught:
            await refused
        assert caught.value.status_code == 404
    loaded = await client.chat("quire")
    check_types(loaded)
    assert (loaded.message.content, loaded.done_reason) == ("", "load")
    assert (await client.generate("quire", keep_alive=0)).done_reason == "unload"


async def test_texts_are_embedded(serving: Callable[..., Any]) -> None:
    async with serving(embedding_model=str(ENCODER), ollama_port=0) as real:
        client = ollama.AsyncClient(f"http://{real.server.ollama_address}")
        one = await client.embed("bert", "a b c")
        two = await client.embed("bert", ["a b c", "d"])
        check_types(two)
        assert [list(each) for each in two.embeddings][:1] == [list(each) for each in one.embeddings]
        assert list((await client.embeddings("bert", "a b c")).embedding) == list(one.embeddings[0])
        assert (await client.embed("bert", [])).embeddings == []
        assert (await client.show("bert")).capabilities == ["embedding"]
        await client._client.aclose()
