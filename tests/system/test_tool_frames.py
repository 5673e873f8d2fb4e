"""Tool calls and reasoning over the protocol: the same as over HTTP, from models that generate a given script."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from quire import AsyncClient, ChatOptions, InvalidRequest, RequestOutput, SamplingParams, ToolCall, ToolChoice

from tests.support.http_client import HTTPClient
from tests.support.scripted_model import write_scripted_model

from .test_tool_calls import BOUNDED, HERMES_CALLS, PARIS, TEMPLATE, TOOLS

MARKERS = ["<tool_call>", "</tool_call>", "<think>", "</think>"]
SCRIPT = f"<think>\nIs it warm?\n</think>\n\nI look.\n{HERMES_CALLS}"
CALLS = (ToolCall(name="weather", arguments=PARIS), ToolCall(name="time", arguments="{}"))
MESSAGES = [{"role": "user", "content": "Hello <|0|>"}]
LONG = SamplingParams(max_tokens=300, seed=5)

Served = Callable[..., AbstractAsyncContextManager[tuple[AsyncClient, str]]]


@pytest.fixture
def served(serving: Callable[..., Any], tmp_path: Path) -> Served:
    """Serve a scripted model: `async with served() as (client, http_address)`."""

    @asynccontextmanager
    async def start(script: str = SCRIPT) -> AsyncIterator[tuple[AsyncClient, str]]:
        template = f"{{# <tool_call> <think> </think> #}}{TEMPLATE}"
        model = write_scripted_model(tmp_path / "model", {"<|0|>": script}, template=template, added=MARKERS)
        async with serving(model=str(model)) as real, AsyncClient(real.server.address) as client:
            yield client, real.server.openai_address

    return start


async def ask(client: AsyncClient, params: SamplingParams = LONG, **chat: Any) -> RequestOutput:
    return await client.complete(None, params, messages=MESSAGES, chat=ChatOptions(**chat))


async def test_reasoning_text_and_calls_come_apart(served: Served) -> None:
    async with served() as (client, _):
        output = (await ask(client, tools=TOOLS)).outputs[0]
        assert (output.reasoning, output.text, output.tool_calls) == ("Is it warm?", "I look.", CALLS)
        assert output.finish_reason == "stop"
        plain = await client.complete(None, LONG, messages=MESSAGES)
        assert (plain.text, plain.outputs[0].tool_calls) == (SCRIPT, ())
        assert plain.token_ids == output.token_ids


async def test_each_output_is_read_apart_and_in_every_form(served: Served) -> None:
    async with served() as (client, _):
        for extra in ({"n": 3}, {"n": 2, "best_of": 3, "temperature": 0.1}):
            outputs = (await ask(client, SamplingParams(max_tokens=300, seed=5, **extra), tools=TOOLS)).outputs
            assert {(each.reasoning, each.text, each.tool_calls) for each in outputs} == {
                ("Is it warm?", "I look.", CALLS)
            }


async def test_no_markup_is_shown_wherever_the_output_ends(served: Served) -> None:
    async with served() as (client, _):
        num_tokens = len((await ask(client, tools=TOOLS)).token_ids)
        for max_tokens in range(1, num_tokens):
            output = (await ask(client, SamplingParams(max_tokens=max_tokens), tools=TOOLS)).outputs[0]
            assert "Is it warm?\n".startswith(output.reasoning)
            assert "I look.\n".startswith(output.text)
            assert [call.name for call in output.tool_calls] == ["weather", "time"][: len(output.tool_calls)]


async def test_a_required_call_is_what_comes(served: Served) -> None:
    async with served("I look.") as (client, _):
        choice = ToolChoice(needed="required", names=("weather",), parallel=False)
        (call,) = (await ask(client, tools=BOUNDED, tool_choice=choice)).outputs[0].tool_calls
        assert call.name == "weather"
        assert json.loads(call.arguments)["city"] in ("Paris", "Rome")


async def test_a_kept_stream_is_replayed_with_its_calls(served: Served) -> None:
    async with served() as (client, _):
        keyed: Any = {"messages": MESSAGES, "chat": ChatOptions(tools=TOOLS), "idempotency_key": "one"}
        first = await client.complete(None, LONG, **keyed, resumable=True)
        assert first.outputs[0].tool_calls == CALLS
        assert (await client.complete(None, LONG, **keyed)).outputs == first.outputs
        with pytest.raises(InvalidRequest, match="idempotency key"):
            await client.complete(None, LONG, messages=MESSAGES, chat=ChatOptions(), idempotency_key="one")


@pytest.mark.parametrize(
    ("chat", "match"),
    [
        ({"tools": ['{"type": "function"']}, "each must be the JSON text of a tool"),
        ({"tools": ["[" * 100_000]}, "each must be the JSON text of a tool"),
        ({"tools": ["1"]}, "tools must be a list such as"),
        ({"tools": [*TOOLS, TOOLS[0]]}, "'weather' occurs twice"),
        ({"tools": [" " * (1 << 18), "1"]}, "at most 262144"),
        ({"tools": TOOLS, "tool_choice": ToolChoice(names=("nothing",))}, "there is no tool 'nothing'"),
        ({"tool_choice": ToolChoice(needed="required")}, "tools has no functions"),
    ],
    ids=lambda value: str(value)[:30],
)
async def test_options_that_do_not_fit_are_refused(served: Served, chat: Any, match: str) -> None:
    async with served() as (client, _):
        with pytest.raises(InvalidRequest, match=match):
            await ask(client, **chat)
        with pytest.raises(InvalidRequest, match="chat needs messages"):
            await client.complete("Hello", chat=ChatOptions())
        with pytest.raises(InvalidRequest, match="chat must be a ChatOptions"):
            client.generate(messages=MESSAGES, chat={"tools": TOOLS})  # type: ignore[typeddict-item]


async def test_tokenize_counts_the_tools_of_a_chat(served: Served) -> None:
    async with served() as (_, address):
        http = await HTTPClient.open(address)
        asked: Any = {"messages": MESSAGES, "tools": TOOLS, "chat_template_kwargs": {"end": "more"}}
        count = (await http.ask("POST", "/tokenize", asked)).json["count"]
        answer = (await http.ask("POST", "/v1/chat/completions", {**asked, "max_tokens": 1})).json
        assert count == answer["usage"]["prompt_tokens"]
        assert count > (await http.ask("POST", "/tokenize", {"messages": MESSAGES})).json["count"]
        refused = await http.ask("POST", "/tokenize", {"messages": MESSAGES, "tools": 3})
        assert (refused.status, refused.json["error"]["param"]) == (400, "tools")
        http.writer.close()
