"""Bodies of coding agents: tools, items and hints that only other servers have, and callable functions."""

from __future__ import annotations

import itertools
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from tests.support.http_client import Reply, connection
from tests.support.scripted_model import write_scripted_model

CHAT = "/v1/chat/completions"
RESPONSES = "/v1/responses"
SCHEMA = {"type": "object", "properties": {"command": {"enum": ["ls", "pwd"]}}, "required": ["command"]}
FLAT = {"type": "function", "name": "shell", "description": "Run.", "parameters": SCHEMA}
NESTED = {"type": "function", "function": {"name": "shell", "description": "Run.", "parameters": SCHEMA}}
CUSTOM = {"type": "custom", "name": "apply_patch", "description": "d", "format": {"type": "grammar", "syntax": "lark"}}
LS = '{"command": "ls"}'
SCRIPTS = {
    "<|0|>": f'<tool_call>\n{{"name": "shell", "arguments": {LS}}}\n</tool_call>',
    "<|1|>": f'<tool_call>\n{{"name": "mcp__x__shell", "arguments": {LS}}}\n</tool_call>',
    "<|2|>": "Done.",
}
# The prompt shows the template's input; its end decides the model's answer.
TEMPLATE = (
    "{# <tool_call> #}{{ tools | tojson if tools }}{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{{ m.tool_calls | tojson if m.tool_calls }}{% endfor %}"
)


@pytest.fixture
async def real(serving: Callable[..., AbstractAsyncContextManager[Any]], tmp_path: Path) -> AsyncIterator[Any]:
    model = write_scripted_model(tmp_path / "model", SCRIPTS, template=TEMPLATE + "{{ end }}")
    async with serving(model=str(model)) as real:
        yield real


async def ask(system: Any, path: str, body: object) -> Reply:
    async with connection(system) as client:
        return await client.ask("POST", path, body)


def user(script: str) -> dict[str, Any]:
    return {"type": "message", "role": "user", "content": [{"type": "input_text", "text": f"List files {script}"}]}


async def respond(real: Any, script: str = "<|0|>", **fields: Any) -> Reply:
    body = {"model": "quire", "input": [user(script)], "store": False, "parallel_tool_calls": False, "tools": [FLAT]}
    return await ask(real, RESPONSES, {**body, "tool_choice": "auto", **fields})


HOSTED = [
    {"type": "web_search", "external_web_access": False},
    {"type": "web_search_preview_2025_03_11"},
    {"type": "file_search", "vector_store_ids": ["a"]},
    {"type": "code_interpreter", "container": {"type": "auto"}},
    {"type": "image_generation"},
    {"type": "local_shell"},
    {"type": "mcp", "server_label": "a", "server_url": "https://a.example"},
    {"type": "custom", "custom": {"name": "patch"}},
    CUSTOM,
]


async def test_tools_of_other_servers_are_left_out(real: Any) -> None:
    for tool in HOSTED:
        reply = await respond(real, tools=[tool, FLAT])
        (item,) = reply.json["output"]
        assert (item["type"], item["name"], item["arguments"]) == ("function_call", "shell", LS)
        assert reply.json["tools"] == [tool, FLAT]
        messages = [{"role": "user", "content": "List files <|0|>"}]
        chats = [
            (await ask(real, CHAT, {"messages": messages, "tools": tools})).json for tools in ([NESTED, tool], [NESTED])
        ]
        (call,) = chats[0]["choices"][0]["message"]["tool_calls"]
        assert call["function"] == {"name": "shell", "arguments": LS}
        assert chats[0]["usage"]["prompt_tokens"] == chats[1]["usage"]["prompt_tokens"]
        assert (await respond(real, "<|2|>", tools=[tool])).json["output"][0]["content"][0]["text"] == "Done."


async def test_functions_may_be_flat_or_nested_on_every_path(real: Any) -> None:
    forms = [FLAT, NESTED, {"name": "shell", "parameters": SCHEMA}, {"function": FLAT}]
    for path, tool in itertools.product((CHAT, RESPONSES), forms):
        prompt: Any = {"messages": [{"role": "user", "content": "<|0|>"}]} if path == CHAT else {"input": "<|0|>"}
        reply = await ask(real, path, {**prompt, "tools": [tool]})
        text = json.dumps(reply.json)
        assert (reply.status, '"name": "shell"' in text, json.dumps(LS) in text) == (200, True, True)


CHOICES: list[tuple[dict[str, Any], bool]] = [
    ({"type": "auto"}, False),
    ({"type": "none"}, False),
    ({"type": "required"}, True),
    ({"type": "function", "name": "shell"}, True),
    ({"type": "function", "function": {"name": "shell"}}, True),
    ({"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "shell"}]}, True),
    ({"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NESTED, {"type": "mcp"}]}}, True),
    ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "web_search"}]}, False),
]


async def test_a_tool_choice_has_the_same_forms_on_every_path(real: Any) -> None:
    for path, (choice, calls) in itertools.product((CHAT, RESPONSES), CHOICES):
        prompt: Any = {"messages": [{"role": "user", "content": "<|2|>"}]} if path == CHAT else {"input": "<|2|>"}
        reply = await ask(real, path, {**prompt, "tools": [FLAT], "tool_choice": choice, "parallel_tool_calls": False})
        assert (reply.status, "shell" in json.dumps(reply.json.get("choices", reply.json.get("output")))) == (
            200,
            calls,
        )


async def test_functions_of_a_namespace_are_called_under_it(real: Any) -> None:
    tools = [{"type": "namespace", "name": "mcp__x", "description": "", "tools": [FLAT, CUSTOM]}, FLAT]
    item = (await respond(real, "<|1|>", tools=tools)).json["output"][0]
    assert (item["name"], item["namespace"], item["arguments"]) == ("shell", "mcp__x", LS)
    stream = (await respond(real, "<|1|>", tools=tools, stream=True)).content.decode()
    events = [json.loads(line[6:]) for line in stream.split("\n") if line.startswith("data: ")]
    done = next(event for event in events if event["type"] == "response.function_call_arguments.done")
    assert (done["name"], done["arguments"]) == ("shell", LS)
    assert [event["item"]["namespace"] for event in events if "item" in event] == ["mcp__x", "mcp__x"]
    named = {"type": "function", "name": "shell", "namespace": "mcp__x"}
    chosen = (await respond(real, "<|2|>", tools=tools, tool_choice=named)).json["output"][0]
    assert (chosen["name"], chosen["namespace"]) == ("shell", "mcp__x")
    plain = (await respond(real, "<|0|>", tools=tools)).json["output"][0]
    assert (plain["name"], "namespace" in plain) == ("shell", False)


async def test_a_choice_needs_a_tool_that_is_here(real: Any) -> None:
    for mode, status in (("auto", 200), ("required", 400)):
        choice = {"type": "allowed_tools", "mode": mode, "tools": [{"type": "web_search"}]}
        reply = await respond(real, "<|2|>", tool_choice=choice)
        assert (reply.status, "tool_choice must be" in reply.content.decode()) == (status, mode == "required")
    for choice in ("required", {"type": "custom", "name": "apply_patch"}, {"type": "function", "name": "apply_patch"}):
        reply = await respond(real, "<|2|>", tools=[CUSTOM], tool_choice=choice)
        assert (reply.status, reply.error["param"]) == (400, "tool_choice")


CALL = {"call_id": "c", "id": "i", "status": "completed"}
ITEMS: list[tuple[list[dict[str, Any]], str]] = [
    (
        [
            {**CALL, "type": "custom_tool_call", "name": "apply_patch", "input": "x"},
            {"type": "custom_tool_call_output", "call_id": "c", "output": "ok"},
        ],
        '[{"name": "apply_patch", "arguments": {"input": "x"}}] ok',
    ),
    (
        [
            {**CALL, "type": "local_shell_call", "action": {"type": "exec", "command": ["ls"]}},
            {"type": "local_shell_call_output", "id": "c", "output": "a.txt"},
        ],
        '[{"name": "local_shell", "arguments": {"action": {"type": "exec", "command": ["ls"]}}}] a.txt',
    ),
    (
        [
            {**CALL, "type": "shell_call", "action": {"commands": ["ls"]}},
            {"type": "shell_call_output", "call_id": "c", "output": [{"stdout": "a", "stderr": ""}]},
        ],
        '[{"name": "shell", "arguments": {"action": {"commands": ["ls"]}}}] [{"stdout":"a","stderr":""}]',
    ),
    (
        [
            {**CALL, "type": "function_call", "name": "shell", "namespace": "mcp__x__", "arguments": LS},
            {"type": "function_call_output", "call_id": "c", "output": "ok"},
        ],
        f'[{{"name": "mcp__x__shell", "arguments": {LS}}}] ok',
    ),
    ([{"type": "item_reference", "id": "msg_1"}], ""),
    ([{"id": "msg_1"}], ""),
    ([{"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search"}}], ""),
    ([{"type": "reasoning", "id": "rs_1", "summary": [], "content": None, "encrypted_content": "x"}], ""),
]


async def test_items_of_other_tools_reach_the_template_or_are_left_out(real: Any) -> None:
    for items, shown in ITEMS:
        body = {"model": "quire", "input": [user(""), *items, user("<|2|>")], "tools": [FLAT]}
        reply = await ask(real, RESPONSES, body)
        assert (reply.status, reply.json.get("output", [{}])[0].get("type")) == (200, "message")
        messages: list[dict[str, Any]] = [{"role": "user", "content": "List files "}]
        if shown:
            calls, _, output = shown.partition("] ")
            (call,) = json.loads(calls + "]")
            function = {**call, "arguments": json.dumps(call["arguments"])}
            messages += [
                {"role": "assistant", "tool_calls": [{"id": "c", "type": "function", "function": function}]},
                {"role": "tool", "tool_call_id": "c", "content": output},
            ]
        chat = {"messages": [*messages, {"role": "user", "content": "List files <|2|>"}], "tools": [NESTED]}
        assert reply.json["usage"]["input_tokens"] == (await ask(real, CHAT, chat)).json["usage"]["prompt_tokens"]


WRONG_ITEMS: list[tuple[dict[str, Any], str]] = [
    ({"type": "computer_call"}, "input[1] must be a message, a call, the output of a call or a reasoning item"),
    ({"type": ["message"]}, "input[1] must be a message"),
    ({"type": "custom_tool_call", "call_id": "c", "name": "f", "input": {}}, "input[1]: input must be text"),
    ({"type": "shell_call", "call_id": "c", "action": "ls"}, "input[1]: action must be an object"),
    ({"type": "custom_tool_call_output", "call_id": 5, "output": "x"}, "input[1]: call_id must be text"),
]


async def test_a_wrong_item_is_named(real: Any) -> None:
    for item, reason in WRONG_ITEMS:
        reply = await ask(real, RESPONSES, {"input": [user(""), item]})
        assert (reply.status, reply.error["param"], reply.error["message"].startswith(reason)) == (400, "input", True)


HINTS: list[dict[str, Any]] = [
    {"include": ["reasoning.encrypted_content"]},
    {"include": ["web_search_call.action.sources", "code_interpreter_call.outputs"]},
    {"reasoning": {"effort": "medium", "summary": "auto"}},
    {"reasoning": {"effort": "none"}},
    {"reasoning": {"effort": None, "summary": None}},
    {"reasoning": {"effort": "high", "generate_summary": "concise"}},
    {"text": {"verbosity": "low"}},
    {"text": {"verbosity": "high", "format": {"type": "text"}}},
]


async def test_hints_that_mean_nothing_to_the_model_change_nothing(real: Any) -> None:
    for fields in HINTS:
        plain = (await respond(real)).json
        hinted = (await respond(real, **fields)).json
        assert hinted["output"][0]["arguments"] == plain["output"][0]["arguments"] == LS
        assert hinted["usage"]["input_tokens"] == plain["usage"]["input_tokens"]


async def test_a_chat_may_hint_at_effort_and_verbosity(real: Any) -> None:
    for effort in ("none", "minimal", "low", "high"):
        body = {"messages": [{"role": "user", "content": "<|2|>"}], "reasoning_effort": effort, "verbosity": "low"}
        assert (await ask(real, CHAT, body)).json["choices"][0]["message"]["content"] == "Done."
    wrong = await ask(real, CHAT, {**body, "verbosity": "brief"})
    assert (wrong.status, wrong.error["param"]) == (400, "verbosity")


REFUSAL = {"type": "refusal", "refusal": "I cannot."}


async def test_a_refusal_in_an_earlier_answer_is_its_text(real: Any) -> None:
    counts = []
    for content in ([REFUSAL], "I cannot.", [{"type": "text", "text": "I cannot."}]):
        answers = [{"role": "user", "content": "a"}, {"role": "assistant", "content": content}]
        chat = await ask(real, CHAT, {"messages": [*answers, {"role": "user", "content": "<|2|>"}]})
        counts.append(chat.json["usage"]["prompt_tokens"])
    assert len(set(counts)) == 1
    for wrong in ({"role": "user", "content": [REFUSAL]}, {"role": "assistant", "content": [{"type": "refusal"}]}):
        reply = await ask(real, CHAT, {"messages": [wrong, {"role": "user", "content": "<|2|>"}]})
        assert (reply.status, "messages[0]: content[0]" in reply.error["message"]) == (400, True)
    items = [user(""), {"type": "message", "role": "assistant", "content": [REFUSAL]}, user("<|2|>")]
    stored = await ask(real, RESPONSES, {"input": items, "store": True})
    assert stored.json["usage"]["input_tokens"] > 0
    async with connection(real) as client:
        listed = (await client.ask("GET", f"{RESPONSES}/{stored.json['id']}/input_items?order=asc")).json["data"]
    assert listed[1]["content"] == [REFUSAL]
