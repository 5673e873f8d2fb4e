"""Tool calls and reasoning over HTTP, from models that generate a given script."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletion
from quire.runtime.engine.markup.markup import CHANNEL_TOKENS

from tests.support.scripted_model import write_scripted_model

from .test_openai_python import check

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "description": "of a city", "parameters": CITY}},
    {"type": "function", "function": {"name": "time"}},
]
# Tools whose calls are short with any model.
BOUNDED: Any = [
    {
        "type": "function",
        "function": {
            "name": name,
            "strict": True,
            "parameters": {
                "type": "object",
                "properties": properties,
                "required": [*properties],
                "additionalProperties": False,
            },
        },
    }
    for name, properties in (("weather", {"city": {"enum": ["Paris", "Rome"]}}), ("time", {}))
]
NAMED: Any = {"type": "function", "function": {"name": "weather"}}
PARIS = '{"city": "Paris"}'
HERMES_CALLS = (
    f'<tool_call>\n{{"name": "weather", "arguments": {PARIS}}}\n</tool_call>\n'
    '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
)
# The end of the prompt decides what the model says.
TEMPLATE = "{{ tools }}{% for m in messages %}{{ m.role }}: {{ m.content }}{{ m.tool_calls }}{% endfor %}{{ end }}"

Client = Callable[..., AbstractAsyncContextManager[openai.AsyncOpenAI]]


@pytest.fixture
def client(serving: Callable[..., Any], tmp_path: Path) -> Client:
    """Serve a scripted model: `async with client(signs, scripts) as openai_client`. The template contains the signs."""

    @asynccontextmanager
    async def start(
        signs: str,
        scripts: dict[str, str],
        *,
        special: Sequence[str] = (),
        added: Sequence[str] = (),
        whole: Sequence[str] = (),
        **settings: Any,
    ) -> AsyncIterator[openai.AsyncOpenAI]:
        template = f"{{# {signs} #}}{TEMPLATE}"
        model = write_scripted_model(
            tmp_path / "model", scripts, template=template, special=special, added=added, whole=whole
        )
        async with serving(model=str(model), **settings) as real:
            url = f"http://{real.server.openai_address}/v1"
            async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as connected:
                yield connected

    return start


async def ask(client: openai.AsyncOpenAI, script: str, **options: Any) -> ChatCompletion:
    """Return the answer to a prompt that ends with `script`, of which the stream adds up to the same."""
    params: Any = {"model": "quire", "messages": [{"role": "user", "content": f"Hello {script}"}]}
    params |= {"seed": 5, **options}
    whole = await client.chat.completions.create(**params)
    async with client.chat.completions.stream(**params, stream_options={"include_usage": True}) as stream:
        async for _ in stream:
            pass
        streamed = stream.current_completion_snapshot
    exclude: Any = {"id", "created", "object", "parsed", "parsed_arguments", "prompt_tokens_details"}
    assert fields(streamed.model_dump(), exclude) == fields(whole.model_dump(), exclude)
    return whole


def fields(value: Any, exclude: set[str]) -> Any:
    """Return the fields that are set, without `exclude` and the index of a call, which only streams have."""
    if isinstance(value, dict):
        kept = {key: each for key, each in value.items() if key not in exclude and each is not None}
        return {
            key: fields(each, exclude) for key, each in kept.items() if not (key == "index" and "function" in value)
        }
    return [fields(each, exclude) for each in value] if isinstance(value, list) else value


def calls(answer: ChatCompletion, choice: int = 0) -> list[tuple[str, str]]:
    found = answer.choices[choice].message.tool_calls or []
    return [(call.function.name, call.function.arguments) for call in found if call.type == "function"]


async def test_calls_of_a_family_whose_markers_are_text(client: Client) -> None:
    scripts = {"<|0|>": f"I look.\n{HERMES_CALLS}", "<|1|>": "It is 5 < 6."}
    async with client("<tool_call>", scripts, added=["<tool_call>", "</tool_call>"]) as connected:
        answer = await ask(connected, "<|0|>", tools=TOOLS)
        choice = answer.choices[0]
        assert (choice.message.content, choice.finish_reason) == ("I look.", "tool_calls")
        assert calls(answer) == [("weather", PARIS), ("time", "{}")]
        ids = [call.id for call in choice.message.tool_calls or ()]
        assert all(len(each) == 9 and each.isalnum() for each in ids)
        assert len(set(ids)) == 2
        three = await ask(connected, "<|0|>", tools=TOOLS, n=3)
        assert [calls(three, index) for index in range(3)] == [calls(answer)] * 3
        text = await ask(connected, "<|1|>", tools=TOOLS)
        assert (text.choices[0].message.content, text.choices[0].finish_reason) == ("It is 5 < 6.", "stop")
        assert text.choices[0].message.tool_calls is None
        # No part of a call is shown as text, wherever the output ends.
        assert answer.usage is not None
        for max_tokens in range(1, answer.usage.completion_tokens - 1):
            cut = await connected.chat.completions.create(
                model="quire", messages=[{"role": "user", "content": "<|0|>"}], tools=TOOLS, max_tokens=max_tokens
            )
            assert "I look.\n".startswith(cut.choices[0].message.content or "")
            assert cut.choices[0].finish_reason == "length"


@pytest.mark.parametrize("signs", ["<tool_call>", "[TOOL_CALLS]"])
async def test_a_function_that_tool_choice_names_is_called_once(client: Client, signs: str) -> None:
    """A function that the choice only allows, or requires with others, may be called several times."""
    call = json.dumps({"name": "weather", "arguments": {"city": "Paris"}})
    twice = (
        f"[TOOL_CALLS][{call}, {call}]" if signs[0] == "[" else "\n".join([f"<tool_call>\n{call}\n</tool_call>"] * 2)
    )
    allowed = {"mode": "required", "tools": [NAMED]}
    several: Any = ["required", {"type": "allowed_tools", "allowed_tools": allowed}]
    async with client(signs, {"<|0|>": twice}, added=[signs]) as connected:
        for choice in (NAMED, *several):
            for parallel in ({}, {"parallel_tool_calls": True}):
                answer = await ask(connected, "<|0|>", tools=TOOLS, tool_choice=choice, max_tokens=400, **parallel)
                assert calls(answer) == [("weather", PARIS)] * (1 if choice == NAMED else 2)
                assert answer.choices[0].finish_reason == ("stop" if choice == NAMED else "tool_calls")
        flat = [{"type": "function", **tool["function"]} for tool in TOOLS]
        response = await connected.responses.create(
            model="quire", input="Hello <|0|>", tools=flat, tool_choice={"type": "function", "name": "weather"}
        )
        assert [(item.type, item.name) for item in response.output] == [("function_call", "weather")]


async def test_what_tool_choice_asks_for_is_what_comes(client: Client) -> None:
    """The script is one text, but the grammar decides."""
    scripts = {"<|0|>": f"I look.\n{HERMES_CALLS}"}
    async with client("<tool_call>", scripts) as connected:
        required = await ask(connected, "<|0|>", tools=BOUNDED, tool_choice="required", max_tokens=400, logprobs=True)
        assert calls(required)
        assert (required.choices[0].message.content, required.choices[0].logprobs) == (None, None)
        for name, arguments in calls(required):
            assert name in ("weather", "time")
            assert isinstance(json.loads(arguments), dict)
        named = await ask(
            connected, "<|0|>", tools=BOUNDED, tool_choice=NAMED, parallel_tool_calls=False, max_tokens=400
        )
        assert [name for name, _ in calls(named)] == ["weather"]
        assert json.loads(calls(named)[0][1])["city"] in ("Paris", "Rome")
        assert named.choices[0].finish_reason == "stop"
        allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": "time"}}]}
        choice: Any = {"type": "allowed_tools", "allowed_tools": allowed}
        only = await ask(
            connected, "<|0|>", tools=BOUNDED, tool_choice=choice, parallel_tool_calls=False, max_tokens=400
        )
        assert [name for name, _ in calls(only)] == ["time"]
        assert only.choices[0].finish_reason == "tool_calls"
        stream = await connected.chat.completions.create(
            model="quire",
            messages=[{"role": "user", "content": "<|0|>"}],
            tools=BOUNDED,
            tool_choice=NAMED,
            max_tokens=400,
            stream=True,
            extra_body={"return_token_ids": True},
        )
        assert {chunk.choices[0].delta.content async for chunk in stream} == {None}
        none = await ask(connected, "<|0|>", tools=BOUNDED, tool_choice="none", max_tokens=60)
        assert calls(none) == []
        assert "<tool_call>" not in (none.choices[0].message.content or "")


async def test_calls_of_a_family_whose_markers_are_special_tokens(client: Client) -> None:
    script = f"[THINK]Hm.[/THINK]I look.[TOOL_CALLS]weather[ARGS]{PARIS}"
    special = ["[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]"]
    async with client("[TOOL_CALLS][ARGS]", {"<|0|>": script}, special=special) as connected:
        answer = await ask(connected, "<|0|>", tools=TOOLS)
        message: Any = answer.choices[0].message
        assert (message.reasoning_content, message.reasoning, message.content) == ("Hm.", "Hm.", "I look.")
        assert calls(answer) == [("weather", PARIS)]
        assert answer.usage is not None
        assert answer.usage.completion_tokens_details is not None
        assert 0 < (answer.usage.completion_tokens_details.reasoning_tokens or 0) < answer.usage.completion_tokens
        num_reasoning = answer.usage.completion_tokens_details.reasoning_tokens or 0
        two = (await ask(connected, "<|0|>", tools=TOOLS, n=2)).usage
        assert two is not None
        assert two.completion_tokens_details is not None
        assert two.completion_tokens_details.reasoning_tokens == 2 * num_reasoning
        logprobs = (await ask(connected, "<|0|>", tools=TOOLS, logprobs=True)).choices[0].logprobs
        assert logprobs is not None
        assert b"".join(bytes(each.bytes or ()) for each in logprobs.content or ()) == b"I look."


async def test_channels(client: Client) -> None:
    call = f"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{PARIS}"
    async with client("<|channel|><|message|>", {"<|0|>": call}, special=CHANNEL_TOKENS) as connected:
        answer = await ask(connected, "<|0|>", tools=TOOLS)
        assert calls(answer) == [("weather", PARIS)]
        assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (None, "tool_calls")
    text = "<|channel|>final<|message|>It rains."
    async with client("<|channel|><|message|>", {"<|0|>": text}, special=CHANNEL_TOKENS) as connected:
        for tools in ({}, {"tools": TOOLS}):
            answer = await ask(connected, "<|0|>", **tools)
            assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("It rains.", "stop")


async def test_reasoning_without_tools(client: Client) -> None:
    scripts = {"<|0|>": "<think>\nHm.\n</think>\n\nHello.", "<think>": "So.</think>Good!"}
    async with client("<think></think>", scripts, added=["<think>"]) as connected:
        answer = await ask(connected, "<|0|>")
        message: Any = answer.choices[0].message
        assert message.content == "Hello."
        assert message.reasoning_content == "Hm."
        # The template begins the reasoning.
        begun = await ask(connected, "", extra_body={"chat_template_kwargs": {"end": "<think>"}})
        assert (begun.choices[0].message.content, begun.choices[0].message.reasoning_content) == ("Good!", "So.")  # type: ignore[attr-defined]
        # A form is about the answer, after the reasoning.
        schema = {
            "type": "object",
            "properties": {"a": {"enum": [1, 2]}},
            "required": ["a"],
            "additionalProperties": False,
        }
        form: Any = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
        shaped = await ask(connected, "<|0|>", response_format=form, max_tokens=200)
        assert shaped.choices[0].message.reasoning_content == "Hm."  # type: ignore[attr-defined]
        assert json.loads(shaped.choices[0].message.content or "")["a"] in (1, 2)


async def test_results_of_tools_reach_the_template(client: Client) -> None:
    scripts = {"<|0|>": "It rains."}
    async with client("<tool_call>", scripts) as connected:
        call = {"id": "abcdefghi", "type": "function", "function": {"name": "weather", "arguments": PARIS}}
        messages: Any = [
            {"role": "user", "content": "Weather?"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "abcdefghi", "content": "rain <|0|>"},
        ]
        answer = await connected.chat.completions.create(model="quire", messages=messages, tools=TOOLS)
        assert answer.choices[0].message.content == "It rains."
        call["function"]["arguments"] = "no JSON"  # type: ignore[index]
        with pytest.raises(openai.BadRequestError, match="weather"):
            await connected.chat.completions.create(model="quire", messages=messages, tools=TOOLS)


WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"tools": "f"}, "tools", "must be a list"),
    ({"tools": [{"type": "custom"}, {"type": "function"}]}, "tools", r"tools\[1\] must be a function"),
    ({"tools": [{"type": "tool", "function": {"name": "f"}}]}, "tools", r"tools\[0\] must be a function"),
    ({"tools": [{"name": "f", "input_schema": {}}]}, "tools", r"tools\[0\] must be a function"),
    ({"tools": [{"type": "namespace", "name": "n"}]}, "tools", r"tools\[0\] must be a function"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools", "letters, digits"),
    ({"tools": [TOOLS[0], TOOLS[0]]}, "tools", "occurs twice"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}]}, "tools", "object"),
    (
        {"tools": [{"type": "function", "function": {"name": "f", "strict": True, "parameters": {"not": {}}}}]},
        "tools",
        "'f': ",
    ),
    ({"tools": TOOLS, "tool_choice": "some"}, "tool_choice", "must be"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice", "no tool 'g'"),
    ({"tool_choice": "required"}, "tool_choice", "no functions"),
    ({"tool_choice": NAMED}, "tool_choice", "no functions"),
    ({"tools": [{"type": "custom", "name": "f"}], "tool_choice": "required"}, "tool_choice", "no functions"),
    ({"tools": [*TOOLS, {"type": "web_search"}], "tool_choice": {"type": "web_search"}}, "tool_choice", "must be"),
    ({"tools": TOOLS, "parallel_tool_calls": 1}, "parallel_tool_calls", "true or false"),
    ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs", "must not have tools"),
    ({"chat_template_kwargs": [1]}, "chat_template_kwargs", "must be an object"),
    ({"reasoning_effort": "much"}, "reasoning_effort", "one of"),
    ({"enable_thinking": "no"}, "enable_thinking", "true or false"),
]


async def test_wrong_fields(client: Client) -> None:
    async with client("<tool_call>", {"<|0|>": "Hello."}) as connected:
        for wrong, param, reason in WRONG:
            with pytest.raises(openai.BadRequestError, match=reason) as refused:
                await connected.chat.completions.create(
                    model="quire", messages=[{"role": "user", "content": "<|0|>"}], extra_body=wrong
                )
            assert refused.value.param == param


async def test_a_schema_that_no_grammar_can_have_is_not_enforced(client: Client) -> None:
    odd = {"type": "function", "function": {"name": "odd", "parameters": {"type": "object", "not": {}}}}
    async with client("<tool_call>", {"<|0|>": "Hello."}) as connected:
        answer = await ask(connected, "<|0|>", tools=[odd], tool_choice="auto")
        assert answer.choices[0].message.content == "Hello."


async def test_a_template_without_tool_calls(client: Client) -> None:
    """The model gets the tools and a generic syntax as text, unless --tool-call-parser is none."""
    async with client("plain", {"<|0|>": f"I look.\n{HERMES_CALLS}"}, tool_call_parser="none") as connected:
        with pytest.raises(openai.BadRequestError, match="--tool-call-parser is none"):
            await connected.chat.completions.create(
                model="quire", messages=[{"role": "user", "content": "<|0|>"}], tools=TOOLS
            )
    async with client("plain", {"<|0|>": f"I look.\n{HERMES_CALLS}"}) as connected:
        assert calls(await ask(connected, "<|0|>", tools=TOOLS)) == [("weather", PARIS), ("time", "{}")]
        named = await ask(
            connected, "<|0|>", tools=BOUNDED, tool_choice=NAMED, parallel_tool_calls=False, max_tokens=400
        )
        assert [name for name, _ in calls(named)] == ["weather"]
        none = await connected.chat.completions.create(
            model="quire", messages=[{"role": "user", "content": "<|0|>"}], tools=[]
        )
        assert none.choices[0].message.content == f"I look.\n{HERMES_CALLS}"


FLAT: Any = [{"type": "function", **tool["function"]} for tool in TOOLS]


async def respond(client: openai.AsyncOpenAI, given: Any, **options: Any) -> Any:
    """Return the response to an input, of which the stream has the same items, each begun and ended once."""
    params: Any = {"model": "quire", "input": given, "tools": FLAT, "extra_body": {"seed": 5}, **options}
    whole = await client.responses.create(**params)
    numbers = []
    begun = []
    ended = []
    called = []
    pieces = {}
    last = None
    logprobs: dict[int, list[Any]] = {}  # item -> logprobs of its deltas
    async for event in await client.responses.create(**params, stream=True):
        check(event)
        numbers.append(event.sequence_number)
        if event.type == "response.output_item.added":
            begun.append(event.output_index)
            assert not (event.item.arguments if event.item.type == "function_call" else event.item.content)
        elif event.type == "response.output_item.done":
            ended.append(event.item.model_dump())
        elif event.type.endswith(".delta"):
            pieces[event.output_index] = pieces.get(event.output_index, "") + event.delta
            logprobs.setdefault(event.output_index, []).extend(getattr(event, "logprobs", []))
        elif event.type in ("response.output_text.done", "response.reasoning_text.done"):
            assert pieces.pop(event.output_index) == event.text
            named = [each.model_dump() for each in logprobs.pop(event.output_index)]
            assert [each.model_dump() for each in getattr(event, "logprobs", [])] == named
        elif event.type == "response.function_call_arguments.done":
            assert pieces.pop(event.output_index) == event.arguments
            called.append(event.name)
        last = event
    check(whole)
    assert not pieces
    assert numbers == list(range(len(numbers)))
    assert last is not None
    shown = [without_names(item.model_dump()) for item in whole.output]
    assert [without_names(item.model_dump()) for item in last.response.output] == shown
    assert list(map(without_names, ended)) == shown
    assert begun == list(range(len(shown)))
    assert called == [item.name for item in whole.output if item.type == "function_call"]
    assert last.response.usage.output_tokens_details == whole.usage.output_tokens_details
    return whole


def without_names(item: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in item.items() if key not in ("id", "call_id")}


async def test_responses_have_an_item_for_each_part(client: Client) -> None:
    scripts = {"<|0|>": f"<think>\nHm.\n</think>\n\nI look.\n{HERMES_CALLS}", "<|1|>": "It rains.", "<|2|>": "5 < 6"}
    async with client("<tool_call></think>", scripts) as connected:
        with_logprobs = {"include": ["message.output_text.logprobs"], "top_logprobs": 1}
        shown = (await respond(connected, "Hello <|2|>", **with_logprobs)).output[0].content[0]
        assert (shown.text, "".join(each.token for each in shown.logprobs)) == ("5 < 6", "5 < 6")
        whole = await respond(connected, "Hello <|0|>")
        assert [item.type for item in whole.output] == ["reasoning", "message", "function_call", "function_call"]
        assert whole.output[0].content[0].text == "Hm."
        assert whole.output_text == "I look."
        assert [(item.name, item.arguments) for item in whole.output[2:]] == [("weather", PARIS), ("time", "{}")]
        assert whole.usage.output_tokens_details.reasoning_tokens > 0
        assert len({item.call_id for item in whole.output[2:]}) == 2
        results = [
            {"type": "function_call_output", "call_id": item.call_id, "output": text}
            for item, text in zip(whole.output[2:], ("rain", "late <|1|>"), strict=True)
        ]
        after = [{"role": "user", "content": "Hello"}, *[item.model_dump() for item in whole.output], *results]
        assert (await respond(connected, after)).output_text == "It rains."
        cut = await respond(connected, "Hello <|0|>", max_output_tokens=8)
        assert (cut.status, cut.output[-1].status) == ("incomplete", "incomplete")
        assert cut.incomplete_details.reason == "max_output_tokens"
        named = await respond(connected, "<|1|>", tool_choice={"type": "function", "name": "time"})
        assert [(item.type, item.name) for item in named.output] == [("function_call", "time")]
        stored = await connected.responses.create(model="quire", input="Hello <|0|>", tools=FLAT, store=True)
        again = await connected.responses.retrieve(stored.id)
        assert again.model_dump() == stored.model_dump()
        follow: Any = {"previous_response_id": stored.id, "input": results[1:], "tools": FLAT, "model": "quire"}
        assert (await connected.responses.create(**follow)).output_text == "It rains."
        with pytest.raises(openai.BadRequestError, match=r"input\[0\] must be a message"):
            await connected.responses.create(model="quire", input=[{"type": "computer_call"}])  # type: ignore[typeddict-item, list-item]
