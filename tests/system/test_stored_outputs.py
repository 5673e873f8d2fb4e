"""Stored responses and chats and idempotency keys over HTTP: what is resumed and replayed has the same bytes."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from quire.runtime.server.http import calls
from quire.runtime.server.openai import stored
from quire.runtime.server.requests import output_log

from tests.support.http_client import Reply, connection
from tests.support.scripted_model import write_scripted_model

Serve = Callable[..., Awaitable[Any]]
Eventually = Callable[[Callable[[], bool]], Awaitable[None]]

CHAT = "/v1/chat/completions"
RESPONSES = "/v1/responses"
WHERE = '{"city": "Paris"}'
WEATHER = {"input": "<|0|>", "tools": [{"type": "function", "name": "weather", "parameters": None}], "store": True}
OTHER_REQUEST = "this idempotency key was used for another request; take a fresh key"


async def ask(system: Any, method: str, path: str, body: object = None, **headers: str) -> Reply:
    async with connection(system) as client:
        return await client.ask(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})


def response(text: object = "a", **fields: Any) -> dict[str, Any]:
    return {"input": text, "max_output_tokens": 6, "store": True, **fields}


def chat(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "b"}], "max_tokens": 6, **fields}


def events(reply: Reply) -> list[bytes]:
    """Return the events of a stream as they were sent."""
    assert reply.status == 200, reply
    return reply.content.removeprefix(b":\n").split(b"\n\n")[:-1]


def as_json(reply: Reply) -> list[Any]:
    """Return the data of the events of a stream."""
    return [json.loads(event.partition(b"data: ")[2]) for event in events(reply) if b"data: {" in event]


async def stored_id(system: Any, path: str, body: dict[str, Any]) -> str:
    reply = await ask(system, "POST", path, body)
    assert reply.status == 200, reply
    identity: str = reply.json["id"]
    return identity


def write_weather_model(folder: Path) -> str:
    """Write a model that asks for the weather in Paris after `<|0|>`, and says that it is sunny after `<|1|>`."""
    call = f'<tool_call>\n{{"name": "weather", "arguments": {WHERE}}}\n</tool_call>'
    template = (
        "{# <tool_call> #}{{ tools }}{% for m in messages %}{{ m.content }}"
        "{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}{% endfor %}"
    )
    scripts = {"<|0|>": f"I look.\n{call}", "<|1|>": "It is sunny."}
    return str(write_scripted_model(folder / "model", scripts, template=template))


# Streams that are read again


@pytest.mark.parametrize(
    ("path", "body"), [(RESPONSES, response(stream=True)), (CHAT, chat(store=True, stream=True, n=3))]
)
async def test_a_stream_cut_at_any_event_goes_on_with_the_remaining_bytes(
    system: Any, eventually: Eventually, path: str, body: dict[str, Any]
) -> None:
    length = len(events(await ask(system, "POST", path, body)))
    assert length > 7
    for num_read in range(1, length + 1):
        system.engine.requests.clear()
        async with connection(system) as client:
            client.send("POST", path, body)
            received = b""
            while received.count(b"\n\n") < num_read:
                received += await client.read_until(b"\n\n")
        first = next(line for line in received.decode().split("\n") if line.startswith("data: {"))
        opening = json.loads(first.removeprefix("data: "))
        name = opening["id"] if path == CHAT else opening["response"]["id"]
        whole = events(await ask(system, "GET", f"{path}/{name}?stream=True"))  # Python's spelling
        assert len(whole) == length
        for headers, query in (
            ({"last_event_id": str(num_read - 1)}, ""),
            ({}, f"?stream=true&starting_after={num_read - 1}"),
        ):
            assert events(await ask(system, "GET", f"{path}/{name}{query}", **headers)) == whole[num_read:]
        assert [line.split(b"\n")[0] for line in whole] == [b"id: %d" % number for number in range(length)]
    await eventually(lambda: not system.engine.live)


async def test_sequence_numbers_are_the_numbers_of_events(system: Any) -> None:
    for event in events(await ask(system, "POST", RESPONSES, response(stream=True))):
        number, _, data = event.decode().split("\n")
        assert number == f"id: {json.loads(data.removeprefix('data: '))['sequence_number']}"


async def test_a_stored_response_goes_on_without_its_client_and_another_is_cancelled(
    system: Any, eventually: Eventually
) -> None:
    for fields, is_stored in (({"store": True}, True), ({"store": False}, False), ({"store": None}, False)):
        async with connection(system) as client:
            client.send("POST", RESPONSES, response("hold", stream=True, **fields))
            await client.read_until(b"response.output_text.delta")
        if is_stored:
            (generation,) = system.engine.live
            assert not generation.cancelled.is_set()
            generation.cancel()
        await eventually(lambda: not system.engine.live)
    assert 'quire_cancelled_total{cause="disconnect"} 2.0' in system.metrics()


async def test_tool_calls_are_read_again_with_the_same_bytes(serving: Callable[..., Any], tmp_path: Any) -> None:
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
    template = "{# <tool_call> #}{{ tools }}{% for m in messages %}{{ m.content }}{% endfor %}"
    model = write_scripted_model(tmp_path / "model", {"<|0|>": f"I look.\n{call}"}, template=template)
    tools = [{"type": "function", "function": {"name": "weather"}}]
    body = {"messages": [{"role": "user", "content": "<|0|>"}], "tools": tools, "store": True}
    async with serving(model=str(model)) as real:
        whole = await ask(real, "POST", CHAT, body)
        assert whole.json["choices"][0]["finish_reason"] == "tool_calls"
        path = f"{CHAT}/{whole.json['id']}"
        assert (await ask(real, "GET", path)).content == whole.content
        deltas = [each["choices"][0]["delta"] for each in as_json(await ask(real, "GET", f"{path}?stream=true"))]
        ids = [call["id"] for delta in deltas for call in delta.get("tool_calls", ()) if "id" in call]
        assert ids == [call["id"] for call in whole.json["choices"][0]["message"]["tool_calls"]]
        streamed = await ask(real, "POST", CHAT, {**body, "stream": True}, idempotency_key="k")
        assert whole.json["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "weather"
        retried = await ask(real, "POST", CHAT, {**body, "stream": True}, idempotency_key="k", last_event_id="2")
        assert events(retried) == events(streamed)[3:]


async def test_a_client_that_accepts_events_gets_those_of_a_stored_response(system: Any) -> None:
    whole = await ask(system, "POST", RESPONSES, response(stream=True))
    name = json.loads(events(whole)[0].split(b"data: ")[1])["response"]["id"]
    reply = await ask(system, "GET", f"{RESPONSES}/{name}", accept="text/event-stream")
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert events(reply) == events(whole)


async def test_the_head_of_a_stored_stream_has_no_events(system: Any) -> None:
    name = await stored_id(system, RESPONSES, response())
    async with connection(system) as client:
        head = await client.ask("HEAD", f"{RESPONSES}/{name}?stream=true")
        assert (head.status, head.headers["content-type"], head.content) == (200, "application/json", b"")
        assert (await client.ask("GET", f"{RESPONSES}/{name}")).json["id"] == name


async def test_a_stored_stream_waits_for_its_reader(serve: Serve) -> None:
    """A stream that did not wait would exceed the limit with eight chunks."""
    system = await serve(max_frame_bytes=65_536, max_outgoing_bytes=200_000)
    system.engine.text_bytes = 30_000

    async def stream(method: str, path: str, body: object = None) -> bytes:
        received = b""
        async with connection(system) as client:
            client.send(method, path, body)
            while b"data: [DONE]" not in received[-100:]:
                data = await client.reader.read(1 << 16)
                assert data, "the connection was closed"
                received += data
        return received

    first = await stream("POST", CHAT, chat(store=True, stream=True, max_tokens=60))
    name = first.partition(b'"id":"')[2].partition(b'"')[0].decode()
    again = await stream("GET", f"{CHAT}/{name}?stream=true")
    assert again.count(b"x" * 30_000) == 30


async def test_a_stored_stream_is_read_in_turns(system: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    name = await stored_id(system, RESPONSES, response(max_output_tokens=60))
    output_turns = system.server._context.keyring.authenticate(None).output_turns
    num_turns = 0
    call_soon = output_turns.call_soon

    def counting(callback: Callable[[], object]) -> None:
        nonlocal num_turns
        num_turns += 1
        call_soon(callback)

    monkeypatch.setattr(output_turns, "call_soon", counting)
    assert len(events(await ask(system, "GET", f"{RESPONSES}/{name}?stream=true"))) == 38
    assert num_turns == 4, "31 chunks, 8 per turn"


async def test_a_stream_of_a_response_that_is_cancelled_ends_in_an_error(system: Any) -> None:
    name = await stored_id(system, RESPONSES, response("hold", background=True))
    async with connection(system) as client:
        client.send("GET", f"{RESPONSES}/{name}?stream=true")
        await client.read_until(b"hold:0")
        assert (await ask(system, "POST", f"{RESPONSES}/{name}/cancel")).json["status"] == "cancelled"
        rest = await client.read_until(b"0\r\n\r\n")
    assert b'"code":"cancelled"' in rest
    assert b"response.completed" not in rest
    later = await ask(system, "GET", f"{RESPONSES}/{name}?stream=true&starting_after=99")
    (error,) = events(later)  # the error has no number: a client that has all events gets it, too
    assert error.startswith(b"data: {")
    assert as_json(later)[0]["error"]["code"] == "cancelled"


async def test_a_stored_response_with_calls_is_continued_by_their_results(
    serving: Callable[..., Any], tmp_path: Any
) -> None:
    async with serving(model=write_weather_model(tmp_path)) as real:
        streamed = await ask(real, "POST", RESPONSES, {**WEATHER, "stream": True})
        first = json.loads(events(streamed)[-1].split(b"data: ")[1])["response"]
        path = f"{RESPONSES}/{first['id']}"
        for number in range(len(events(streamed))):
            assert events(await ask(real, "GET", path, last_event_id=str(number))) == events(streamed)[number + 1 :]
        assert (await ask(real, "GET", path)).json == first
        (asked,) = (await ask(real, "GET", f"{path}/input_items")).json["data"]
        assert asked["id"] not in {item["id"] for item in first["output"]}
        (made,) = [item for item in first["output"] if item["type"] == "function_call"]
        result = {"type": "function_call_output", "call_id": made["call_id"], "output": "<|1|>"}
        reply = await ask(real, "POST", RESPONSES, {**WEATHER, "input": [result], "previous_response_id": first["id"]})
        assert reply.status == 200, reply
        assert reply.json["output"][0]["content"][0]["text"] == "It is sunny."
        items = (await ask(real, "GET", f"{RESPONSES}/{reply.json['id']}/input_items?order=asc")).json["data"]
        assert [item["type"] for item in items] == ["message", "message", "function_call", "function_call_output"]
        assert len({item["id"] for item in items}) == 4
        references = [{"type": "item_reference", "id": item["id"]} for item in items[:3]]
        again = await ask(real, "POST", RESPONSES, {**WEATHER, "input": [*references, result]})
        assert again.json["output"][0]["content"] == reply.json["output"][0]["content"]


async def test_a_response_that_was_cut_within_a_call_is_continued_without_it(
    serving: Callable[..., Any], tmp_path: Any
) -> None:
    """A call whose arguments are whole stays, although the markup after them is missing."""
    async with serving(model=write_weather_model(tmp_path)) as real:
        for num_tokens, arguments, num_kept in ((8, "", 1), (11, "{", 1), (13, '{"city": "Paris"', 1), (14, WHERE, 2)):
            cut = (await ask(real, "POST", RESPONSES, {**WEATHER, "max_output_tokens": num_tokens})).json
            assert cut["status"] == "incomplete"
            assert [item["type"] for item in cut["output"]] == ["message", "function_call"]
            assert [item["status"] for item in cut["output"]] == ["completed", "incomplete"]
            assert cut["output"][1]["arguments"] == arguments
            following = {**WEATHER, "input": "<|1|>", "previous_response_id": cut["id"]}
            reply = await ask(real, "POST", RESPONSES, following)
            assert reply.status == 200, reply
            assert reply.json["output"][0]["content"][0]["text"] == "It is sunny."
            items = (await ask(real, "GET", f"{RESPONSES}/{reply.json['id']}/input_items?order=asc")).json["data"]
            assert [item["id"] for item in items[1:-1]] == [item["id"] for item in cut["output"]][:num_kept]


async def test_an_error_in_new_input_is_placed_after_a_call_that_was_left_out(
    serving: Callable[..., Any], tmp_path: Any
) -> None:
    async with serving(model=write_weather_model(tmp_path)) as real:
        cut = (await ask(real, "POST", RESPONSES, {**WEATHER, "max_output_tokens": 11})).json
        given = [{"role": "user", "content": "<|1|>"}, {"type": "computer_call", "id": "a"}]
        reply = await ask(real, "POST", RESPONSES, {**WEATHER, "input": given, "previous_response_id": cut["id"]})
        assert (reply.status, reply.error["message"].split(" must")[0]) == (400, "input[1]")


# Objects


async def test_a_stored_response_is_retrieved_and_deleted(system: Any) -> None:
    created = await ask(system, "POST", RESPONSES, response(instructions="Be short.", metadata={"a": "b"}))
    path = f"{RESPONSES}/{created.json['id']}"
    assert (await ask(system, "GET", path)).content == created.content
    assert (await ask(system, "HEAD", path)).status == 200
    deleted = await ask(system, "DELETE", path)
    assert deleted.json == {"id": created.json["id"], "object": "response", "deleted": True}
    for method, suffix in (("GET", ""), ("DELETE", ""), ("GET", "/input_items"), ("POST", "/cancel")):
        reply = await ask(system, method, path + suffix)
        assert (reply.status, reply.error["code"]) == (404, "not_found"), (method, suffix)
    assert system.server._context.replays.num_bytes == 0


async def test_a_response_repeats_the_form_of_its_text(system: Any) -> None:
    form = {"type": "json_schema", "name": "x", "schema": {"type": "integer"}, "strict": True}
    body = {**response(), "text": {"format": form, "verbosity": "medium"}}
    created = (await ask(system, "POST", RESPONSES, body)).json
    assert created["text"] == {"format": form}
    assert (await ask(system, "GET", f"{RESPONSES}/{created['id']}")).json["text"] == {"format": form}
    assert (await ask(system, "POST", RESPONSES, response())).json["text"] == {"format": {"type": "text"}}


@pytest.mark.parametrize("parallel", [False, True])
async def test_a_response_repeats_whether_calls_are_parallel(system: Any, parallel: bool) -> None:
    created = (await ask(system, "POST", RESPONSES, response(parallel_tool_calls=parallel))).json
    assert created["parallel_tool_calls"] is parallel
    assert (created["metadata"], created["top_logprobs"], created["tool_choice"]) == ({}, 0, "auto")


async def test_a_response_repeats_its_tool_choice_and_how_many_alternatives_it_shows(system: Any) -> None:
    tools = [{"type": "function", "name": "f", "parameters": None}]
    alternatives = {"include": ["message.output_text.logprobs"], "top_logprobs": 3}
    created = (await ask(system, "POST", RESPONSES, response(tools=tools, tool_choice="none", **alternatives))).json
    assert (created["tools"], created["tool_choice"], created["top_logprobs"]) == (tools, "none", 3)


async def test_a_stored_chat_is_retrieved_and_deleted(system: Any) -> None:
    created = await ask(system, "POST", CHAT, chat(store=True, n=2))
    path = f"{CHAT}/{created.json['id']}"
    assert (await ask(system, "GET", path)).content == created.content
    deleted = await ask(system, "DELETE", path)
    assert deleted.json == {"id": created.json["id"], "object": "chat.completion.deleted", "deleted": True}
    assert (await ask(system, "GET", path)).status == 404


async def test_nothing_is_stored_unasked(system: Any) -> None:
    for path, body in ((RESPONSES, {"input": "a"}), (RESPONSES, response(store=False)), (CHAT, chat())):
        reply = await ask(system, "POST", path, body)
        assert (await ask(system, "GET", f"{path}/{reply.json['id']}")).status == 404
    assert system.server._context.replays.num_bytes == 0


async def test_an_id_is_of_one_tenant_and_one_api(serve: Serve, tmp_path: Any) -> None:
    import hashlib

    keys = {name: hashlib.sha256(name.encode()).hexdigest() for name in ("ann", "ben")}
    file = tmp_path / "keys.toml"
    file.write_text("".join(f'[{name}]\nkeys = ["{digest}"]\n' for name, digest in keys.items()))
    file.chmod(0o600)
    system = await serve(auth_tokens=str(file))
    created = await ask(system, "POST", RESPONSES, response(), authorization="Bearer ann")
    name = created.json["id"]
    assert (await ask(system, "GET", f"{RESPONSES}/{name}", authorization="Bearer ann")).status == 200
    assert (await ask(system, "GET", f"{RESPONSES}/{name}", authorization="Bearer ben")).status == 404
    assert (await ask(system, "GET", f"{CHAT}/{name}", authorization="Bearer ann")).status == 404
    other = f"chatcmpl-{name.removeprefix('resp_')}"
    assert (await ask(system, "GET", f"{CHAT}/{other}", authorization="Bearer ann")).status == 404


async def test_a_background_response_is_answered_before_its_output(system: Any, eventually: Eventually) -> None:
    reply = await ask(system, "POST", RESPONSES, {"input": "hold", "max_output_tokens": 6, "background": True})
    assert (reply.json["status"], reply.json["background"], reply.json["output"]) == ("queued", True, [])
    path = f"{RESPONSES}/{reply.json['id']}"

    async def status() -> str:
        found: str = (await ask(system, "GET", path)).json["status"]
        return found

    async with asyncio.timeout(60):
        while await status() != "in_progress":
            await asyncio.sleep(0.002)
    cancelled = (await ask(system, "POST", f"{path}/cancel")).json
    assert cancelled["status"] == "cancelled"
    assert cancelled["output"][0]["content"][0]["text"] == " hold:0é日"
    assert (await ask(system, "POST", f"{path}/cancel", {})).json == cancelled
    assert (await ask(system, "GET", path)).json == cancelled
    await eventually(lambda: not system.engine.live)


async def test_deleting_a_running_response_cancels_it(system: Any, eventually: Eventually) -> None:
    reply = await ask(system, "POST", RESPONSES, response("hold", background=True))
    await eventually(lambda: bool(system.engine.live))
    assert (await ask(system, "DELETE", f"{RESPONSES}/{reply.json['id']}")).status == 200
    await eventually(lambda: not system.engine.live)
    await eventually(lambda: system.server._context.replays.num_bytes == 0)


@pytest.mark.parametrize("background", [True, False])
async def test_a_response_that_fails_stays_failed(system: Any, eventually: Eventually, background: bool) -> None:
    body = response("fail", background=background, stream=not background)
    reply = await ask(system, "POST", RESPONSES, body)
    await eventually(lambda: bool(system.engine.requests) and not system.engine.live)
    identity = reply.json["id"] if background else as_json(reply)[0]["response"]["id"]
    found = (await ask(system, "GET", f"{RESPONSES}/{identity}")).json
    assert (found["status"], found["error"]) == ("failed", {"code": "server_error", "message": "the logits are NaN"})


async def test_a_refused_request_is_not_stored(system: Any) -> None:
    reply = await ask(system, "POST", RESPONSES, response("full"))
    assert (reply.status, reply.headers["retry-after-ms"]) == (429, "250")
    assert (await ask(system, "POST", RESPONSES, response("full", background=True))).status == 429
    assert len(system.server._context.replays.stored_index) == 0
    assert system.server._context.replays.num_bytes == 0


# Conversations


async def test_a_response_continues_another(system: Any) -> None:
    first = await stored_id(system, RESPONSES, response("one", instructions="Be short."))
    second = await stored_id(
        system, RESPONSES, response([{"role": "user", "content": "two"}], previous_response_id=first)
    )
    third = (await ask(system, "POST", RESPONSES, response("three", previous_response_id=second))).json
    assert third["previous_response_id"] == second
    answers = ["".join(f" {text}:{i}é日" for i in (0, 2, 4)) for text in ("one", "two")]
    texts = [each["content"] for each in system.engine.requests[-1].messages]
    assert texts == ["one", answers[0], "two", answers[1], "three"]
    assert [each["role"] for each in system.engine.requests[-1].messages] == ["user", "assistant"] * 2 + ["user"]
    path = f"{RESPONSES}/{third['id']}/input_items"
    items = (await ask(system, "GET", f"{path}?order=asc")).json
    assert [each["content"][0]["text"] for each in items["data"]] == texts
    assert (items["object"], items["has_more"]) == ("list", False)
    page = (await ask(system, "GET", f"{path}?limit=2")).json
    assert [each["content"][0]["text"] for each in page["data"]] == ["three", answers[1]]
    assert (page["has_more"], page["last_id"]) == (True, items["data"][3]["id"])
    rest = (await ask(system, "GET", f"{path}?after={page['last_id']}")).json
    assert [each["content"][0]["text"] for each in rest["data"]] == ["two", answers[0], "one"]


async def test_a_reference_is_replaced_by_the_stored_item(system: Any) -> None:
    first = (await ask(system, "POST", RESPONSES, response("one"))).json
    (given,) = (await ask(system, "GET", f"{RESPONSES}/{first['id']}/input_items")).json["data"]
    references = [{"type": "item_reference", "id": given["id"]}, {"id": first["output"][0]["id"]}]
    own = {"role": "user", "content": "two"}
    again = {"type": None, "id": given["id"]}
    second = (await ask(system, "POST", RESPONSES, response([*references, own, again]))).json
    answer = "".join(f" one:{i}é日" for i in (0, 2, 4))
    messages = system.engine.requests[-1].messages
    assert [each["content"] for each in messages] == ["one", answer, "two", "one"]
    assert [each["role"] for each in messages] == ["user", "assistant", "user", "user"]
    path = f"{RESPONSES}/{second['id']}/input_items?order=asc"
    items = (await ask(system, "GET", path)).json["data"]
    assert [each["id"] for each in items[:2]] == [given["id"], first["output"][0]["id"]]
    third = await ask(system, "POST", RESPONSES, response([references[0], own], previous_response_id=second["id"]))
    assert third.status == 200
    assert [each["content"] for each in system.engine.requests[-1].messages][-2:] == ["one", "two"]


async def test_a_reference_to_what_is_not_stored_is_left_out(system: Any) -> None:
    await ask(system, "POST", RESPONSES, response("one"))
    running = (await ask(system, "POST", RESPONSES, response("hold", background=True))).json["id"].removeprefix("resp_")
    user = {"role": "user", "content": "two"}
    alone = (await ask(system, "POST", f"{RESPONSES}/input_tokens", {**response([user]), "store": False})).json
    for unknown in ("msg_1", "", "msg_", "rs", f"msg_{'0' * 32}", f"msg_{running}", f"fc_{running}_0"):
        given = {**response([user, {"type": "item_reference", "id": unknown}]), "store": False}
        assert (await ask(system, "POST", f"{RESPONSES}/input_tokens", given)).json == alone, unknown
        assert (await ask(system, "POST", RESPONSES, given)).status == 200, unknown
    reply = await ask(system, "POST", RESPONSES, response([{"type": "item_reference", "id": 5}]))
    assert (reply.status, reply.error["message"]) == (400, "input[0]: id must be text, not 5")


async def test_a_page_with_all_items_has_no_next_one(system: Any) -> None:
    name = await stored_id(system, RESPONSES, response([{"role": "user", "content": each} for each in "ab"]))
    path = f"{RESPONSES}/{name}/input_items"
    found = [(await ask(system, "GET", f"{path}?limit={limit}")).json["has_more"] for limit in (1, 2, 3)]
    assert found == [True, False, False]


async def test_a_response_that_is_deleted_ends_though_it_is_read(system: Any, eventually: Eventually) -> None:
    name = await stored_id(system, RESPONSES, response("hold", background=True))
    async with connection(system) as client:
        client.send("GET", f"{RESPONSES}/{name}?stream=true")
        await client.read_until(b"hold:0")
        assert (await ask(system, "DELETE", f"{RESPONSES}/{name}")).status == 200
        await eventually(lambda: not system.engine.live)


async def test_an_output_has_a_limited_number_of_readers(system: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_log, "MAX_READERS", 1)
    name = await stored_id(system, RESPONSES, response("hold", background=True))
    async with connection(system) as client:
        client.send("GET", f"{RESPONSES}/{name}?stream=true")
        await client.read_until(b"hold:0")
        assert (await ask(system, "GET", f"{RESPONSES}/{name}")).status == 429


async def test_logprobs_of_a_response_count_for_nothing_in_those_that_continue_it(
    system: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "MAX_MESSAGE_VALUES", 30)  # logprobs of six tokens have more
    first = await stored_id(system, RESPONSES, response("one", include=["message.output_text.logprobs"]))
    reply = await ask(system, "POST", RESPONSES, response("two", previous_response_id=first))
    assert reply.status == 200, reply
    assert [each["role"] for each in system.engine.requests[-1].messages] == ["user", "assistant", "user"]


async def test_what_was_not_stored_cannot_be_stored_by_a_retry(system: Any) -> None:
    replies = [
        await ask(system, "POST", RESPONSES, response(store=store), Idempotency_Key="a")
        for store in (False, False, True)
    ]
    assert [reply.status for reply in replies] == [200, 200, 400]
    assert "is not stored; take a fresh key" in replies[2].error["message"]


async def test_a_chat_that_is_stored_is_no_stored_response_by_its_key(system: Any) -> None:
    messages = [{"role": "user", "content": "one"}]
    await ask(system, "POST", CHAT, chat(messages=messages, store=True), Idempotency_Key="a")
    reply = await ask(system, "POST", RESPONSES, response(messages), Idempotency_Key="a")
    assert (reply.status, reply.error["message"]) == (400, OTHER_REQUEST)
    again = await ask(system, "POST", CHAT, chat(messages=messages, store=True), Idempotency_Key="a")
    assert (await ask(system, "GET", f"{CHAT}/{again.json['id']}")).status == 200
    assert len(system.engine.requests) == 1


async def test_each_input_item_has_an_id_of_its_own(system: Any) -> None:
    """A client's id stays if it is a text that no other item has: a page begins after the item that it names."""
    given = ["x", "x", "y", None, 5, {"a": 1}, ""]
    items = [{"role": "user", "content": "a", "id": each} for each in given]
    name = await stored_id(system, RESPONSES, response([*items, {"role": "user", "content": "a"}]))
    path = f"{RESPONSES}/{name}/input_items?order=asc"
    own = f"msg_{name.removeprefix('resp_')}_input_"
    ids = ["x", f"{own}1", "y", *(f"{own}{index}" for index in range(3, 8))]
    assert [each["id"] for each in (await ask(system, "GET", path)).json["data"]] == ids
    page = (await ask(system, "GET", f"{path}&limit=1")).json
    paged = []
    while page["data"]:
        paged.append(page["last_id"])
        page = (await ask(system, "GET", f"{path}&limit=1&after={page['last_id']}")).json
    assert paged == ids


async def test_input_without_text_is_listed(system: Any) -> None:
    items = [{"role": "user", "content": "a"}, {"role": "assistant", "content": None}, {"role": "user", "content": []}]
    name = await stored_id(system, RESPONSES, response(items))
    listed = (await ask(system, "GET", f"{RESPONSES}/{name}/input_items?order=asc")).json["data"]
    assert [[part["text"] for part in each["content"]] for each in listed] == [["a"], [], []]


@pytest.mark.parametrize("previous", ["resp_1", "", "chatcmpl-1", 3])
async def test_an_unknown_previous_response_is_named(system: Any, previous: object) -> None:
    reply = await ask(system, "POST", RESPONSES, response(previous_response_id=previous))
    assert (reply.status, reply.error["param"]) == (400, "previous_response_id")
    assert system.engine.requests == []


async def test_a_chat_has_no_successor_among_responses(system: Any) -> None:
    name = await stored_id(system, CHAT, chat(store=True))
    reply = await ask(system, "POST", RESPONSES, response(previous_response_id=name))
    assert (reply.status, reply.error["code"]) == (400, "previous_response_not_found")


async def test_a_response_that_runs_or_was_cancelled_has_no_successor(system: Any, eventually: Eventually) -> None:
    name = await stored_id(system, RESPONSES, response("hold", background=True))
    reply = await ask(system, "POST", RESPONSES, response(previous_response_id=name))
    assert (reply.status, reply.error["param"]) == (400, "previous_response_id")
    cancelled = await ask(system, "POST", f"{RESPONSES}/{name}/cancel")
    assert cancelled.json["status"] == "cancelled"
    reply = await ask(system, "POST", RESPONSES, response(previous_response_id=name))
    assert (reply.status, reply.error["param"]) == (400, "previous_response_id")
    await ask(system, "DELETE", f"{RESPONSES}/{name}")


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("?stream=true&starting_after=-1", "starting_after"),
        ("?stream=true&starting_after=x", "starting_after"),
        ("?stream=true&starting_after=9999999999999999", "starting_after"),
        (f"?stream=true&starting_after={'9' * 5000}", "starting_after"),
        ("/input_items?limit=0", "limit"),
        ("/input_items?limit=101", "limit"),
        ("/input_items?order=up", "order"),
        ("/input_items?after=x", "after"),
        ("?" + "&".join(f"a{i}=1" for i in range(40)), None),
    ],
)
async def test_a_wrong_query_is_named(system: Any, query: str, param: str | None) -> None:
    name = await stored_id(system, RESPONSES, response())
    reply = await ask(system, "GET", f"{RESPONSES}/{name}{query}")
    assert (reply.status, reply.error["param"]) == (400, param)


# Idempotency keys


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (RESPONSES, response(store=False)),
        (RESPONSES, response(stream=True)),
        (CHAT, chat(n=2)),
        (CHAT, chat(stream=True, stream_options={"include_usage": True})),
        ("/v1/completions", {"prompt": "p", "max_tokens": 5, "logprobs": 2}),
        ("/v1/completions", {"prompt": [1, 2], "max_tokens": 5, "stream": True}),
    ],
)
async def test_a_retry_with_the_key_has_the_same_bytes(system: Any, path: str, body: dict[str, Any]) -> None:
    replies = [await ask(system, "POST", path, body, idempotency_key="k") for _ in range(2)]
    assert replies[0].status == 200
    assert replies[0].content == replies[1].content
    assert len(system.engine.requests) == 1
    assert (await ask(system, "POST", path, body, idempotency_key="other")).content != replies[0].content
    if body.get("stream"):
        rest = await ask(system, "POST", path, body, idempotency_key="k", last_event_id="1")
        assert events(rest) == events(replies[0])[2:]


async def test_a_keyed_request_waits_for_its_retry(system: Any, eventually: Eventually) -> None:
    body = chat(stream=True, messages=[{"role": "user", "content": "hold"}])
    for _ in range(3):
        async with connection(system) as client:
            client.send("POST", CHAT, body, {"idempotency-key": "k"})
            await client.read_until(b"hold:0")
        await eventually(lambda: system.server.num_connections == 0)
        (generation,) = system.engine.live
        assert not generation.cancelled.is_set()
    assert len(system.engine.requests) == 1
    generation.cancel()
    await eventually(lambda: not system.engine.live)


async def test_a_keyed_request_without_a_retry_is_cancelled(serve: Serve, eventually: Eventually) -> None:
    system = await serve(resume_timeout_ms=20)
    body = {"prompt": "hold", "max_tokens": 6, "stream": True}
    async with connection(system) as client:
        client.send("POST", "/v1/completions", body, {"idempotency-key": "k"})
        await client.read_until(b"text_completion")
    await eventually(lambda: not system.engine.live)
    assert 'quire_cancelled_total{cause="disconnect"} 1.0' in system.metrics()


async def test_a_key_belongs_to_one_request(system: Any) -> None:
    assert (await ask(system, "POST", CHAT, chat(), idempotency_key="k")).status == 200
    for body in (chat(temperature=0.5), chat(messages=[{"role": "user", "content": "c"}])):
        reply = await ask(system, "POST", CHAT, body, idempotency_key="k")
        assert (reply.status, reply.error["message"]) == (400, OTHER_REQUEST)


@pytest.mark.parametrize(
    ("path", "body", "other"),
    [
        (CHAT, chat(), {"stream": True}),
        (CHAT, chat(stream=True), {"stream_options": {"include_usage": True}}),
        (CHAT, chat(), {"return_token_ids": True}),
        (CHAT, chat(), {"return_timings": True}),
        (CHAT, chat(logprobs=True), {"return_tokens_as_token_ids": True}),
        (CHAT, chat(service_tier="default"), {"service_tier": "priority"}),
        (RESPONSES, response(metadata={"a": "1"}), {"metadata": {"a": "2"}}),
        (RESPONSES, response(), {"background": True}),
        (RESPONSES, response(user="a"), {"user": "b"}),
        (
            RESPONSES,
            response([{"role": "system", "content": "s"}, {"role": "user", "content": "a"}]),
            {"instructions": "s", "input": "a"},
        ),
    ],
)
async def test_a_key_belongs_to_one_form_of_the_answer(
    system: Any, path: str, body: dict[str, Any], other: dict[str, Any]
) -> None:
    """A key is refused for another form even if the engine would compute the same tokens."""
    first = await ask(system, "POST", path, body, idempotency_key="k")
    reply = await ask(system, "POST", path, {**body, **other}, idempotency_key="k")
    assert (reply.status, reply.error["message"]) == (400, OTHER_REQUEST)
    again = await ask(system, "POST", path, body, idempotency_key="k")
    assert (again.status, again.content) == (200, first.content)
    assert len(system.engine.requests) == 1


async def test_a_key_belongs_to_one_path(system: Any) -> None:
    messages = chat()["messages"]
    assert (await ask(system, "POST", CHAT, chat(), idempotency_key="k")).status == 200
    reply = await ask(system, "POST", RESPONSES, response(messages, store=False), idempotency_key="k")
    assert (reply.status, reply.error["message"]) == (400, OTHER_REQUEST)


async def test_a_retry_may_have_other_hints_priority_and_deadline_and_need_not_store(system: Any) -> None:
    first = await ask(system, "POST", CHAT, chat(store=True), idempotency_key="k")
    other = chat(metadata={"a": "b"}, priority=2, deadline_ms=60_000, pin_ms=5)
    again = await ask(system, "POST", CHAT, other, idempotency_key="k")
    assert (again.status, again.content) == (200, first.content)


@pytest.mark.parametrize(("path", "body"), [(RESPONSES, response()), (CHAT, chat(store=True))])
async def test_what_is_deleted_is_no_answer_to_its_key(system: Any, path: str, body: dict[str, Any]) -> None:
    first = await ask(system, "POST", path, body, idempotency_key="k")
    assert (await ask(system, "DELETE", f"{path}/{first.json['id']}")).status == 200
    assert system.server._context.replays.num_bytes == 0
    again = await ask(system, "POST", path, body, idempotency_key="k")
    assert (again.status, again.json["id"] != first.json["id"]) == (200, True)
    assert (await ask(system, "GET", f"{path}/{again.json['id']}")).content == again.content
    assert len(system.engine.requests) == 2


@pytest.mark.parametrize(
    ("fields", "headers", "param"),
    [
        ({"prompt": ["a", "b"]}, {}, "prompt"),
        ({"prompt": "a", "echo": True}, {}, "echo"),
        ({"prompt": "a", "prompt_logprobs": 1}, {}, "prompt_logprobs"),
        ({"prompt": "a"}, {"idempotency_key": "k" * 256}, "idempotency-key"),
        ({"prompt": "a"}, {"idempotency_key": ""}, "idempotency-key"),
        ({"prompt": "a", "stream": True}, {"last_event_id": "x"}, "last-event-id"),
        ({"prompt": "a", "store": True}, {}, "store"),
    ],
)
async def test_what_cannot_be_kept_is_refused(
    system: Any, fields: dict[str, Any], headers: dict[str, str], param: str
) -> None:
    reply = await ask(system, "POST", "/v1/completions", fields, **{"idempotency_key": "k", **headers})
    assert (reply.status, reply.error["param"]) == (400, param)
    assert system.engine.requests == []


# Memory


async def test_stored_output_takes_a_bounded_share(serve: Serve) -> None:
    system = await serve(max_kept_bytes=30_000)
    names = [await stored_id(system, RESPONSES, response("a" * 3000)) for _ in range(8)]
    assert system.server._context.replays.num_bytes <= 30_000
    found = [(await ask(system, "GET", f"{RESPONSES}/{name}")).status for name in names]
    assert found == sorted(found, reverse=True)
    assert found[0] == 404
    assert found[-1] == 200
    reply = await ask(system, "POST", RESPONSES, response("a" * 40_000))
    assert (reply.status, reply.error["code"]) == (429, "insufficient_quota")


async def test_a_stored_response_with_a_key_is_not_found_once_its_output_is_dropped(serve: Serve) -> None:
    system = await serve(max_kept_bytes=30_000)
    first = await ask(system, "POST", RESPONSES, response("a" * 3000), idempotency_key="k")
    path = f"{RESPONSES}/{first.json['id']}"
    assert (await ask(system, "GET", path)).status == 200
    for _ in range(8):
        await stored_id(system, RESPONSES, response("a" * 3000))
    reply = await ask(system, "GET", path)
    assert (reply.status, reply.error["code"]) == (404, "not_found")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_retry_is_refused_with_a_status_once_the_output_is_dropped(serve: Serve, stream: bool) -> None:
    system = await serve(max_kept_bytes=30_000)
    body = chat(stream=stream)
    assert (await ask(system, "POST", CHAT, body, idempotency_key="k")).status == 200
    for _ in range(8):
        await stored_id(system, RESPONSES, response("a" * 3000))
    reply = await ask(system, "POST", CHAT, body, idempotency_key="k")
    assert (reply.status, reply.error["code"]) == (404, "not_found")


async def test_long_requests_are_read_beside_the_event_loop(system: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """When they are sent, retrieved, listed or continued, and when they are only tokenized."""
    threads: list[threading.Thread] = []
    for module, name in ((calls, "chat_messages"), (stored, "listed_items")):
        original = getattr(module, name)

        def noting(*arguments: Any, original: Any = original) -> Any:
            threads.append(threading.current_thread())
            return original(*arguments)

        monkeypatch.setattr(module, name, noting)
    long = {"chat_template_kwargs": {"a": "b" * 70_000}}
    path = f"{RESPONSES}/{await stored_id(system, RESPONSES, response(**long))}"
    for method, suffix in (("GET", ""), ("GET", "?stream=true"), ("GET", "/input_items"), ("POST", "/cancel")):
        assert (await ask(system, method, path + suffix)).status == 200
    assert (await ask(system, "POST", RESPONSES, response("b", previous_response_id=path[-37:]))).status == 200
    assert (
        await ask(system, "POST", "/tokenize", {"messages": [{"role": "user", "content": "a"}], **long})
    ).status == 200
    assert len(threads) == 8
    assert threading.main_thread() not in threads
    threads.clear()
    await stored_id(system, RESPONSES, response())
    assert threads == [threading.main_thread()]
    part = {"chat_template_kwargs": {"a": "b" * 40_000}}  # two are long together
    parts = [(await ask(system, "POST", RESPONSES, response(**part))).json for _ in range(2)]
    references = [{"type": "item_reference", "id": each["output"][0]["id"]} for each in parts]
    await stored_id(system, RESPONSES, response([*references, {"role": "user", "content": "c"}]))
    assert threads[-1] is not threading.main_thread()


async def test_what_is_stored_expires(serve: Serve, eventually: Eventually) -> None:
    system = await serve(store_window_ms=20)
    name = await stored_id(system, RESPONSES, response())
    await eventually(lambda: system.server._context.replays.num_bytes == 0)
    assert (await ask(system, "GET", f"{RESPONSES}/{name}")).status == 404


async def test_a_draining_server_answers_what_is_stored(system: Any) -> None:
    name = await stored_id(system, RESPONSES, response())
    await system.server.drain(0.1)
    assert (await ask(system, "GET", f"{RESPONSES}/{name}")).status == 200
    assert (await ask(system, "POST", RESPONSES, response())).status == 503
