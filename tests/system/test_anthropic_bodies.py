"""Bodies that Anthropic's API refuses: each gets a typed error in the API's own form, from one server."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from tests.support.http_client import connection

PATH = "/v1/messages"
HEADERS = {"anthropic-version": "2023-06-01"}
USER = {"role": "user", "content": "Hello"}
BODY: dict[str, Any] = {"model": "quire", "max_tokens": 4, "messages": [USER]}
TOOL = {"name": "clock", "input_schema": {"type": "object"}}
CALL = {"type": "tool_use", "id": "a", "name": "clock", "input": {}}
INVALID = "invalid_request_error"


def says(*content: Any, role: str = "user") -> dict[str, Any]:
    """Return the field `messages` with one message of blocks."""
    return {"messages": [{"role": role, "content": list(content)}, USER]}


FAILED: dict[str, Any] = {"type": "tool_result", "tool_use_id": "a", "is_error": 1}
AFTER_CALL = [{"role": "assistant", "content": [CALL]}, {"role": "user", "content": [FAILED]}]
# Fields, and the beginning of the message that refuses them.
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"foo": 1}, "foo: Extra inputs are not permitted"),
    ({"seed": 1}, "seed: Extra inputs are not permitted"),
    ({"container": "a"}, "container is not supported here"),
    ({"mcp_servers": [{}]}, "mcp_servers is not supported here"),
    ({"max_tokens": 0}, "max_tokens must be at least 1, not 0"),
    ({"max_tokens": -5}, "max_tokens must be at least 1, not -5"),
    ({"max_tokens": "4"}, "max_tokens must be an integer, not '4'"),
    ({"max_tokens": True}, "max_tokens must be an integer, not True"),
    ({"max_tokens": None}, "max_tokens is missing"),
    ({"model": 1}, "model must be text, not 1"),
    ({"model": None}, "model is missing"),
    ({"messages": None}, "messages is missing"),
    ({"messages": []}, "messages must be a list of at least one message, not []"),
    ({"messages": "Hello"}, "messages must be a list of at least one message, not 'Hello'"),
    ({"messages": ["Hello"]}, "messages.0 must be such as"),
    ({"messages": [{"role": "user"}]}, "messages.0.content must be text or a list of at least one block, not None"),
    ({"messages": [{"role": "user", "content": []}]}, "messages.0.content must be text or a list of at least one"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content must be text or a list of at least one"),
    ({"messages": [{"role": "tool", "content": "a"}]}, "messages.0.role must be user, assistant or system, not 'tool'"),
    ({"messages": [{"role": ["user"], "content": "a"}]}, "messages.0.role must be user, assistant or system"),
    ({"messages": [{**USER, "name": "a"}]}, "messages.0.name: Extra inputs are not permitted"),
    ({"messages": [USER, {"role": "assistant", "content": "Hel"}]}, "messages: the last message is the assistant's"),
    (says("Hello"), "messages.0.content.0 must be a block such as"),
    (says({"text": "Hello"}), "messages.0.content.0 must be a block such as"),
    (says({"type": 5}), "messages.0.content.0 must be a block such as"),
    (says({"type": "audio"}), "messages.0.content.0: a block of type 'audio' is not supported here"),
    (says({"type": "server_tool_use"}, role="assistant"), "messages.0.content.0: a block of type 'server_tool_use'"),
    (says({"type": "thinking", "thinking": "a"}), "messages.0.content.0: a block of type 'thinking'"),
    (says({"type": "text"}), "messages.0.content.0.text must be text, not None"),
    (says({"type": "text", "text": 5}), "messages.0.content.0.text must be text, not 5"),
    (says({"type": "text", "text": "a", "b": 1}), "messages.0.content.0.b: Extra inputs are not permitted"),
    (says({"type": "image", "source": "a"}), "messages.0.content.0.source must be an object, not 'a'"),
    (says({"type": "image", "source": {"type": "file", "file_id": "a"}}), "messages.0.content.0.source must be base64"),
    (
        says({"type": "image", "source": {"type": "base64", "media_type": "image/tiff", "data": ""}}),
        "messages.0.content.0.source must be base64 data with a media_type of image/jpeg,",
    ),
    (
        says({"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "!"}}),
        "messages.0: content[0]: the data of image_url is not base64",
    ),
    (
        says({"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}),
        "messages: this model takes no images",
    ),
    (
        says({"type": "image", "source": {"type": "url", "url": "https://a.example/b.png"}}),
        "messages.0: content[0]: image_url must be a data URL",
    ),
    (
        says({"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": ""}}),
        "messages.0.content.0.source: documents are text here",
    ),
    (
        says({"type": "tool_result", "tool_use_id": "a", "content": "b"}),
        "messages.0.content.0: unexpected `tool_use_id` found in `tool_result` blocks: 'a'",
    ),
    (says({"type": "tool_result"}), "messages.0.content.0.tool_use_id must be text, not None"),
    (says({**CALL, "input": "{}"}, role="assistant"), "messages.0.content.0.input must be an object, not '{}'"),
    (says({**CALL, "id": 1}, role="assistant"), "messages.0.content.0.id must be text, not 1"),
    ({"messages": AFTER_CALL}, "messages.1.content.0.is_error must be true or false, not 1"),
    ({"system": 5}, "system must be text or a list of at least one block, not 5"),
    ({"system": [{"type": "image", "source": {}}]}, "system.0: a block of type 'image' is not supported here"),
    ({"tools": {}}, "tools must be a list, not {}"),
    ({"tools": ["clock"]}, "tools.0 must be an object, not 'clock'"),
    ({"tools": [{"name": "clock"}]}, "tools.0.input_schema must be a JSON schema, not None"),
    (
        {"tools": [{**TOOL, "input_schema": {"type": "array"}}]},
        "tools.0: parameters must be the JSON schema of",
    ),
    ({"tools": [{**TOOL, "name": "a b"}]}, "tools.0: name must be 1 to 128 letters"),
    ({"tools": [{**TOOL, "parameters": {}}]}, "tools.0.parameters: Extra inputs are not permitted"),
    ({"tools": [{**TOOL, "type": 5}]}, "tools.0.type must be text, not 5"),
    ({"tool_choice": "any"}, "tool_choice must be an object, not 'any'"),
    ({"tool_choice": {"type": "required"}}, "tool_choice.type must be one of auto, any, tool, none, not 'required'"),
    ({"tool_choice": {"type": "tool"}}, "tool_choice.name must be text, not None"),
    ({"tool_choice": {"type": "auto", "name": "a"}}, "tool_choice.name: Extra inputs are not permitted"),
    ({"tool_choice": {"type": "any", "disable_parallel_tool_use": 1}}, "tool_choice.disable_parallel_tool_use must be"),
    ({"thinking": True}, "thinking must be an object, not True"),
    ({"thinking": {"type": "on"}}, "thinking.type must be one of enabled, adaptive, between_tools, disabled, not 'on'"),
    ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens must be an integer of at least 1024, not None"),
    ({"thinking": {"type": "enabled", "budget_tokens": 5}}, "thinking.budget_tokens must be an integer of at least"),
    (
        {"thinking": {"type": "enabled", "budget_tokens": 2000}},
        "max_tokens must be greater than thinking.budget",
    ),
    ({"thinking": {"type": "disabled", "budget_tokens": 1}}, "thinking.budget_tokens: Extra inputs are not permitted"),
    ({"output_config": {"effort": "most"}}, "output_config.effort must be one of low, medium, high, xhigh, max"),
    ({"output_config": {"format": {"type": "json_object"}}}, "output_config.format must be"),
    ({"output_config": {"verbosity": 1}}, "output_config.verbosity: Extra inputs are not permitted"),
    ({"cache_control": {"type": "forever"}}, 'cache_control must be {"type": "ephemeral"}'),
    ({"cache_control": {"type": "ephemeral", "ttl": "2h"}}, "cache_control.ttl must be 5m or 1h, not '2h'"),
    (
        says(*[{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}] * 5),
        "messages.0.content.4.cache_control: at most 4 blocks may have cache_control",
    ),
    ({"metadata": {"user_id": 5}}, "metadata.user_id must be text, not 5"),
    ({"metadata": {"other": "a"}}, "metadata.other: Extra inputs are not permitted"),
    ({"stop_sequences": "a"}, "stop_sequences must be a list, not 'a'"),
    ({"stop_sequences": [5]}, "stop_sequences must be a list of texts, not [5]"),
    ({"stream": "yes"}, "stream must be true or false, not 'yes'"),
]


async def test_a_body_that_the_api_does_not_have_is_refused_in_its_form(
    serve: Callable[..., Awaitable[Any]],
) -> None:
    system = await serve()
    async with connection(system) as client:
        for fields, message in REFUSED:
            reply = await client.ask("POST", PATH, {**BODY, **fields}, HEADERS)
            error = reply.json["error"]
            assert (reply.status, error["type"], reply.json["type"]) == (400, INVALID, "error"), (fields, error)
            assert error["message"].startswith(message), (fields, error)
            assert reply.json["request_id"] == reply.headers["request-id"]
            assert reply.headers["x-should-retry"] == "false"
    assert system.engine.requests == []


async def test_each_kind_of_error_has_its_status_and_type(serve: Callable[..., Awaitable[Any]]) -> None:
    system = await serve(token="secret")
    key = {**HEADERS, "x-api-key": "secret"}

    async def answer(method: str = "POST", path: str = PATH, body: object = BODY, headers: Any = key) -> Any:
        async with connection(system) as client:
            reply = await client.ask(method, path, body, headers)
        return reply.status, reply.json["error"]["type"]

    full = {**BODY, "messages": [{"role": "user", "content": "full"}]}
    assert await answer(headers=HEADERS) == (401, "authentication_error")
    assert await answer(headers={**HEADERS, "x-api-key": "other"}) == (401, "authentication_error")
    assert await answer(body={**BODY, "model": "other"}) == (404, "not_found_error")
    assert await answer(path=f"{PATH}/batches") == (404, "not_found_error")
    assert await answer("GET") == (405, INVALID)
    assert await answer(headers={**key, "content-type": "text/plain"}) == (415, INVALID)
    assert await answer(body=full) == (429, "rate_limit_error")
    assert await answer(body=b'{"model": ') == (400, INVALID)
    assert await answer(body={**BODY, "messages": [{"role": "user", "content": "bug"}]}) == (500, "api_error")
    assert await answer(headers={**key, "content-length": str(1 << 30)}) == (413, "request_too_large")


async def test_a_list_of_models_ignores_parameters_however_many(serve: Callable[..., Awaitable[Any]]) -> None:
    async with connection(await serve()) as client:
        reply = await client.ask("GET", f"/v1/models?{'a=1&' * 1001}limit=1", None, HEADERS)
    assert (reply.status, [each["id"] for each in reply.json["data"]]) == (200, ["quire"])


async def test_the_error_of_a_stream_is_its_last_event(serve: Callable[..., Awaitable[Any]]) -> None:
    system = await serve()
    body = {**BODY, "max_tokens": 8, "stream": True, "messages": [{"role": "user", "content": "fail"}]}
    async with connection(system) as client:
        reply = await client.ask("POST", PATH, body)
    *_, last = reply.content.split(b"event: ")
    error = b'data: {"type":"error","error":{"type":"api_error","message":"the logits are NaN"},"request_id":"'
    assert last.split(b"\n")[0] == b"error"
    assert last.split(b"\n")[1].startswith(error)


async def test_the_openai_api_answers_its_own_paths_whatever_the_header(serve: Callable[..., Awaitable[Any]]) -> None:
    system = await serve()
    async with connection(system) as client:
        chat = {"messages": [USER], "max_tokens": 2}
        assert (await client.ask("POST", "/v1/chat/completions", chat, HEADERS)).json["object"] == "chat.completion"
        assert (await client.ask("GET", "/v1/models")).json["object"] == "list"
        assert (await client.ask("GET", "/v1/models", headers=HEADERS)).json["has_more"] is False
