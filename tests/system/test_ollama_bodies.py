"""Bodies that Ollama's API refuses: each gets an error in the API's own form, from one server."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from tests.support.http_client import HTTPClient

USER = {"role": "user", "content": "Hello"}
MODEL = {"model": "quire"}
OPTIONS = "options"
CALL = {"function": {"name": "clock", "arguments": {}}}


def says(**fields: Any) -> dict[str, Any]:
    """Return the field `messages` with one message."""
    return {"messages": [{**USER, **fields}]}


# Fields of a chat, and the beginning of the message that refuses them.
CHATS: list[tuple[dict[str, Any], str]] = [
    ({"model": None}, "model is required"),
    ({"model": ""}, "model is required"),
    ({"model": 5}, "model must be text, not 5"),
    ({"messages": "Hello"}, "messages must be a list, not 'Hello'"),
    ({"messages": ["Hello"]}, "messages[0] must be an object, not 'Hello'"),
    (says(role="developer"), "messages[0]: role must be one of system, user, assistant, tool, not 'developer'"),
    (says(role=5), "messages[0]: role must be text, not 5"),
    (says(role=None), "messages[0]: role must be one of system, user, assistant, tool, not ''"),
    (says(content=["a"]), "messages[0]: content must be text, not ['a']"),
    (says(content={"a": 1}), "messages[0]: content must be text, not {'a': 1}"),
    (says(thinking=5), "messages[0]: thinking must be text, not 5"),
    (says(images="a"), "messages[0]: images must be a list of images in base64, not 'a'"),
    (says(images=[5]), "messages[0]: images must be a list of images in base64, not [5]"),
    (says(images=["!"]), "messages[0]: content[0]: the data of image_url is not base64"),
    (says(images=["AAAA"]), "messages: this model takes no images"),
    (says(role="tool", tool_name=5), "messages[0]: tool_name must be text, not 5"),
    (says(role="assistant", tool_calls="a"), "messages[0]: tool_calls must be such as"),
    (says(role="assistant", tool_calls=["a"]), "messages[0]: tool_calls must be such as"),
    (says(role="assistant", tool_calls=[{"function": {}}]), "messages[0]: tool_calls must be such as"),
    (
        says(role="assistant", tool_calls=[{"function": {"name": "f", "arguments": "{}"}}]),
        "messages[0]: the arguments of a call must be an object, not '{}'",
    ),
    ({"tools": {}}, "tools must be a list, not {}"),
    ({"tools": ["clock"]}, "tools must be a list such as"),
    ({"tools": [{"type": "function"}]}, "tools[0]"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0]: name must be 1 to 128 letters"),
    ({"stream": "yes"}, "stream must be true or false, not 'yes'"),
    ({"format": "xml"}, "format must be \"json\" or a JSON schema, not 'xml'"),
    ({"format": ["json"]}, "format must be \"json\" or a JSON schema, not ['json']"),
    ({"think": "most"}, "think must be true, false, low or medium or high, not 'most'"),
    ({"think": 1}, "think must be true, false, low or medium or high, not 1"),
    ({"keep_alive": "soon"}, "keep_alive must be a duration such as 5m, or seconds, not 'soon'"),
    ({"keep_alive": True}, "keep_alive must be a duration such as 5m, or seconds, not True"),
    ({"keep_alive": [5]}, "keep_alive must be a duration such as 5m, or seconds, not [5]"),
    ({"logprobs": 1}, "logprobs must be true or false, not 1"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs must be between 0 and 20, not 21"),
    ({OPTIONS: [5]}, "options must be an object, not [5]"),
    ({OPTIONS: {"temperature": "hot"}}, "options.temperature must be a number, not 'hot'"),
    ({OPTIONS: {"temperature": True}}, "options.temperature must be a number, not True"),
    ({OPTIONS: {"top_p": "1"}}, "options.top_p must be a number, not '1'"),
    ({OPTIONS: {"min_p": []}}, "options.min_p must be a number, not []"),
    ({OPTIONS: {"top_k": 1.5}}, "options.top_k must be an integer, not 1.5"),
    ({OPTIONS: {"seed": "1"}}, "options.seed must be an integer, not '1'"),
    ({OPTIONS: {"num_predict": 1.5}}, "options.num_predict must be an integer, not 1.5"),
    ({OPTIONS: {"repeat_penalty": "a"}}, "options.repeat_penalty must be a number, not 'a'"),
    ({OPTIONS: {"presence_penalty": {}}}, "options.presence_penalty must be a number, not {}"),
    ({OPTIONS: {"frequency_penalty": None, "top_k": "a"}}, "options.top_k must be an integer, not 'a'"),
    ({OPTIONS: {"typical_p": 0.5}}, "options.typical_p is not supported here"),
    ({OPTIONS: {"mirostat": 1}}, "options.mirostat is not supported here"),
    ({OPTIONS: {"tfs_z": 0.5}}, "options.tfs_z is not supported here"),
]
PROMPTS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": 5}, "prompt must be text, not 5"),
    ({"prompt": ["a"]}, "prompt must be text, not ['a']"),
    ({"system": 5}, "system must be text, not 5"),
    ({"images": ["!"]}, "messages[0]: content[0]: the data of image_url is not base64"),
    ({"images": 5}, "images must be a list, not 5"),
    ({"images": [5]}, "images must be a list of images in base64, not [5]"),
    ({"raw": "yes"}, "raw must be true or false, not 'yes'"),
    ({"raw": True, "system": "a"}, "system needs a chat template, and no raw: true"),
    ({"suffix": "a"}, "suffix is not supported here"),
    ({"template": "{{ .Prompt }}"}, "template is not supported here"),
    ({"context": [1, 2]}, "context is not supported here"),
    ({"format": 5}, 'format must be "json" or a JSON schema, not 5'),
]
TEXTS: list[tuple[dict[str, Any], str]] = [
    ({}, "input is missing"),
    ({"input": 5}, "input must be text or a list of texts, not 5"),
    ({"input": [5]}, "input must be text or a list of texts, not [5]"),
    ({"input": "a", "truncate": 1}, "truncate must be true or false, not 1"),
    ({"input": "a", "dimensions": "8"}, "dimensions must be an integer, not '8'"),
    ({"input": "a", "options": 5}, "options must be an object, not 5"),
]


async def test_a_body_that_the_api_does_not_have_is_refused_in_its_form(serve: Callable[..., Awaitable[Any]]) -> None:
    system = await serve(ollama_port=0)
    client = await HTTPClient.open(system.server.ollama_address)
    cases = [("chat", {**MODEL, "messages": [USER], **fields}, message) for fields, message in CHATS]
    cases += [("generate", {**MODEL, "prompt": "Hello", **fields}, message) for fields, message in PROMPTS]
    cases += [("embed", {**MODEL, **fields}, message) for fields, message in TEXTS]
    for path, body, message in cases:
        reply = await client.ask("POST", f"/api/{path}", body)
        assert (reply.status, list(reply.json)) == (400, ["error"]), (body, reply.content)
        assert reply.json["error"].startswith(message), (body, reply.content)
    assert system.engine.requests == []
    client.writer.transport.abort()


async def test_the_model_of_a_body_with_or_without_its_tag_is_the_adapter_that_answers(
    serve: Callable[..., Awaitable[Any]],
) -> None:
    system = await serve(ollama_port=0)
    system.engine.adapters = {"sql": "sql@00", "chat:latest": "chat@11"}
    client = await HTTPClient.open(system.server.ollama_address)
    for name in ("quire", "sql", "sql:latest", "chat:latest"):
        reply = await client.ask("POST", "/api/chat", {"model": name, "messages": [USER], "stream": False})
        assert (reply.status, reply.json["model"]) == (200, name)
        reply = await client.ask("POST", "/api/generate", {"model": name, "prompt": "Hello", "stream": False})
        assert (reply.status, reply.json["model"]) == (200, name)
    names = ["", "", "sql", "sql", "sql", "sql", "chat:latest", "chat:latest"]
    assert [request.lora for request in system.engine.requests] == names
    reply = await client.ask("POST", "/api/chat", {"model": "chat", "messages": [USER]})
    assert reply.status == 404
    shown = [(await client.ask("POST", "/api/show", {"model": name})).json for name in ("quire", "sql", "chat:latest")]
    assert [each["capabilities"] for each in shown] == [["completion"]] * 3
    client.writer.transport.abort()


async def test_each_kind_of_error_has_its_status(serve: Callable[..., Awaitable[Any]]) -> None:
    system = await serve(ollama_port=0, token="secret")
    key = {"authorization": "Bearer secret"}
    body: dict[str, Any] = {**MODEL, "messages": [USER]}

    async def status(path: str = "/api/chat", method: str = "POST", given: object = body, headers: Any = key) -> int:
        client = await HTTPClient.open(system.server.ollama_address)
        reply = await client.ask(method, path, given, headers)
        client.writer.transport.abort()
        assert list(reply.json) == ["error"]
        return reply.status

    assert await status(headers={}) == 401
    assert await status(given={**body, "model": "other"}) == 404
    assert await status("/api/blobs/sha256:1") == 404
    assert await status("/api/create") == 403
    assert await status("/api/delete", "DELETE") == 403
    assert await status("/api/chat", "GET", None) == 405
    assert await status(given={**body, "messages": [{**USER, "content": "full"}]}) == 429
    assert await status(given={**body, "messages": [{**USER, "content": "bug"}]}) == 500
    assert await status(given=b"{") == 400
    client = await HTTPClient.open(system.server.ollama_address)
    assert (await client.ask("GET", "/")).content == b"Ollama is running"
    assert (await client.ask("GET", "/api/version")).json["version"].startswith("0.12.6+quire.")
    client.writer.transport.abort()


async def test_a_body_may_have_any_type_unless_a_browser_sends_it(serve: Callable[..., Awaitable[Any]]) -> None:
    """curl sends a form's type without a flag; a browser could send this type to another site, but names itself."""
    system = await serve(ollama_port=0)
    client = await HTTPClient.open(system.server.ollama_address)
    body = {**MODEL, "messages": [USER], "stream": False, "options": {"num_predict": 2}, "unknown": 1}
    form = {"content-type": "application/x-www-form-urlencoded"}
    assert (await client.ask("POST", "/api/chat", body, form)).json["message"]["content"] == " Hello:0é日"
    refused = await client.ask("POST", "/api/chat", body, {**form, "origin": "https://a.example"})
    assert (refused.status, list(refused.json)) == (415, ["error"])
    client.writer.transport.abort()


async def test_the_error_of_a_stream_is_its_last_line(serve: Callable[..., Awaitable[Any]]) -> None:
    system = await serve(ollama_port=0)
    client = await HTTPClient.open(system.server.ollama_address)
    reply = await client.ask("POST", "/api/chat", {**MODEL, "messages": [{**USER, "content": "fail"}]})
    assert reply.headers["content-type"] == "application/x-ndjson"
    assert reply.content.splitlines()[-1] == b'{"error":"the logits are NaN"}'
    client.writer.transport.abort()


async def test_the_port_has_the_other_apis_too_and_is_off_by_default(serve: Callable[..., Awaitable[Any]]) -> None:
    system = await serve(ollama_port=0)
    client = await HTTPClient.open(system.server.ollama_address)
    chat = {"messages": [USER], "max_tokens": 2}
    assert (await client.ask("POST", "/v1/chat/completions", chat)).json["object"] == "chat.completion"
    assert (await client.ask("POST", "/v1/messages", {**MODEL, **chat})).json["type"] == "message"
    client.writer.transport.abort()
    assert (await serve()).server.ollama_address == ""
