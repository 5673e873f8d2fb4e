"""anthropic-sdk-python against a real server: every answer is of its types, and a stream adds up to the whole one."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import anthropic
import pytest
from anthropic.types import Message, MessageTokensCount, ModelInfo

from tests.support.scripted_model import write_scripted_model
from tests.support.sdk_types import check_types

PARIS = '{"city": "Paris"}'
SCRIPTS = {
    "<|0|>": "A queue is first in, first out.",
    "<|1|>": "<think>\nHm, rain.\n</think>\n\nI look.\n"
    f'<tool_call>\n{{"name": "weather", "arguments": {PARIS}}}\n</tool_call>\n'
    '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>',
    "<|2|>": "It rains.",
    "<|3|>": '{"a": "b"} It is.',
}
# The prompt shows what the template receives; its end decides the model's answer.
TEMPLATE = (
    "{# <tool_call> </think> #}{{ tools | tojson if tools }}{% for m in messages %}[{{ m.role }}] "
    "{{ m.reasoning_content }}{{ m.tool_calls | tojson if m.tool_calls }}{{ m.content }}{% endfor %}{{ end }}"
)
WEATHER: Any = {
    "name": "weather",
    "description": "The weather of a city.",
    "input_schema": {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]},
}
CLOCK: Any = {"name": "clock", "input_schema": {"type": "object", "properties": {}}}
HOSTED: Any = {"type": "web_search_20250305", "name": "web_search"}


@pytest.fixture
async def client(serving: Callable[..., Any], tmp_path: Path) -> AsyncIterator[anthropic.AsyncAnthropic]:
    model = write_scripted_model(tmp_path / "model", SCRIPTS, template=TEMPLATE, context=16384)
    async with (
        serving(model=str(model)) as real,
        anthropic.AsyncAnthropic(
            base_url=f"http://{real.server.openai_address}", api_key="none", max_retries=0
        ) as client,
    ):
        yield client


def body(script: str, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"Hello {script}"}]
    own = {"extra_body": {"temperature": 0}}  # The library has no such parameter.
    return {"model": "quire", "max_tokens": 200, "messages": messages, **own, **fields}


async def whole_and_streamed(client: anthropic.AsyncAnthropic, **fields: Any) -> tuple[Message, Message, list[Any]]:
    """Return the whole message, the message that a stream adds up to, and the stream's events."""
    whole = await client.messages.create(**fields)
    events = []
    async for event in await client.messages.create(**fields, stream=True):
        check_types(event)
        events.append(event)
    async with client.messages.stream(**fields) as stream:
        final = await stream.get_final_message()
    check_types(whole)
    return whole, final, events


def without_id(message: Message) -> dict[str, Any]:
    """Return the fields of a message, without ids, and without the tokens that came from the cache."""
    shown = message.model_dump(exclude_none=True)
    usage = shown["usage"]
    usage["input_tokens"] += usage.pop("cache_read_input_tokens") + usage.pop("cache_creation_input_tokens")
    for block in shown["content"]:
        block.pop("id", None)
        block.pop("parsed_output", None)
    shown.pop("id")
    return shown


async def test_a_stream_adds_up_to_the_whole_message(client: anthropic.AsyncAnthropic) -> None:
    for fields, reason in (
        ({}, "end_turn"),
        ({"max_tokens": 2}, "max_tokens"),
        ({"stop_sequences": [" first"]}, "stop_sequence"),
        ({"system": [{"type": "text", "text": "Be short."}], "max_tokens": 20_000}, "end_turn"),
    ):
        whole, final, events = await whole_and_streamed(client, **body("<|0|>", **fields))
        assert without_id(whole) == without_id(final)
        assert whole.stop_reason == reason
        (block,) = whole.content
        assert block.type == "text"
        text, sequence = ("A queue is", " first") if reason == "stop_sequence" else (SCRIPTS["<|0|>"], None)
        assert (text.startswith(block.text), whole.stop_sequence) == (True, sequence)
        assert (block.text == text) == (reason != "max_tokens")
        kinds = [event.type for event in events]
        first, *deltas, stop, last, end = [kind for kind in kinds if kind != "ping"]
        assert (first, deltas[0]) == ("message_start", "content_block_start")
        assert set(deltas[1:]) == {"content_block_delta"}
        assert (stop, last, end) == ("content_block_stop", "message_delta", "message_stop")


async def test_thinking_and_calls_are_blocks_and_their_results_are_read(client: anthropic.AsyncAnthropic) -> None:
    fields = body("<|1|>", tools=[WEATHER, HOSTED, CLOCK], thinking={"type": "adaptive"})
    whole, final, events = await whole_and_streamed(client, **fields)
    assert without_id(whole) == without_id(final)
    thinking, text, *calls = whole.content
    assert (thinking.type, text.type, whole.stop_reason) == ("thinking", "text", "tool_use")
    assert (thinking.thinking.strip(), text.text.strip()) == ("Hm, rain.", "I look.")  # type: ignore[union-attr]
    assert [(each.name, each.input) for each in calls] == [("weather", {"city": "Paris"}), ("clock", {})]  # type: ignore[union-attr]
    assert whole.usage.output_tokens_details is not None
    assert 0 < whole.usage.output_tokens_details.thinking_tokens < whole.usage.output_tokens
    started = [event.index for event in events if event.type == "content_block_start"]
    assert started == [0, 1, 2, 3]
    signed = [event.delta.type for event in events if event.type == "content_block_delta" and event.index == 0]
    assert signed[-1] == "signature_delta"
    results: Any = [
        {"type": "tool_result", "tool_use_id": calls[0].id, "content": "rain"},  # type: ignore[union-attr]
        {
            "type": "tool_result",
            "tool_use_id": calls[1].id,
            "is_error": True,
            "content": [{"type": "text", "text": "7"}],
        },  # type: ignore[union-attr]
        {"type": "text", "text": "Go on. <|2|>"},
    ]
    messages = [*fields["messages"], whole.to_param(), {"role": "user", "content": results}]
    answer = await client.messages.create(**{**fields, "messages": messages})
    assert [block.text for block in answer.content] == ["It rains."]  # type: ignore[union-attr]
    assert answer.usage.cache_read_input_tokens


async def test_a_tool_choice_decides_about_calls(client: anthropic.AsyncAnthropic) -> None:
    choices: list[tuple[Any, list[str]]] = [
        ({"type": "tool", "name": "clock"}, ["clock"]),
        ({"type": "any", "disable_parallel_tool_use": True}, ["weather"]),
        ({"type": "none"}, []),
    ]
    for choice, names in choices:
        tools = [WEATHER] if names == ["weather"] else [WEATHER, CLOCK]
        answer = await client.messages.create(**body("<|0|>", tools=tools, tool_choice=choice, max_tokens=400))
        check_types(answer)
        assert [block.name for block in answer.content if block.type == "tool_use"] == names
        assert answer.stop_reason == ("tool_use" if names else "end_turn")


async def test_an_answer_matches_a_schema(client: anthropic.AsyncAnthropic) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": ["b"]}}, "required": ["a"], "additionalProperties": False}
    answer = await client.messages.create(
        **body("<|3|>", output_config={"format": {"type": "json_schema", "schema": schema}})
    )
    assert json.loads(answer.content[-1].text) == {"a": "b"}  # type: ignore[union-attr]


async def test_the_second_turn_of_an_agent_is_read_from_the_cache(client: anthropic.AsyncAnthropic) -> None:
    """The body is as a coding agent's: a long system text, thirty tools, long results, and cache breakpoints."""
    ephemeral: Any = {"type": "ephemeral", "ttl": "1h"}
    tools = [{**CLOCK, "name": f"tool_{index}", "description": "It does a thing. " * 2} for index in range(30)]
    tools[-1] = {**tools[-1], "cache_control": {"type": "ephemeral"}}
    system: Any = [{"type": "text", "text": "You are a coding agent. " * 12, "cache_control": ephemeral}]
    shared = {"system": system, "tools": tools, "metadata": {"user_id": "session-1"}}
    first = await client.messages.create(**body("<|2|>", **shared))
    usage = first.usage
    assert usage.cache_read_input_tokens == 0
    assert usage.cache_creation_input_tokens
    counted = await client.messages.count_tokens(
        model="quire", messages=body("<|2|>")["messages"], system=system, tools=tools
    )
    assert type(counted) is MessageTokensCount
    assert counted.input_tokens == usage.input_tokens + usage.cache_creation_input_tokens
    call = {"type": "tool_use", "id": "toolu_1", "name": "tool_3", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "line of a file\n" * 10}
    messages = [
        *body("<|2|>")["messages"],
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result, {"type": "text", "text": "<|0|>", "cache_control": ephemeral}]},
    ]
    second = (await client.messages.create(**body("<|0|>", **shared) | {"messages": messages})).usage
    assert second.cache_read_input_tokens is not None
    assert second.cache_read_input_tokens >= usage.cache_creation_input_tokens - 64
    assert second.cache_creation_input_tokens


async def test_models_have_the_form_of_the_header(client: anthropic.AsyncAnthropic) -> None:
    models = [model async for model in client.models.list()]
    assert [type(model) for model in models] == [ModelInfo]
    check_types(models[0])
    assert await client.models.retrieve("quire") == models[0]
    with pytest.raises(anthropic.NotFoundError) as caught:
        await client.models.retrieve("another")
    assert caught.value.body == {
        "type": "error",
        "error": {
            "type": "not_found_error",
            "message": "the model 'another' does not exist here; this server has 'quire'",
        },
        "request_id": caught.value.response.headers["request-id"],
    }
