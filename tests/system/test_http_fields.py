"""Fields of the HTTP API beyond OpenAI's text and tokens: what ends an output, token ids, salts, tiers, logprobs."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

from tests.support.http_client import HTTPClient, Reply

Serving = Callable[..., AbstractAsyncContextManager[Any]]

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
RESPONSES = "/v1/responses"
PROMPT = "This module provides access to"


async def ask(system: Any, path: str, body: object) -> Reply:
    client = await HTTPClient.open(system.server.openai_address)
    try:
        return await client.ask("POST", path, body)
    finally:
        client.writer.transport.abort()


@pytest.fixture
async def real(serving: Serving) -> AsyncIterator[Any]:
    async with serving() as real:
        yield real


async def test_what_ended_an_output(real: Any) -> None:
    body = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, "return_token_ids": True}
    choice = (await ask(real, COMPLETIONS, body)).json["choices"][0]
    ids = choice["token_ids"]
    text = choice["text"]
    assert (len(ids), choice["finish_reason"], choice["stop_reason"]) == (12, "length", None)
    stop_id = next(each for each in ids[2:] if each not in ids[:2])
    for fields, reason in (
        ({"stop_token_ids": [stop_id, stop_id - 1]}, stop_id),
        ({"stop": ["no such text", text[4:9]], "include_stop_str_in_output": True}, text[4:9]),
    ):
        whole = (await ask(real, COMPLETIONS, {**body, **fields})).json["choices"][0]
        assert (whole["finish_reason"], whole["stop_reason"]) == ("stop", reason)
        for n, best_of in ((1, 2), (2, 2)):
            ranked = {**body, **fields, "n": n, "best_of": best_of}
            choices = (await ask(real, COMPLETIONS, ranked)).json["choices"]
            assert [each["stop_reason"] for each in choices] == [reason] * n
        events = (await ask(real, COMPLETIONS, {**body, **fields, "stream": True})).events
        streamed = [event["choices"][0] for event in events]
        assert streamed[-1]["stop_reason"] == reason
        assert all("stop_reason" not in each for each in streamed[:-1])
        assert [token for each in streamed for token in each.get("token_ids", [])] == whole["token_ids"]
    plain = await ask(real, COMPLETIONS, {"prompt": PROMPT, "max_tokens": 2, "stop": ["x"]})
    assert "stop_reason" not in plain.json["choices"][0], "OpenAI's types do not have it"


async def test_logprobs_name_tokens_by_id(real: Any) -> None:
    fields = {"max_tokens": 4, "temperature": 0, "return_token_ids": True, "return_tokens_as_token_ids": True}
    choice = (await ask(real, COMPLETIONS, {"prompt": PROMPT, "logprobs": 2, **fields})).json["choices"][0]
    names = [f"token_id:{each}" for each in choice["token_ids"]]
    assert choice["logprobs"]["tokens"] == names
    assert all(name in top for name, top in zip(names, choice["logprobs"]["top_logprobs"], strict=True))
    text = choice["text"]
    assert all(0 <= offset <= len(text) for offset in choice["logprobs"]["text_offset"])
    messages = [{"role": "user", "content": "What is a queue?"}]
    chat = (await ask(real, CHAT, {"messages": messages, "logprobs": True, "top_logprobs": 1, **fields})).json
    entries = chat["choices"][0]["logprobs"]["content"]
    assert [each["token"] for each in entries] == [f"token_id:{each}" for each in chat["choices"][0]["token_ids"]]
    assert entries[0]["top_logprobs"][0]["token"] == entries[0]["token"]


@pytest.mark.parametrize("prompt", [PROMPT + " a queue.", "日本語 é", [60, 200, 300], [9]])
async def test_prompt_logprobs_are_those_of_an_echo(real: Any, prompt: Any) -> None:
    body = {"prompt": prompt, "max_tokens": 4, "temperature": 0, "return_token_ids": True, "logprobs": 1}
    plain = (await ask(real, COMPLETIONS, body)).json
    echo = (await ask(real, COMPLETIONS, {**body, "return_token_ids": False, "echo": True, "logprobs": 3})).json
    found = (await ask(real, COMPLETIONS, {**body, "prompt_logprobs": 3})).json
    choice = found["choices"][0]
    first, *entries = choice.pop("prompt_logprobs")
    assert first is None
    assert choice == plain["choices"][0]
    assert found["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"] == len(entries) + 1
    expected = echo["choices"][0]["logprobs"]["token_logprobs"][1 : len(entries) + 1]
    assert [next(iter(each.values()))["logprob"] for each in entries] == expected
    for each in entries:
        ranks = sorted(token["rank"] for token in each.values() if token["rank"] is not None)
        assert ranks == [1, 2, 3]
    fewer = (await ask(real, COMPLETIONS, {**body, "logprobs": 3, "prompt_logprobs": 1})).json["choices"][0]
    assert [len(each) for each in fewer["logprobs"]["top_logprobs"]] == [3] * 4
    assert all(len(each) <= 2 for each in fewer["prompt_logprobs"][1:]), "the token and the likeliest one"
    bare = {name: value for name, value in body.items() if name != "logprobs"}
    choices = (await ask(real, COMPLETIONS, {**bare, "prompt": [[5, 6], [7, 8, 9]], "prompt_logprobs": 0, "n": 2})).json
    assert [len(each["prompt_logprobs"]) for each in choices["choices"]] == [2, 2, 3, 3]
    assert {each["logprobs"] for each in choices["choices"]} == {None}
    assert [len(each["token_ids"]) for each in choices["choices"]] == [4] * 4


async def test_a_salt_isolates_cached_pages(real: Any) -> None:
    async def num_cached(**fields: Any) -> int:
        reply = await ask(real, COMPLETIONS, {"prompt": PROMPT * 20, "max_tokens": 1, **fields})
        count: int = reply.json["usage"]["prompt_tokens_details"]["cached_tokens"]
        return count

    found = [await num_cached(**({"cache_salt": salt} if salt else {})) for salt in ("", "", "a", "a", "b", "")]
    assert [bool(each) for each in found] == [False, True, False, True, False, True]


async def test_every_answer_names_what_its_bits_depend_on(serving: Serving) -> None:
    names = []
    for settings in ({}, {}, {"weights": "q8"}):
        async with serving(**settings) as real:
            reply = await ask(real, COMPLETIONS, {"prompt": "a", "max_tokens": 1})
            stream = await ask(real, COMPLETIONS, {"prompt": "a", "max_tokens": 1, "stream": True})
            names.append(reply.json["system_fingerprint"])
            assert {each["system_fingerprint"] for each in stream.events} == {names[-1]}
    assert names[0] == names[1] != names[2]
    assert names[0].startswith("fp_")


@pytest.mark.parametrize(
    ("tier", "shown", "priority"),
    [("auto", "default", 0), ("default", "default", 0), ("flex", "flex", 1), ("priority", "priority", -1)],
)
async def test_service_tiers_are_priorities(system: Any, tier: str, shown: str, priority: int) -> None:
    messages = [{"role": "user", "content": "b"}]
    reply = await ask(system, CHAT, {"messages": messages, "max_tokens": 2, "service_tier": tier})
    assert (reply.json["service_tier"], system.engine.requests[-1].priority) == (shown, priority)
    await ask(system, CHAT, {"messages": messages, "max_tokens": 2, "service_tier": tier, "priority": 7})
    assert system.engine.requests[-1].priority == 7
    response = await ask(system, RESPONSES, {"input": "a", "max_output_tokens": 2, "service_tier": tier})
    assert response.json["service_tier"] == shown
    assert "service_tier" not in (await ask(system, CHAT, {"messages": messages, "max_tokens": 2})).json


async def test_a_response_shows_the_sampling_that_it_was_made_with(system: Any) -> None:
    async def shown(**fields: Any) -> tuple[float, float]:
        response = (await ask(system, RESPONSES, {"input": "a", "max_output_tokens": 2, **fields})).json
        return response["temperature"], response["top_p"]

    assert await shown() == (1.0, 1.0)
    assert await shown(temperature=None, top_p=0.5) == (1.0, 0.5)
    assert await shown(temperature=0) == (0, 1.0)
    system.engine.default_sampling = {"temperature": 0.6, "top_p": 0.9}
    assert await shown() == (0.6, 0.9)
    assert await shown(temperature=0.2) == (0.2, 0.9)


async def test_logprobs_of_a_response(real: Any) -> None:
    body = {"input": "What is a queue?", "max_output_tokens": 8, "temperature": 0, "top_logprobs": 2}
    body["include"] = ["message.output_text.logprobs"]
    part = (await ask(real, RESPONSES, body)).json["output"][0]["content"][0]
    assert b"".join(bytes(each["bytes"]) for each in part["logprobs"]) == part["text"].encode()
    assert all(len(each["top_logprobs"]) == 2 for each in part["logprobs"])
    assert part["logprobs"][0]["top_logprobs"][0].keys() == {"token", "bytes", "logprob"}
    stream = (await ask(real, RESPONSES, {**body, "stream": True})).content.decode()
    events = [each for line in stream.split("\n") if line.startswith("data: ") for each in [json.loads(line[6:])]]
    deltas = [each for event in events if event["type"] == "response.output_text.delta" for each in event["logprobs"]]
    (done,) = [event for event in events if event["type"] == "response.output_text.done"]
    shown = [
        {**_without_bytes(each), "top_logprobs": list(map(_without_bytes, each["top_logprobs"]))}
        for each in part["logprobs"]
    ]
    assert deltas == done["logprobs"] == shown
    assert events[-1]["response"]["output"][0]["content"][0] == part


@pytest.mark.parametrize("field", ["stop", "temperature", "stop_token_ids", "response_format", "tools"])
@pytest.mark.parametrize("depth", [400, 900])
async def test_a_field_that_nests_deeply_is_refused(system: Any, field: str, depth: int) -> None:
    body = b'{"messages":[{"role":"user","content":"a"}],"%b":%b}' % (field.encode(), b"[" * depth + b"]" * depth)
    reply = await ask(system, CHAT, body)
    assert (reply.status, field in reply.error["message"] or "nests deeper" in reply.error["message"]) == (400, True)


REFUSED: Any = {"type": "array", "contains": {"type": "string"}}
MESSAGES = [{"role": "user", "content": "a"}]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"schema": REFUSED}}}, "response_format"),
        (CHAT, {"response_format": {"type": "json_object", "schema": REFUSED}}, "response_format"),
        (CHAT, {"structured_outputs": {"json": REFUSED}}, "structured_outputs"),
        (CHAT, {"guided_json": REFUSED, "stream": True}, "guided_json"),
        (RESPONSES, {"text": {"format": {"type": "json_schema", "name": "x", "schema": REFUSED}}}, "text.format"),
        (RESPONSES, {"include": ["reasoning.text"]}, "include"),
        (RESPONSES, {"reasoning": {"effort": "most"}}, "reasoning.effort"),
        (CHAT, {"reasoning_effort": "most"}, "reasoning_effort"),
    ],
    ids=lambda value: str(value)[:30],
)
async def test_an_error_names_the_field_of_the_body(real: Any, path: str, body: Any, param: str) -> None:
    prompt: Any = {"input": "a"} if path == RESPONSES else {"messages": MESSAGES}
    reply = await ask(real, path, {**prompt, **body})
    assert (reply.status, reply.error["param"], reply.error["message"].split(":")[0].split(" ")[0]) == (
        400,
        param,
        param,
    )


@pytest.mark.parametrize(
    ("path", "body", "param", "code"),
    [
        (COMPLETIONS, {"prompt": ""}, "prompt", None),
        (COMPLETIONS, {"prompt": "a " * 3000}, "prompt", "context_length_exceeded"),
        (CHAT, {"messages": [{"role": "user", "content": "a " * 3000}]}, "messages", "context_length_exceeded"),
        (RESPONSES, {"input": "a " * 3000}, "input", "context_length_exceeded"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": 2049}, "max_tokens", "context_length_exceeded"),
        (CHAT, {"messages": MESSAGES, "max_tokens": 2049}, "max_tokens", "context_length_exceeded"),
        (CHAT, {"messages": MESSAGES, "max_tokens": 0}, "max_tokens", None),
        (RESPONSES, {"input": "a", "max_output_tokens": 2049}, "max_output_tokens", "context_length_exceeded"),
        (f"{RESPONSES}/input_tokens", {"input": []}, "input", None),
    ],
)
async def test_an_error_about_lengths_names_the_field_that_has_it(
    real: Any, path: str, body: Any, param: str, code: str | None
) -> None:
    reply = await ask(real, path, body)
    assert (reply.status, reply.error["param"], reply.error["code"]) == (400, param, code)


async def test_the_tokens_of_an_input_are_counted_as_a_response_counts_them(real: Any) -> None:
    first = {"input": "What is a queue?", "instructions": "Be brief.", "max_output_tokens": 4, "store": True}
    response = (await ask(real, RESPONSES, first)).json
    counted = await ask(real, f"{RESPONSES}/input_tokens", first)
    assert counted.json == {"object": "response.input_tokens", "input_tokens": response["usage"]["input_tokens"]}
    follow = {"input": "And a stack?", "previous_response_id": response["id"]}
    longer = (await ask(real, f"{RESPONSES}/input_tokens", follow)).json["input_tokens"]
    assert longer == (await ask(real, RESPONSES, {**follow, "max_output_tokens": 1})).json["usage"]["input_tokens"]


@pytest.mark.parametrize(
    ("path", "param"),
    [
        (CHAT, "messages"),
        (COMPLETIONS, "prompt"),
        (RESPONSES, "input"),
        (f"{RESPONSES}/input_tokens", "input"),
        ("/v1/embeddings", "input"),
        ("/classify", "input"),
        ("/v1/rerank", "query"),
        ("/v1/score", "text_1"),
        ("/tokenize", "prompt"),
        ("/detokenize", "tokens"),
    ],
)
@pytest.mark.parametrize("body", [{}, {"messages": None, "prompt": None, "input": None, "tokens": None}])
async def test_a_missing_field_has_a_code_on_every_path(system: Any, path: str, param: str, body: Any) -> None:
    error = (await ask(system, path, body)).error
    assert (error["code"], error["param"]) == ("missing_required_parameter", param)


async def test_a_byte_order_mark_before_a_body_is_ignored(system: Any) -> None:
    assert (await ask(system, COMPLETIONS, b'\xef\xbb\xbf{"prompt": "a", "max_tokens": 2}')).status == 200
    refused = await ask(system, COMPLETIONS, '{"prompt": "a"}'.encode("utf-16"))
    assert (refused.status, refused.error["message"]) == (400, "the body is in UTF-16; send it in UTF-8")


@pytest.mark.parametrize("token", [" 10", "1_0", "+5", "05", "\u0661", ""])
async def test_a_biased_token_is_a_plain_number(system: Any, token: str) -> None:
    reply = await ask(system, COMPLETIONS, {"prompt": "p", "logit_bias": {token: 1}})
    assert (reply.status, reply.error["param"]) == (400, "logit_bias")


@pytest.mark.parametrize(
    ("name", "neutral", "value"),
    [
        ("logits_processors", [], ["a.processor"]),
        ("mm_processor_kwargs", {}, {"num_crops": 4}),
        ("guided_whitespace_pattern", None, r"\s*"),
        ("vllm_xargs", {}, {"key": 1}),
        ("kv_transfer_params", None, {"do_remote_decode": True}),
    ],
)
async def test_fields_of_vllm_that_would_change_the_answer_are_refused(
    system: Any, name: str, neutral: Any, value: Any
) -> None:
    body = {"messages": MESSAGES, "max_tokens": 1}
    refused = await ask(system, CHAT, {**body, name: value})
    assert (refused.status, refused.error["param"]) == (400, name)
    assert refused.error["code"] == "unsupported_parameter"
    assert (await ask(system, CHAT, {**body, name: neutral})).status == 200


def _without_bytes(entry: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in entry.items() if name != "bytes"}


@pytest.mark.parametrize(
    ("path", "fields", "advice"),
    [
        (CHAT, {"max_output_tokens": 5}, "use max_tokens"),
        (CHAT, {"n_predict": 5}, "use max_tokens"),
        (CHAT, {"repeat_penalty": 1.1}, "use repetition_penalty"),
        (CHAT, {"beam_width": 2}, "Quire's own protocol has beams"),
        (CHAT, {"previous_response_id": "resp_1"}, "leave it out"),
        (CHAT, {"instructions": "a"}, "leave it out"),
        (CHAT, {"best_of": True}, "leave it out"),
        (COMPLETIONS, {"prompt": "a", "messages": []}, "chats go to /v1/chat/completions"),
        (COMPLETIONS, {"prompt": "a", "store": 0}, "leave it out"),
        (COMPLETIONS, {"prompt": "a", "prompt_embeds": "x"}, "leave it out"),
        (RESPONSES, {"input": "a", "max_tokens": 5}, "use max_output_tokens"),
        (RESPONSES, {"input": "a", "n_predict": 5}, "use max_output_tokens"),
        (COMPLETIONS, {"prompt": "a", "max_completion_tokens": 5}, "use max_tokens"),
        ("/detokenize", {"tokens": [5], "max_tokens": 1}, "leave it out"),
        (RESPONSES, {"input": "a", "response_format": {"type": "json_object"}}, "use text.format"),
        ("/detokenize", {"tokens": [5], "temperature": 1}, "leave it out"),
    ],
)
async def test_fields_of_other_paths_and_servers_are_refused_with_advice(
    system: Any, path: str, fields: dict[str, Any], advice: str
) -> None:
    name = list(fields)[-1]
    reply = await ask(system, path, {"messages": MESSAGES, **fields} if path == CHAT else fields)
    assert (reply.status, reply.error["param"], reply.error["code"]) == (400, name, "unsupported_parameter")
    assert reply.error["message"] == f"{name} is not supported here; {advice}"


async def test_fields_of_other_servers_may_ask_for_nothing(system: Any) -> None:
    fields = {"repeat_penalty": 1.0, "typical_p": 1, "mirostat": 0, "truncation": "disabled", "background": False}
    assert (await ask(system, CHAT, {"messages": MESSAGES, "max_tokens": 2, **fields})).status == 200


@pytest.mark.parametrize("value", ["abc", -5, 1.0, True])
async def test_both_names_of_a_chats_maximum_are_checked(system: Any, value: object) -> None:
    reply = await ask(system, CHAT, {"messages": MESSAGES, "max_completion_tokens": 2, "max_tokens": value})
    assert (reply.status, reply.error["param"]) == (400, "max_tokens")


@pytest.mark.parametrize(
    ("grammar", "kind"),
    [
        ('root ::= start\nstart ::= "abc"', "gbnf"),
        ('start: "abc"', "lark"),
        ('x: "a"\n  ?start.2 : x "bc"', "lark"),
        ('root ::= "start:"', "gbnf"),
    ],
)
async def test_a_grammar_with_a_rule_start_is_larks(system: Any, grammar: str, kind: str) -> None:
    assert (await ask(system, COMPLETIONS, {"prompt": "a", "max_tokens": 2, "grammar": grammar})).status == 200
    structure = system.engine.requests[0].sampling_params.structured_outputs
    assert getattr(structure, kind) == grammar


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"choice": []}, "structured_outputs: choice must not be empty"),
        ({"json_object": False}, "structured_outputs: json_object must be true"),
        ({"json": {}, "regex": "a"}, "structured_outputs must be an object with exactly one of json, json_object, "),
    ],
)
async def test_a_structure_that_says_nothing_is_refused(system: Any, given: Any, message: str) -> None:
    reply = await ask(system, COMPLETIONS, {"prompt": "a", "structured_outputs": given})
    assert (reply.status, reply.error["param"]) == (400, "structured_outputs")
    assert reply.error["message"].startswith(message)


async def test_null_beside_the_kind_of_a_structure_says_nothing(system: Any) -> None:
    body = {"prompt": "a", "max_tokens": 2, "structured_outputs": {"regex": "ab", "json": None, "choice": None}}
    assert (await ask(system, COMPLETIONS, body)).status == 200
    assert system.engine.requests[0].sampling_params.structured_outputs.regex == "ab"


@pytest.mark.parametrize("labels", [{"strict": "yes"}, {"name": 5}, {"description": []}])
async def test_what_stands_beside_a_schema_has_its_type(system: Any, labels: dict[str, Any]) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": {}, **labels}}
    reply = await ask(system, CHAT, {"messages": MESSAGES, "response_format": form})
    assert (reply.status, reply.error["param"]) == (400, "response_format")


async def test_prompt_logprobs_go_with_as_many_candidates_as_choices(real: Any) -> None:
    body = {"prompt": "a b", "max_tokens": 1, "prompt_logprobs": 0}
    assert (await ask(real, COMPLETIONS, {**body, "best_of": 1})).status == 200
    assert (await ask(real, COMPLETIONS, {**body, "best_of": 2})).error["param"] == "prompt_logprobs"


PANIC = 'start: %regex {"substring_chunks":[""]}'  # grammar that makes the library that compiles it panic
ENDLESS = {"structured_outputs": {"regex": "((a{1,999}){1,999}){999}"}, "max_tokens": 900}


async def test_a_grammar_that_reaches_a_limit_is_the_requests_fault(real: Any) -> None:
    reply = await ask(real, COMPLETIONS, {"prompt": "a", **ENDLESS})
    assert (reply.status, reply.error["param"]) == (400, "structured_outputs")
    stream = await ask(real, COMPLETIONS, {"prompt": "a", "stream": True, **ENDLESS})
    error = json.loads(stream.content.split(b"data: ")[-1])["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", "structured_outputs")


async def test_a_panic_of_the_grammar_library_is_a_failure_of_the_server(real: Any) -> None:
    grammar = {"grammar": 'start: p::0\np::_: p::incr(_) | "a"'}  # an assertion of the library's fails
    reply = await ask(real, COMPLETIONS, {"prompt": "a", "max_tokens": 2, "structured_outputs": grammar})
    assert (reply.status, reply.error["type"], reply.error["param"]) == (500, "server_error", None)
    assert reply.error["message"] == "the server failed to follow the grammar of structured_outputs"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": [{"role": "user", "content": "a", "x": [[[[[[[[[1]]]]]]]]]}]}, "messages"),
        ({"messages": [{"role": "user", "content": "a"}] * 4097}, "messages"),
        ({"structured_outputs": {"grammar": PANIC}}, "structured_outputs"),
        ({"chat_template_kwargs": {"a": json.loads("[" * 70 + "]" * 70)}}, "chat_template_kwargs"),
        ({"response_format": {"type": "json_object", "schema": {"const": 1e300}}}, "response_format"),
        ({"response_format": {"type": "json_object", "schema": {"$ref": "#"}}}, "response_format"),
        ({"response_format": {"type": "json_object", "schema": {"minProperties": 3}}}, "response_format"),
    ],
)
async def test_an_error_of_the_engine_names_the_field(real: Any, fields: dict[str, Any], param: str) -> None:
    reply = await ask(real, CHAT, {"messages": MESSAGES, "max_tokens": 2, **fields})
    assert (reply.status, reply.error["param"]) == (400, param)
