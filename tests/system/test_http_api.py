"""OpenAI's HTTP API on a real socket, over a fake engine: refusals, streams, disconnects, limits and bad clients."""

from __future__ import annotations

import asyncio
import hashlib
import json
import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from quire.runtime.common.errors import ConfigError, Overloaded
from quire.runtime.common.server_config import ServerConfig
from quire.runtime.common.types import Usage
from quire.runtime.engine.facade import EncoderInfo
from quire.runtime.server import Server
from quire.runtime.server.http import request_cycle
from quire.runtime.server.http.formats import total_usage
from structlog.testing import capture_logs

from tests.support.http_client import HTTPClient, Reply, connection

Serve = Callable[..., Awaitable[Any]]
Eventually = Callable[[Callable[[], bool]], Awaitable[None]]

TLS = Path(__file__).resolve().parents[1] / "data" / "tls"
COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"


async def ask(system: Any, path: str, body: object = None, method: str = "POST", **headers: str) -> Reply:
    async with connection(system) as client:
        return await client.ask(method, path, body, headers)


def complete(prompt: object = "p", **fields: Any) -> dict[str, Any]:
    return {"model": "quire", "prompt": prompt, "max_tokens": 4, **fields}


# Answers


async def test_a_completion(system: Any) -> None:
    reply = await ask(system, COMPLETIONS, complete())
    assert reply.status == 200
    assert reply.headers["content-type"] == "application/json"
    assert reply.json["choices"] == [
        {"index": 0, "text": " p:0é日 p:2é日", "logprobs": None, "finish_reason": "length"},
    ]
    assert reply.json["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 4,
        "total_tokens": 7,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


async def test_a_stream_has_the_same_text_and_usage_only_if_asked(system: Any) -> None:
    events = (await ask(system, COMPLETIONS, complete(stream=True))).events
    assert "".join(each["choices"][0]["text"] for each in events) == " p:0é日 p:2é日"
    assert events[-1]["choices"][0]["finish_reason"] == "length"
    assert all("usage" not in each for each in events)
    body = complete(stream=True, stream_options={"include_usage": True})
    *others, last = (await ask(system, COMPLETIONS, body)).events
    assert all(each["usage"] is None for each in others)
    assert last["choices"] == []
    assert last["usage"]["total_tokens"] == 7


async def test_proxies_pass_on_each_event_of_a_stream(system: Any) -> None:
    headers = (await ask(system, COMPLETIONS, complete(stream=True))).headers
    assert headers["content-type"] == "text/event-stream; charset=utf-8"
    assert (headers["x-accel-buffering"], headers["cache-control"]) == ("no", "no-store")


@pytest.mark.parametrize(("n", "best_of"), [(1, 1), (2, 2)])
async def test_a_stream_may_name_as_many_candidates_as_choices(system: Any, n: int, best_of: int) -> None:
    events = (await ask(system, COMPLETIONS, complete(stream=True, n=n, best_of=best_of))).events
    assert {each["choices"][0]["index"] for each in events} == set(range(n))
    assert system.engine.requests[0].sampling_params.best_of is None


async def test_usage_has_the_times_of_the_phases_only_if_asked(system: Any) -> None:
    times = {"queue_ms": 0.0, "prefill_ms": 0.0, "decode_ms": 0.0, "stall_ms": 0.0}
    asked = complete(["a", "b"], return_timings=True)
    assert (await ask(system, COMPLETIONS, asked)).json["usage"]["timings"] == times
    streamed = {**asked, "stream": True, "stream_options": {"include_usage": True}}
    assert (await ask(system, COMPLETIONS, streamed)).events[-1]["usage"]["timings"] == times
    reply = await ask(system, COMPLETIONS, {**asked, "stream": True})
    assert (reply.status, reply.error["param"]) == (400, "return_timings")


def test_the_times_of_several_prompts_are_the_longest_of_each_phase() -> None:
    usages = [
        Usage(prompt_tokens=2, completion_tokens=3, cached_tokens=1, queue_ms=5, prefill_ms=1, decode_ms=9),
        Usage(prompt_tokens=4, completion_tokens=5, cached_tokens=2, queue_ms=4, prefill_ms=7, stall_ms=2),
    ]
    assert total_usage(usages) == Usage(
        prompt_tokens=6, completion_tokens=8, cached_tokens=3, queue_ms=5, prefill_ms=7, decode_ms=9, stall_ms=2
    )


async def test_choices_of_several_prompts_are_numbered_across_them(system: Any) -> None:
    reply = await ask(system, COMPLETIONS, complete(["a", "b"], n=2))
    assert [(each["index"], each["text"][:7]) for each in reply.json["choices"]] == [
        (0, " a:0é日 "),
        (1, "choice "),
        (2, " b:0é日 "),
        (3, "choice "),
    ]
    assert reply.json["usage"]["prompt_tokens"] == 6
    assert reply.json["usage"]["completion_tokens"] == 16
    events = (await ask(system, COMPLETIONS, complete(["a", "b"], n=2, stream=True))).events
    texts = ["", "", "", ""]
    for event in events:
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == [each["text"] for each in reply.json["choices"]]


async def test_token_ids_as_prompts(system: Any) -> None:
    await ask(system, COMPLETIONS, complete([1, 2, 3]))
    await ask(system, COMPLETIONS, complete([[4], [5, 6]]))
    assert [each.prompt for each in system.engine.requests] == [(1, 2, 3), (4,), (5, 6)]


async def test_logprobs_of_completions(system: Any) -> None:
    body = complete(logprobs=1)
    logprobs = (await ask(system, COMPLETIONS, body)).json["choices"][0]["logprobs"]
    assert logprobs == {
        "tokens": ["\x00", "\x01", "\x02", "\x03"],
        "token_logprobs": [-0.5] * 4,
        "top_logprobs": [{"\x00": -0.5}, {"\x01": -0.5}, {"\x02": -0.5}, {"\x03": -0.5}],
        "text_offset": [0, 1, 2, 3],
    }
    events = (await ask(system, COMPLETIONS, {**body, "stream": True})).events
    parts = [event["choices"][0]["logprobs"] for event in events]
    assert {name: [each for part in parts if part for each in part[name]] for name in logprobs} == logprobs


async def test_the_text_of_a_prompt_is_echoed(system: Any) -> None:
    for prompt, text in (("a", "a"), ([97, 98], "\x01\x02\x03")):  # the fake engine's prompt is 1, 2, 3
        reply = await ask(system, COMPLETIONS, complete(prompt, echo=True))
        assert reply.json["choices"][0]["text"].startswith(text + " ")
        events = (await ask(system, COMPLETIONS, complete(prompt, echo=True, stream=True))).events
        assert "".join(each["choices"][0]["text"] for each in events) == reply.json["choices"][0]["text"]
    several = (await ask(system, COMPLETIONS, complete(["a", "b"], n=2, echo=True))).json["choices"]
    assert [each["text"][:8] for each in several] == ["a a:0é日 ", "achoice ", "b b:0é日 ", "bchoice "]
    assert not any(each.echo for each in system.engine.requests)
    for whole in ({"logprobs": 0}, {"max_tokens": 0}):
        await ask(system, COMPLETIONS, complete([97, 98], **{"echo": True, **whole}))
        assert system.engine.requests[-1].echo, whole


async def test_parameters_arrive_and_defaults_are_openais(system: Any) -> None:
    await ask(system, COMPLETIONS, {"prompt": "p"})
    await ask(
        system,
        COMPLETIONS,
        complete(
            n=2, temperature=0.5, top_p=0.9, top_k=5, min_p=0.1, seed=-1, stop="x", stop_token_ids=[3], ignore_eos=True,
            logit_bias={"7": -2}, frequency_penalty=0.25, presence_penalty=0.5, repetition_penalty=1.5, min_tokens=1,
            include_stop_str_in_output=True, priority=3, user="u", metadata={"a": "b"}, echo=False, tools=None,
        ),
    )  # fmt: skip
    default, given = [each.sampling_params for each in system.engine.requests]
    assert (default.temperature, default.max_tokens, default.seed) == (1.0, 16, None)
    assert (given.temperature, given.top_p, given.top_k, given.min_p, given.seed) == (0.5, 0.9, 5, 0.1, (1 << 64) - 1)
    assert (given.stop, given.stop_token_ids, given.ignore_eos, given.logit_bias) == (("x",), (3,), True, {7: -2.0})
    assert (given.frequency_penalty, given.presence_penalty, given.repetition_penalty) == (0.25, 0.5, 1.5)
    assert (given.n, given.min_tokens, given.include_stop_str_in_output) == (2, 1, True)
    assert system.engine.requests[1].priority == 3


async def test_defaults_are_those_of_generation_config(system: Any) -> None:
    system.engine.default_sampling = {"temperature": 0.6, "top_k": 20}
    await ask(system, COMPLETIONS, complete())
    await ask(system, COMPLETIONS, complete(temperature=0.2))
    default, given = [each.sampling_params for each in system.engine.requests]
    assert (default.temperature, default.top_k, given.temperature, given.top_k) == (0.6, 20, 0.2, 20)


async def test_a_model_says_what_applies_where_a_request_says_nothing(system: Any) -> None:
    cards = []
    page = []
    for recommended in ({}, {"temperature": 0.6, "top_k": 20}):
        system.engine.default_sampling = recommended
        cards.append((await ask(system, "/v1/models/quire", method="GET")).json["default_sampling_params"])
        page.append((await ask(system, "/settings.json", method="GET")).json)
    assert cards == [{"temperature": 1.0}, {"temperature": 0.6, "top_k": 20}]
    assert page == [{"sampling": {"quire": {"temperature": 0.8, "min_p": 0.05}}}, {"sampling": {"quire": {}}}]


async def test_a_chat_fills_the_context_unless_limited(system: Any) -> None:
    messages = [{"role": "developer", "content": [{"type": "text", "text": "a"}]}, {"role": "user", "content": "b"}]
    await ask(system, CHAT, {"messages": messages})
    await ask(system, CHAT, {"messages": messages, "max_tokens": 3})
    await ask(system, CHAT, {"messages": messages, "max_tokens": 3, "max_completion_tokens": 5})
    first, second, third = system.engine.requests
    assert first.messages == ({"role": "system", "content": "a"}, {"role": "user", "content": "b"})
    assert (first.fit_max_tokens, first.sampling_params.max_tokens) == (True, 100)
    assert (second.fit_max_tokens, second.sampling_params.max_tokens) == (False, 3)
    assert (third.fit_max_tokens, third.sampling_params.max_tokens) == (False, 5)
    for fields in ({}, {"max_output_tokens": 3}):
        await ask(system, "/v1/responses", {"input": messages, **fields})
    assert [each.fit_max_tokens for each in system.engine.requests[3:]] == [True, False]


async def test_the_role_of_every_choice_comes_first(system: Any) -> None:
    body = {"messages": [{"role": "user", "content": "b"}], "max_tokens": 2, "n": 3, "stream": True}
    events = (await ask(system, CHAT, body)).events
    assert [each["choices"][0]["index"] for each in events[:3]] == [0, 1, 2]
    role = {"role": "assistant", "content": "", "refusal": None}
    assert [each["choices"][0]["delta"] for each in events[:3]] == [role] * 3
    assert all("role" not in each["choices"][0]["delta"] for each in events[3:])
    assert [each["choices"][0]["delta"] for each in events if each["choices"][0]["finish_reason"]] == [{}] * 3


async def test_models_version_and_tokens(system: Any) -> None:
    models = (await ask(system, "/v1/models", method="GET")).json
    assert [(each["id"], each["capabilities"]) for each in models["data"]] == [("quire", ["completion", "chat"])]
    assert (await ask(system, "/v1/models/quire", method="GET")).json == models["data"][0]
    assert (await ask(system, "/v1/models/other", method="GET")).error["code"] == "model_not_found"
    assert "version" in (await ask(system, "/version", method="GET")).json
    assert (await ask(system, "/health", method="GET")).status == 200
    tokens = (await ask(system, "/tokenize", {"prompt": "ab", "return_token_strs": True})).json
    assert tokens == {"count": 3, "max_model_len": 100, "tokens": [0, 97, 98], "token_strs": ["\x00", "a", "b"]}
    assert (await ask(system, "/tokenize", {"prompt": "ab", "add_special_tokens": False})).json["tokens"] == [97, 98]
    chat = {"messages": [{"role": "user", "content": "ab"}]}
    assert (await ask(system, "/tokenize", chat)).json["tokens"] == [97, 98]
    assert (await ask(system, "/detokenize", {"tokens": [97, 98]})).json == {"prompt": "ab"}


async def test_a_model_whose_name_has_a_slash_is_found(serve: Serve) -> None:
    system = await serve(served_model_name="org/model")
    card = (await ask(system, "/v1/models/org%2Fmodel", method="GET")).json
    assert card == (await ask(system, "/v1/models/org/model", method="GET")).json
    assert card["id"] == "org/model"


async def test_an_embedding_model_beside_one_with_images_takes_none(
    system: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = EncoderInfo(vocab_size=256, max_model_len=100, dimensions=4, name="encoder")
    info = msgspec.structs.replace(system.engine.info, max_images=1, encoder=encoder)
    monkeypatch.setattr(type(system.engine), "info", info)
    cards = (await ask(system, "/v1/models", method="GET")).json["data"]
    assert [(each["id"], each.get("input_modalities")) for each in cards] == [
        ("quire", ["text", "image"]),
        ("encoder", None),
    ]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"content": "llama-server's name of it"}, "prompt"),
        ("/tokenize", {"prompt": ["a"]}, "prompt"),
        ("/tokenize", {"messages": [{"role": "user", "content": "a"}], "prompt": "b"}, "prompt"),
        ("/tokenize", {"prompt": "a", "tools": []}, "tools"),
        (
            "/tokenize",
            {"messages": [{"role": "user", "content": "a"}], "add_special_tokens": True},
            "add_special_tokens",
        ),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/detokenize", {"tokens": [True]}, "tokens"),
    ],
)
async def test_what_is_to_be_tokenized_is_there_once(system: Any, path: str, body: Any, param: str) -> None:
    reply = await ask(system, path, body)
    assert (reply.status, reply.error["param"]) == (400, param)


async def test_what_cannot_be_tokenized_keeps_no_text(system: Any) -> None:
    for body in ({"prompt": ""}, {"messages": [{"role": "user", "content": ""}]}):
        assert (await ask(system, "/tokenize", body)).status == 400
    assert system.server._context.requests.texts.num_bytes == 0


async def test_a_request_has_at_most_256_prompts(system: Any) -> None:
    bodies = [complete(["a"] * count, max_tokens=1) for count in (256, 257)]
    assert [(await ask(system, COMPLETIONS, body)).status for body in bodies] == [200, 400]


async def test_a_tenants_requests_take_turns(system: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    turns = system.server._context.keyring.authenticate(None).frame_turns
    wait = turns.wait
    waits = []

    async def counted() -> int:
        waits.append(None)
        return int(await wait())

    monkeypatch.setattr(turns, "wait", counted)
    assert (await ask(system, COMPLETIONS, complete())).status == 200
    assert len(waits) == 1


async def test_a_body_is_no_pending_input_once_it_is_read(system: Any) -> None:
    async with connection(system) as client:
        assert (await client.ask("POST", COMPLETIONS, complete("a" * 1000))).status == 200
        assert system.server._context.pending.num_bytes == 0


async def test_a_body_counts_for_the_tenant_of_its_request(serve: Serve, eventually: Eventually) -> None:
    system = await serve(token="secret")
    pending = system.server._context.pending
    async with connection(system) as client:
        client.send("POST", COMPLETIONS, b"{", {"authorization": "Bearer secret", "content-length": "1000"})
        await eventually(lambda: pending.num_bytes == 1)
        assert {tenant: each.num_bytes for tenant, each in pending.tenants.items() if each.num_bytes} == {"": 1}


async def test_operators_see_the_tokens_of_a_request(system: Any, eventually: Eventually) -> None:
    async with connection(system) as client:
        client.send("POST", COMPLETIONS, complete("hold"))
        await eventually(lambda: [each.generated for each in system.server.live_requests()] == [2])


async def test_an_answer_has_the_clients_id_of_its_request_or_one_of_its_own(system: Any) -> None:
    own = await ask(system, "/version", method="GET", **{"x-request-id": "My.id-1_"})
    assert own.headers["x-request-id"] == "My.id-1_"
    ids = [own.headers["x-request-id"]]
    for given in ("", "a b", "a" * 129, "é"):
        reply = await ask(system, COMPLETIONS, complete(stream=True), **{"x-request-id": given})
        ids.append(reply.headers["x-request-id"])
        assert ids[-1] != given
    assert len(set(ids)) == 5


async def test_a_connection_is_kept_and_head_has_no_body(system: Any) -> None:
    async with connection(system) as client:
        assert (await client.ask("POST", COMPLETIONS, complete())).status == 200
        assert (await client.ask("POST", COMPLETIONS, complete(stream=True))).events
        head = await client.ask("HEAD", "/v1/models")
        assert head.status == 200
        assert head.content == b""
        assert (await client.ask("GET", "/v1/models")).json["object"] == "list"


async def test_requests_sent_ahead_are_answered_in_order(system: Any) -> None:
    async with connection(system) as client:
        for name in "abc":
            client.send("POST", COMPLETIONS, complete(name))
        replies = [await client.receive() for _ in range(3)]
    assert [reply.json["choices"][0]["text"][:3] for reply in replies] == [" a:", " b:", " c:"]


# Refusals


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": "hot"}, "temperature"),
        ({"top_k": 1.5}, "top_k"),
        ({"stop": [1]}, "stop"),
        ({"seed": "x"}, "seed"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"stream": 1}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
        ({"tools": []}, "tools"),
        ({"response_format": "json_object"}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": []}}}, "response_format"),
        ({"response_format": {"type": "text", "strict": True}}, "response_format"),
        ({"suffix": "x"}, "suffix"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": True}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "echo": True}, "prompt_logprobs"),
        ({"echo": 1}, "echo"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"cache_salt": 3}, "cache_salt"),
        ({"prompt_cache_key": 3}, "prompt_cache_key"),
        ({"service_tier": "flex"}, "service_tier"),
        ({"return_token_ids": True, "echo": True}, "return_token_ids"),
        ({"structured_outputs": {"regex": 1}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs"),
        ({"structured_outputs": {"structural_tag": "a"}}, "structured_outputs"),
        ({"structured_outputs": {"choice": ["a", 1]}}, "structured_outputs"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs"),
        ({"structured_outputs": "a"}, "structured_outputs"),
        ({"guided_regex": ""}, "guided_regex"),
        ({"guided_choice": "a"}, "guided_choice"),
        ({"grammar": ["root"]}, "grammar"),
        ({"regex": "a", "response_format": {"type": "json_object"}}, "regex"),
        ({"messages": []}, "messages"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"best_of": 3, "stream": True}, "best_of"),
        ({"model": 3}, "model"),
    ],
)
async def test_a_wrong_field_is_named(system: Any, fields: dict[str, Any], param: str) -> None:
    reply = await ask(system, COMPLETIONS, {**complete(), **fields})
    assert reply.status == 400
    assert reply.error["type"] == "invalid_request_error"
    assert reply.error["param"] == param
    assert param.partition(".")[0] in reply.error["message"]
    assert reply.headers["x-should-retry"] == "false"
    assert system.engine.requests == []


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": None}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "model", "content": "x"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
        ({"messages": [[0] * 70_000]}, "messages"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": 2}, "logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_completion_tokens": 1 << 40}, "max_completion_tokens"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"best_of": 2}, "best_of"),
        ({"prompt": "x"}, "prompt"),
    ],
)
async def test_a_wrong_field_of_a_chat_is_named(system: Any, fields: dict[str, Any], param: str) -> None:
    reply = await ask(system, CHAT, {"messages": [{"role": "user", "content": "b"}], **fields})
    assert reply.status == 400
    assert reply.error["param"] == param
    assert system.engine.requests == []


THOUGHT = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "So."}]}
HELLO = {"role": "user", "content": "Hello"}


@pytest.mark.parametrize(
    ("items", "reason"),
    [
        ([HELLO, {"role": "user", "content": 5}], "input[1]: content must be text"),
        ([THOUGHT, HELLO, {"role": "user", "content": 5}], "input[2]: content must be text"),
        ([THOUGHT, {"role": "assistant", "content": 5}], "input[1]: content must be text"),
        ([HELLO, {"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}], "input[1]: content[0]"),
        ([HELLO, {"type": "reasoning", "summary": "So."}], "input[1]: summary must be a list"),
        ([{"type": "reasoning", "content": 5, "summary": []}, HELLO], "input[0]: content must be a list"),
        ([{"type": "reasoning", "content": ["So."]}, HELLO], "input[0]: content[0] must be a part"),
        ([{"type": "reasoning", "content": [{"type": "reasoning_text"}]}, HELLO], "input[0]: content[0] must be"),
        ([{"type": "reasoning", "summary": [{"type": "x", "text": "So."}]}, HELLO], "input[0]: summary[0] must be"),
        ([THOUGHT], "input must have a message"),
    ],
)
async def test_a_wrong_item_of_a_response_is_named_by_its_place(system: Any, items: list[Any], reason: str) -> None:
    reply = await ask(system, "/v1/responses", {"input": items})
    assert (reply.status, reply.error["param"]) == (400, "input")
    assert reply.error["message"].startswith(reason)
    if len(items) > 1:
        assert (await ask(system, "/v1/responses", {"input": items, "instructions": "Be brief."})).error == reply.error
        stored = await ask(system, "/v1/responses", {"input": "Hello", "store": True, "max_output_tokens": 1})
        next_one = {"input": items, "previous_response_id": stored.json["id"]}
        assert (await ask(system, "/v1/responses", next_one)).error == reply.error


async def test_items_of_reasoning_have_a_content_or_a_summary_or_none(system: Any) -> None:
    content = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "So."}], "summary": []}
    for item in (THOUGHT, content, {"type": "reasoning", "summary": [], "content": None, "encrypted_content": "x"}):
        body = {"input": [HELLO, item, {"role": "assistant", "content": "Hi"}, HELLO], "max_output_tokens": 1}
        assert (await ask(system, "/v1/responses", body)).status == 200


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"type": "function_call_output"}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"store": 1}, "store"),
        ({"background": True}, "background"),
        ({"service_tier": "scale"}, "service_tier"),
        ({"service_tier": []}, "service_tier"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"include": "x"}, "include"),
        ({"text": {"format": {"type": "xml"}}}, "text.format"),
        ({"text": {"format": {"type": "text", "strict": True}}}, "text.format"),
        ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {}, "strict": 1}}}, "strict"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": 5}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": "{}"}}}, "text.format.schema"),
        ({"text": {"verbosity": "brief"}}, "text.verbosity"),
        ({"text": {"words": 5}}, "text.words"),
        ({"reasoning": {"effort": "low", "budget": 5}}, "reasoning"),
        ({"reasoning": "low"}, "reasoning"),
        ({"tools": [{"type": "function", "name": "f", "parameters": {"type": "array"}}]}, "tools"),
        ({"tools": [5]}, "tools"),
        ({"include": ["reasoning.text"]}, "include"),
        ({"n": 2}, "n"),
        ({"max_output_tokens": "x"}, "max_output_tokens"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"include": ["message.output_text.logprobs"], "top_logprobs": 21}, "top_logprobs"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"stream": True, "stream_options": "all"}, "stream_options"),
        ({"metadata": "x"}, "metadata"),
        ({"metadata": {"x": 1}}, "metadata"),
        ({"user": 5}, "user"),
    ],
)
async def test_a_wrong_field_of_a_response_is_named(system: Any, fields: dict[str, Any], param: str) -> None:
    reply = await ask(system, "/v1/responses", {"input": "a", "store": False, "tools": [], **fields})
    assert reply.status == 400
    assert reply.error["param"] == param
    assert system.engine.requests == []


async def test_fields_that_ask_for_nothing_are_accepted(system: Any) -> None:
    nothing = {"logprobs": False, "top_logprobs": 0, "modalities": ["text"], "audio": None, "best_of": 1, "suffix": ""}
    body = {"messages": [{"role": "user", "content": "b"}], "max_tokens": 2, "tools": [], "logit_bias": {}, **nothing}
    assert (await ask(system, CHAT, body)).status == 200
    assert system.engine.requests[0].sampling_params.logprobs is None


async def test_an_unknown_field_is_ignored_and_counted(system: Any) -> None:
    assert (await ask(system, COMPLETIONS, complete(flavor="mint", color=None))).status == 200
    assert "quire_http_unknown_fields_total 1.0" in system.metrics()


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'"x"',
        b'{"n": NaN}',
        b'{"n": Infinity}',
        b'{"n": 1e999}',
        b'{"n": ' + b"9" * 5000 + b"}",
        b'{"prompt": "a", "prompt": "b"}',
        b'{"prompt": "a", "metadata": {"x": 1, "x": 2}}',
        b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "a", "metadata": {"\\udc00\\ud800": 1}}',
        b'{"\\ud800": 1, "\\ud800": 2}',
        '{"prompt": "a"}'.encode("utf-16"),
        b'{"prompt": "a"} x',
        b'{"x": [' + b"[]," * 70_000 + b"1]}",
        b'{"x": [' + b"1," * 270_000 + b"1]}",
    ],
)
async def test_a_body_that_is_not_strict_json(system: Any, body: bytes) -> None:
    reply = await ask(system, COMPLETIONS, body)
    assert reply.status == 400
    assert "body" in reply.error["message"] or "number" in reply.error["message"]
    assert system.engine.requests == []


async def test_texts_may_have_any_number_of_commas_and_brackets(system: Any) -> None:
    system.engine.text_bytes = 5
    for prompt in ("," * 600_000, '[{"\\' * 100_000):
        assert (await ask(system, COMPLETIONS, complete(prompt))).status == 200
        assert system.engine.requests[-1].prompt == prompt
    assert system.server._context.requests.texts.num_bytes == 0


async def test_long_bodies_of_a_tenant_that_wait_to_be_read_are_limited(serve: Serve) -> None:
    system = await serve(max_text_bytes=100_000)
    reply = await ask(system, COMPLETIONS, complete("a" * 100_000))
    assert (reply.status, reply.error["code"]) == (429, "insufficient_quota")
    assert "max_text_bytes" in reply.error["message"]
    assert system.engine.requests == []
    assert system.server._context.requests.texts.num_bytes == 0


async def test_a_body_of_quotes_takes_linear_time(system: Any) -> None:
    for unit in (b'"', b'\\"', b'"[', b'"\\'):
        body = b'{"a":"' + b"[" * 70_000 + unit * 500_000
        assert (await ask(system, COMPLETIONS, body)).status == 400


@pytest.mark.parametrize(
    ("method", "path", "status", "text"),
    [
        ("GET", "/nothing", 404, "/v1/chat/completions"),
        ("POST", "/chat/completions", 404, "ends with /v1, once"),
        ("POST", "/v1/v1/completions", 404, "ends with /v1, once"),
        ("POST", "/v1/completions/", 404, "no slash at its end"),
        ("POST", "/v1/chat/completions/", 404, "no slash at its end"),
        ("GET", "/v1/embeddings", 405, "allows POST"),
        ("GET", "/v1/completions", 405, "allows POST"),
        ("DELETE", "/v1/models", 405, "allows GET, HEAD"),
        ("GET", "/v1/../v1/models", 404, ""),
        ("GET", "//v1/models", 404, ""),
        ("GET", "/v1/models%2f", 404, ""),
        ("GET", "/v1/models/..%2f..%2fetc%2fpasswd", 404, "does not exist"),
        ("GET", "/v1/models/", 404, "no slash at its end"),
        ("POST", "/v1/tokenize", 404, "the path is /tokenize, without /v1"),
        ("POST", "/v1/files", 404, "this path needs --batch-folder"),
        ("GET", "/api/tags", 404, "this path needs a port for Ollama's clients (--ollama-port)"),
        ("GET", "http://localhost/v1/model", 404, "'/v1/model'"),
        ("GET", "http://evil.example/v1/models", 403, "'evil.example'"),
        ("GET", "http://localhost@evil.example/v1/models", 403, "evil"),
    ],
)
async def test_a_wrong_path_or_method(system: Any, method: str, path: str, status: int, text: str) -> None:
    reply = await ask(system, path, method=method)
    assert reply.status == status
    assert text in reply.error["message"]


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/models/"),
        ("GET", "/v1/models/quire/"),
        ("GET", "/health/"),
        ("GET", "/version/?a=b"),
        ("POST", "/v1/completions/"),
        ("POST", "/v1/chat/completions/"),
        ("POST", "/v1/responses/"),
        ("POST", "/v1/responses/input_tokens/"),
        ("POST", "/tokenize/"),
        ("GET", "/chat.js/"),
    ],
)
async def test_a_slash_at_the_end_makes_another_path(system: Any, method: str, path: str) -> None:
    reply = await ask(system, path, complete() if method == "POST" else None, method=method)
    assert reply.status in (404, 405)
    assert system.engine.requests == []


@pytest.mark.parametrize("target", ["http://127.0.0.1:8000/version", "HTTP://localhost/version?a=b", "/version"])
async def test_a_target_may_be_a_whole_url(system: Any, target: str) -> None:
    reply = await ask(system, target, method="GET")
    assert (reply.status, list(reply.json)) == (200, ["version"])


async def test_the_host_of_a_whole_url_counts_and_not_the_header(system: Any) -> None:
    assert (await ask(system, "http://localhost/version", method="GET", host="evil.example")).status == 200
    assert (await ask(system, "http://localhost", method="GET")).headers["content-type"].startswith("text/html")


async def test_a_body_that_is_not_wanted_or_missing(system: Any) -> None:
    unwanted = await ask(system, "/v1/models", {"a": 1}, method="GET")
    assert (unwanted.status, unwanted.error["message"]) == (413, "this method of this path takes no body")
    missing = await ask(system, COMPLETIONS)
    assert (missing.status, "the body is empty" in missing.error["message"]) == (400, True)


async def test_a_refusal_says_when_to_retry(system: Any) -> None:
    reply = await ask(system, COMPLETIONS, complete("full"))
    assert reply.status == 429
    assert reply.error == {
        "message": "the queue is full",
        "type": "rate_limit_error",
        "param": None,
        "code": "rate_limit_exceeded",
    }
    assert (reply.headers["retry-after-ms"], reply.headers["retry-after"]) == ("250", "1")
    assert reply.headers["x-should-retry"] == "true"
    streamed = await ask(system, COMPLETIONS, complete("full", stream=True))
    assert (streamed.status, streamed.error) == (429, reply.error)


async def test_requests_that_the_engine_never_sees_are_counted_as_rejected(system: Any) -> None:
    assert (await ask(system, COMPLETIONS, complete(temperature="hot"))).status == 400
    assert (await ask(system, "/tokenize", {"prompt": 3})).status == 400
    assert 'quire_admission_rejections_total{reason="invalid_argument"} 2.0' in system.metrics()


async def test_one_refused_prompt_refuses_all(system: Any) -> None:
    assert (await ask(system, COMPLETIONS, complete(["a", "full", "b"]))).status == 429
    assert system.engine.live == []


async def test_prompts_after_a_refused_one_are_not_submitted(system: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = system.server._context.requests
    submitted = []
    submit = requests.submit

    def submit_first(tenant: Any, request_id: int, request: Any) -> Any:
        submitted.append(request.prompt)
        if request.prompt == "b":
            raise Overloaded("the queue is full", 250)
        return submit(tenant, request_id, request)

    monkeypatch.setattr(requests, "submit", submit_first)
    assert (await ask(system, COMPLETIONS, complete(["a", "b", "c"]))).status == 429
    assert submitted == ["a", "b"]


def write_limits_of_ann(folder: Path, limits: str) -> str:
    keys = folder / "keys.toml"
    keys.write_text(f'[ann]\nkeys = ["{hashlib.sha256(b"ann").hexdigest()}"]\n{limits}\n')
    keys.chmod(0o600)
    return str(keys)


@pytest.mark.parametrize(
    ("limits", "most", "message"),
    [
        ("max_concurrent_requests = 2", 2, "3 prompts are as many requests, and this tenant may have 2 at a time"),
        ("requests_per_minute = 2", 2, "3 prompts are as many requests, and this tenant may send 2 at once"),
        (
            "requests_per_minute = 9\nburst = 4",
            4,
            "5 prompts are as many requests, and this tenant may send 4 at once",
        ),
    ],
)
async def test_prompts_that_never_fit_a_tenants_limit_are_refused_for_good_and_not_submitted(
    serve: Serve, tmp_path: Any, limits: str, most: int, message: str
) -> None:
    system = await serve(auth_tokens=write_limits_of_ann(tmp_path, limits))
    for _ in range(3):
        reply = await ask(system, COMPLETIONS, complete(["a"] * (most + 1)), authorization="Bearer ann")
        assert (reply.status, reply.error["code"]) == (429, "insufficient_quota")
        assert reply.error["message"] == f"{message}; send fewer prompts in one request"
        assert reply.headers["x-should-retry"] == "false"
    assert system.engine.requests == []
    assert 'quire_admission_rejections_total{reason="resource_exhausted"} 3.0' in system.metrics()
    assert (await ask(system, COMPLETIONS, complete(["a"] * most), authorization="Bearer ann")).status == 200


async def test_prompts_that_do_not_fit_beside_live_requests_may_be_sent_again(
    serve: Serve, tmp_path: Any, eventually: Eventually
) -> None:
    system = await serve(auth_tokens=write_limits_of_ann(tmp_path, "max_concurrent_requests = 2"))
    async with connection(system) as client:
        client.send("POST", COMPLETIONS, complete("hold", stream=True), {"authorization": "Bearer ann"})
        await client.read_until(b"hold:0")
        reply = await ask(system, COMPLETIONS, complete(["a", "b"]), authorization="Bearer ann")
        assert (reply.status, reply.error["code"]) == (429, "rate_limit_exceeded")
        assert reply.headers["x-should-retry"] == "true"
        assert [request.prompt for request in system.engine.requests] == ["hold"]
        assert (await ask(system, COMPLETIONS, complete(["a"]), authorization="Bearer ann")).status == 200
    await eventually(lambda: not system.engine.live)


async def test_prompts_whose_texts_never_fit_together_are_refused_for_good(serve: Serve) -> None:
    system = await serve(max_text_bytes=100_000)
    reply = await ask(system, COMPLETIONS, complete(["a" * 40_000] * 3))
    assert (reply.status, reply.error["code"]) == (429, "insufficient_quota")
    assert system.engine.requests == []
    assert (await ask(system, COMPLETIONS, complete(["a" * 40_000] * 2))).status == 200


async def test_an_error_in_a_stream_is_its_last_event(system: Any) -> None:
    *events, last = (await ask(system, COMPLETIONS, complete("fail", stream=True))).data
    assert events
    assert json.loads(last)["error"]["message"] == "the logits are NaN"
    whole = await ask(system, COMPLETIONS, complete("fail"))
    assert (whole.status, whole.headers["x-should-retry"]) == (500, "false")
    both = await ask(system, COMPLETIONS, complete(["fail", "crash"]))
    assert both.error == whole.error, "the first one counts"
    bug = await ask(system, COMPLETIONS, complete("crash"))
    assert (bug.status, "division" in bug.error["message"]) == (500, False)


async def test_keys_are_bearer_tokens(serve: Serve) -> None:
    system = await serve(token="secret")
    for headers in ({}, {"authorization": "Bearer no"}, {"authorization": "Basic secret"}):
        reply = await ask(system, COMPLETIONS, complete(), **headers)
        assert (reply.status, reply.error["code"]) == (401, "invalid_api_key")
        assert reply.headers["www-authenticate"] == "Bearer"
    assert (await ask(system, COMPLETIONS, complete(), authorization="bearer secret")).status == 200
    assert (await ask(system, "/v1/models", method="GET")).status == 401
    assert (await ask(system, "/tokenize", {"prompt": "a"})).status == 401
    assert (await ask(system, "/health", method="GET")).status == 200


async def test_tenants_have_their_own_limits(serve: Serve, tmp_path: Any) -> None:
    keys = {name: hashlib.sha256(name.encode()).hexdigest() for name in ("ann", "ben")}
    path = tmp_path / "keys.toml"
    path.write_text(f'[ann]\nkeys = ["{keys["ann"]}"]\nrequests_per_minute = 1\n[ben]\nkeys = ["{keys["ben"]}"]\n')
    path.chmod(0o600)
    system = await serve(auth_tokens=str(path))
    async with connection(system) as client:
        for name, status in (("ann", 200), ("ben", 200), ("ann", 429), ("ben", 200)):
            reply = await client.ask("POST", COMPLETIONS, complete(), {"authorization": f"Bearer {name}"})
            assert reply.status == status
    assert [each.tenant for each in system.engine.requests] == ["ann", "ben", "ben"]


async def test_output_counts_for_the_tenant_of_its_own_request(
    serve: Serve, tmp_path: Any, eventually: Eventually
) -> None:
    """A connection's earlier tenant exceeds its share of unsent output: only that tenant's requests end."""
    keys = tmp_path / "keys.toml"
    digests = {name: hashlib.sha256(name.encode()).hexdigest() for name in ("ann", "ben")}
    keys.write_text("".join(f'[{name}]\nkeys = ["{digest}"]\n' for name, digest in digests.items()))
    keys.chmod(0o600)
    system = await serve(auth_tokens=str(keys), max_frame_bytes=65_536, max_unsent_bytes=2 * 65_540)
    unsent = system.server._context.unsent
    async with connection(system) as shared, connection(system) as first, connection(system) as second:
        assert (await shared.ask("POST", COMPLETIONS, complete(), {"authorization": "Bearer ann"})).status == 200
        system.engine.text_bytes = 60_000
        shared.send("POST", COMPLETIONS, complete("hold"), {"authorization": "Bearer ben"})
        await eventually(lambda: unsent.of("ben").num_bytes >= 60_000)
        system.engine.text_bytes = 35_000
        first.send("POST", COMPLETIONS, complete("hold"), {"authorization": "Bearer ann"})
        await eventually(lambda: unsent.of("ann").num_bytes >= 35_000)
        second.send("POST", COMPLETIONS, complete("hold"), {"authorization": "Bearer ann"})
        await eventually(lambda: len(system.engine.requests) == 4 and len(system.engine.live) == 2)
        assert sorted(each.request.tenant for each in system.engine.live) == ["ann", "ben"]


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.evil"])
async def test_a_site_that_points_its_name_here_is_refused(system: Any, host: str) -> None:
    for headers in ({}, {"authorization": "Bearer x"}, {"authorization": "Basic eDp5"}):
        reply = await ask(system, "/v1/models", method="GET", host=host, **headers)
        assert reply.status == 403


@pytest.mark.parametrize("host", ["localhost:8000", "LOCALHOST", "127.0.0.1:8000", "[::1]:8000", "192.168.1.2"])
async def test_addresses_are_accepted_as_host(system: Any, host: str) -> None:
    assert (await ask(system, "/v1/models", method="GET", host=host)).status == 200


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"content-type": "text/plain"}, 415),
        ({"content-type": "application/x-www-form-urlencoded"}, 415),
        ({"content-encoding": "gzip"}, 415),
        ({"content-type": "application/json; charset=utf-8"}, 200),
    ],
)
async def test_only_plain_json_is_read(system: Any, headers: dict[str, str], status: int) -> None:
    assert (await ask(system, COMPLETIONS, complete(), **headers)).status == status


async def test_no_other_site_may_read_answers(system: Any) -> None:
    reply = await ask(system, "/v1/models", method="GET", origin="http://evil.example")
    assert not any(name.startswith("access-control") for name in reply.headers)
    assert (await ask(system, COMPLETIONS, method="OPTIONS", origin="http://evil.example")).status == 405


async def test_a_prompt_that_fails_cancels_the_others(system: Any, eventually: Eventually) -> None:
    assert (await ask(system, COMPLETIONS, complete(["hold", "fail", "hold"]))).status == 500
    await eventually(lambda: not system.engine.live)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_that_the_engine_cancels_has_not_finished(
    system: Any, eventually: Eventually, stream: bool
) -> None:
    """The first prompt of the request is answered; the engine cancels the second one."""
    async with connection(system) as client:
        client.send("POST", COMPLETIONS, complete(["p", "hold"], stream=stream))
        await eventually(lambda: [each.request.prompt for each in system.engine.live] == ["hold"])
        system.engine.live[0].cancel()
        reply = await client.receive()
    assert json.loads(reply.data[-1])["error"]["code"] == "cancelled"
    assert reply.status == (200 if stream else 499)


# Clients that leave


async def test_a_client_that_leaves_cancels(system: Any, eventually: Eventually) -> None:
    for stream in (False, True):
        async with connection(system) as client:
            client.send("POST", COMPLETIONS, complete("hold", stream=stream))
            await eventually(lambda: bool(system.engine.live))
        await eventually(lambda: not system.engine.live)
    assert 'quire_cancelled_total{cause="disconnect"} 2.0' in system.metrics()


async def test_a_client_that_leaves_while_its_prompt_is_prepared_cancels(system: Any, eventually: Eventually) -> None:
    system.engine.submitting.clear()
    async with connection(system) as client:
        client.send("POST", COMPLETIONS, complete("hold"))
        await eventually(lambda: bool(system.engine.requests))
    await eventually(lambda: 'quire_cancelled_total{cause="disconnect"} 1.0' in system.metrics())
    system.engine.submitting.set()
    await eventually(lambda: not system.server.num_connections)
    assert system.engine.live == []


async def test_every_prompt_of_a_client_that_leaves_is_cancelled(system: Any, eventually: Eventually) -> None:
    async with connection(system) as client:
        client.send("POST", COMPLETIONS, complete(["hold", "hold", "p"]))
        await eventually(lambda: len(system.engine.live) == 2)
    await eventually(lambda: not system.engine.live)


async def test_a_silent_stream_is_kept_alive(
    system: Any, eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_cycle, "KEEP_ALIVE_S", 0.01)
    async with connection(system) as client:
        client.send("POST", COMPLETIONS, complete("hold", stream=True))
        await client.read_until(b"\r\n:\n\r\n")


# Clients that read or send too little or too much


async def test_a_client_that_does_not_read_is_cut_off(serve: Serve, eventually: Eventually) -> None:
    system = await serve(max_frame_bytes=65_536, max_outgoing_bytes=65_540)
    system.engine.text_bytes = 30_000
    async with connection(system) as client:
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        client.send("POST", COMPLETIONS, complete(max_tokens=100, n=1, stream=True))
        for _ in range(40):
            client.send("POST", COMPLETIONS, complete(max_tokens=100, stream=True))
        await eventually(lambda: not system.server.num_connections)
    assert system.engine.live == []


async def test_an_answer_beyond_the_limit_is_refused(serve: Serve) -> None:
    system = await serve(max_frame_bytes=65_536, max_outgoing_bytes=65_540)
    system.engine.text_bytes = 30_000
    reply = await ask(system, COMPLETIONS, complete(max_tokens=100))
    assert reply.status == 400
    assert "stream it" in reply.error["message"]


@pytest.mark.parametrize("fields", [{}, {"store": True}])
async def test_an_answer_that_other_answers_leave_no_room_for_may_be_tried_again(serve: Serve, fields: Any) -> None:
    system = await serve(max_frame_bytes=65_536, max_unsent_bytes=65_540)
    system.engine.text_bytes = 30_000
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2, **fields}
    unsent = system.server._context.unsent.of("")  # bytes of the only tenant
    unsent.add(60_000)
    reply = await ask(system, CHAT, body)
    assert (reply.status, reply.headers["x-should-retry"]) == (429, "true")
    assert "beside other answers" in reply.error["message"]
    unsent.add(-60_000)
    assert (await ask(system, CHAT, body)).status == 200


async def test_a_long_body_is_refused_before_it_is_read(serve: Serve) -> None:
    system = await serve(max_frame_bytes=65_536)
    async with connection(system) as client:
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        client.writer.write(head.replace(b"host: x", b"host: localhost") + b"content-length: 70000\r\n\r\n")
        assert (await client.receive()).status == 413
        assert await client.is_closed()
    async with connection(system) as client:
        client.writer.write(head.replace(b"host: x", b"host: localhost") + b"transfer-encoding: chunked\r\n\r\n")
        client.writer.write(b"10000\r\n" + b" " * 0x10000 + b"\r\n1\r\n \r\n0\r\n\r\n")  # one byte too many
        assert (await client.receive()).status == 413
    async with connection(system) as client:
        client.writer.write(b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\ncontent-length: 3\r\n\r\nabc")
        assert (await client.receive()).status == 413


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x00\xa5\x01\x00\x00\xa1\x03\x03" + b"x" * 40 + b"\n\n",
        b"nonsense\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\nhost : localhost\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\n{}",
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: -1\r\n\r\n{}",
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        b"transfer-encoding: chunked\r\n\r\nzz\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: gzip, chunked\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: localhost\r\nx: " + b"y" * 33_000 + b"\r\n\r\n",
        b"GET /version HTTP/1.1\r\nhost: localhost\r\n" + b"a:\r\n" * 256 + b"\r\n",
    ],
)
async def test_bytes_that_are_not_http(system: Any, data: bytes) -> None:
    async with connection(system) as client:
        client.writer.write(data)
        reply = await client.receive()
        assert 400 <= reply.status < 600
        assert reply.error["message"]
        assert await client.is_closed()
    assert (await ask(system, COMPLETIONS, complete())).status == 200


CHUNKED = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
CHUNKED += b"transfer-encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (CHUNKED + b"1\r\n \r\n" * 1100, "chunks of few bytes"),
        (CHUNKED + b"0\r\n" + b"a: b\r\n" * 2000, "the last fields, have at most 1024 bytes"),
        (CHUNKED + b"0\r\nx:" + b" " * 300 + b"\0\r\n\r\n", "neither a line nor JSON"),
        (CHUNKED + b"0\r\nx:\r\n" + b" \r\n" * 100 + b" \r \r\n\r\n", "neither a line nor JSON"),
        (b"GET /version HTTP/1.1\r\nhost: localhost\r\nx:" + b" " * 30_000 + b"\0\r\n\r\n", "no line may have"),
    ],
)
async def test_what_takes_h11_long_to_parse_is_refused_before(system: Any, data: bytes, text: str) -> None:
    async with connection(system) as client:
        client.writer.write(data)
        reply = await client.receive()
        assert reply.status == 400
        assert text in reply.error["message"]


async def test_a_body_in_chunks_is_plain_json_too(system: Any) -> None:
    async with connection(system) as client:
        client.writer.write(CHUNKED.replace(b"application/json", b"text/plain") + b"2\r\n{}\r\n0\r\n\r\n")
        assert (await client.receive()).status == 415


async def test_a_body_may_come_in_many_chunks(system: Any) -> None:
    body = json.dumps(complete()).encode()
    text = b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"1000\r\n" + b" " * 4096 + b"\r\n" + b"1\r\n\t\r\n" * 500
    async with connection(system) as client:
        client.writer.write((CHUNKED + text + b"0\r\nx: y\r\n\r\n") * 2)
        assert [(await client.receive()).status for _ in range(2)] == [200, 200]


HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
BODY = json.dumps(complete()).encode()
IN_CHUNKS = b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)
LENGTH = b"content-length: %d\r\n\r\n" % len(BODY)
TE = b"transfer-encoding: chunked\r\n"


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (HEAD + TE + b"content-length: 6\r\n\r\n" + IN_CHUNKS, "content-length and transfer-encoding must not"),
        (HEAD + b"content-length: 6\r\n" + TE + b"\r\n" + IN_CHUNKS, "content-length and transfer-encoding must not"),
        (HEAD.replace(b"1.1", b"1.0") + TE + b"\r\n" + IN_CHUNKS, "HTTP/1.0 has no transfer-encoding"),
        (
            HEAD + b"authorization: Bearer a\r\nAuthorization: Bearer b\r\n" + LENGTH + BODY,
            "authorization must not occur",
        ),
        (HEAD + b"content-type: text/plain\r\n" + LENGTH + BODY, "content-type must not occur twice"),
        (HEAD + b"idempotency-key: a\r\nidempotency-key: b\r\n" + LENGTH + BODY, "idempotency-key must not"),
        (HEAD.replace(b"localhost\r\n", b"localhost\n") + LENGTH + BODY, "not with LF alone"),
        (HEAD.replace(b"1.1\r\n", b"1.1\n") + LENGTH + BODY, "not with LF alone"),
        (HEAD + LENGTH.removesuffix(b"\r\n") + b"\n" + BODY, "not with LF alone"),
        (HEAD + b"x: a\r\n b\r\n" + LENGTH + BODY, "must not continue on the next line"),
        (HEAD + b"x: a\r\n\t\r\n" + LENGTH + BODY, "must not continue on the next line"),
        (HEAD + b"content-length: +5\r\n\r\n12345", "bad Content-Length"),
        (HEAD + b"content-length: 5\r\ncontent-length: 6\r\n\r\n12345", "conflicting Content-Length"),
        (HEAD + b"content-length: 0x5\r\n\r\n12345", "bad Content-Length"),
        (HEAD + b"x : a\r\n" + LENGTH + BODY, "illegal header line"),
        (HEAD + b"x: a\0b\r\n" + LENGTH + BODY, "characters that no line may have"),
        (HEAD + b"x: a\rb\r\n" + LENGTH + BODY, "characters that no line may have"),
        (HEAD + b"host: localhost\r\n" + LENGTH + BODY, "multiple Host: headers"),
        (HEAD.replace(b"host: localhost\r\n", b"") + LENGTH + BODY, "Missing mandatory Host: header"),
    ],
)
async def test_a_head_that_parsers_read_in_several_ways_is_refused(system: Any, data: bytes, text: str) -> None:
    hidden = b"GET /version HTTP/1.1\r\nhost: localhost\r\n\r\n"
    async with connection(system) as client:
        client.writer.write(data + hidden)
        reply = await client.receive()
        assert (reply.status, reply.headers["connection"]) == (400, "close")
        assert text in reply.error["message"]
        assert await client.is_closed()
    assert system.engine.requests == []


@pytest.mark.parametrize(
    "chunks",
    [
        b"5;\r\n{},\r\n",
        b"5 junk\r\n12345\r\n",
        b"5;a=\x01\r\n12345\r\n",
        b'5;a="b\r\n12345\r\n',
        b"5;a\rb\r\n12345\r\n",
        b"5;a\nb\r\n12345\r\n",
        b"+5\r\n12345\r\n",
        b"0x5\r\n12345\r\n",
        b"5\n12345\r\n",
        b"1\r\n{\r\n5;;\r\n12345\r\n",
        b"1\r\n{\n1\r\n}\r\n0\r\n\r\n",
        b"0\r\n\n",
        b"0\r\nx: y\n\r\n",
        b"0\r\nx: y\r\n z\r\n\r\n",
        b"0;\r\n\r\n",
    ],
)
@pytest.mark.parametrize("in_pieces", [False, True])
async def test_chunks_that_parsers_read_in_several_ways_are_refused(
    system: Any, chunks: bytes, in_pieces: bool
) -> None:
    async with connection(system) as client:
        client.writer.write(CHUNKED)
        for each in [bytes([byte]) for byte in chunks] if in_pieces else [chunks]:
            client.writer.write(each)
            await asyncio.sleep(0.001 if in_pieces else 0)
        client.writer.write(b"GET /version HTTP/1.1\r\nhost: localhost\r\n\r\n" * 5)
        reply = await client.receive()
        assert (reply.status, reply.headers["connection"]) == (400, "close")
        assert "not a valid HTTP request" in reply.error["message"]
        assert await client.is_closed()


@pytest.mark.parametrize("in_pieces", [False, True])
async def test_chunks_may_have_extensions_and_fields_at_the_end(system: Any, in_pieces: bool) -> None:
    half = len(BODY) // 2
    data = b'%x; name = "a\\"b"; other=1;bare\r\n%b\r\n' % (half, BODY[:half])
    data += b"%X  \r\n%b\r\n000;last\r\nx: y\r\nz:\r\n\r\n" % (len(BODY) - half, BODY[half:])
    async with connection(system) as client:
        for each in [bytes([byte]) for byte in CHUNKED + data] if in_pieces else [CHUNKED + data]:
            client.writer.write(each)
            await asyncio.sleep(0)
        assert (await client.receive()).status == 200
        assert (await client.ask("POST", COMPLETIONS, complete())).status == 200


async def test_another_version_of_http_is_refused(system: Any) -> None:
    async with connection(system) as client:
        client.writer.write(b"GET /version HTTP/2.0\r\nhost: localhost\r\n\r\n")
        reply = await client.receive()
        assert (reply.status, "use HTTP/1.1" in reply.error["message"]) == (505, True)


async def test_slow_requests_time_out(serve: Serve) -> None:
    system = await serve(handshake_timeout_ms=50, frame_timeout_ms=50)
    async with connection(system) as client:
        client.writer.write(b"GET /v1/models HT")
        assert (await client.receive()).status == 408
        assert await client.is_closed()
    async with connection(system) as client:
        client.send("POST", COMPLETIONS, b"", {"content-length": "10"})
        assert (await client.receive()).status == 408
        assert await client.is_closed()
    async with connection(system) as client:
        assert await client.is_closed()


async def test_a_later_head_has_as_long_as_the_first_one(serve: Serve) -> None:
    system = await serve(handshake_timeout_ms=500)
    async with connection(system) as client:
        assert (await client.ask("GET", "/v1/models")).status == 200
        client.writer.write(b"GET /v1/models HT")
        assert (await client.receive()).status == 408


async def test_an_idle_connection_is_closed(serve: Serve) -> None:
    system = await serve(idle_timeout_ms=50)
    async with connection(system) as client:
        assert (await client.ask("GET", "/v1/models")).status == 200
        assert await client.is_closed()


async def test_a_client_may_wait_for_100_continue(system: Any) -> None:
    async with connection(system) as client:
        body = json.dumps(complete()).encode()
        client.send("POST", COMPLETIONS, b"", {"content-length": str(len(body)), "expect": "100-continue"})
        assert b" 100 " in await client.read_until(b"\r\n\r\n")
        client.writer.write(body)
        assert (await client.receive()).status == 200


async def test_what_is_sent_ahead_is_limited(system: Any, eventually: Eventually) -> None:
    async with connection(system) as client:
        client.send("POST", COMPLETIONS, complete("hold", stream=True))
        await eventually(lambda: bool(system.engine.live))
        client.writer.write(b"GET /v1/models HTTP/1.1\r\n" + b"x" * (1 << 20))
        await eventually(lambda: not system.engine.live)


async def test_http_1_0(system: Any) -> None:
    async with connection(system) as client:
        body = json.dumps(complete(stream=True)).encode()
        head = b"POST /v1/completions HTTP/1.0\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        client.writer.write(head + b"content-length: %d\r\n\r\n" % len(body) + body)
        answer = await client.reader.read()
    assert b"transfer-encoding" not in answer
    assert answer.endswith(b"data: [DONE]\n\n")


# The server's life


async def test_tls(serve: Serve, eventually: Eventually) -> None:
    system = await serve(tls_cert=str(TLS / "cert.pem"), tls_key=str(TLS / "key.pem"))
    trust = ssl.create_default_context(cafile=TLS / "cert.pem")
    client = await HTTPClient.open(system.server.openai_address, ssl=trust)
    assert (await client.ask("POST", COMPLETIONS, complete(stream=True))).events
    client.writer.transport.abort()
    for data in (b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n", b"POST / HTTP/1.1\r\n" + b"x" * 4_000_000):
        async with connection(system) as plain:
            plain.writer.write(data)
            reply = await plain.receive()
            assert (reply.status, reply.error["message"]) == (
                400,
                "this port takes TLS only; the URL begins with https://",
            )
            assert await plain.reader.read() == b""  # no reset
            plain.writer.close()
    await eventually(lambda: 'quire_connections_refused_total{cause="tls"} 2.0' in system.metrics())


async def test_too_many_connections(serve: Serve) -> None:
    system = await serve(max_connections=1)
    async with connection(system) as first:
        assert (await first.ask("GET", "/v1/models")).status == 200
        reply = await ask(system, "/v1/models", method="GET")
        assert (reply.status, reply.error["code"]) == (429, "rate_limit_exceeded")


async def test_a_draining_server_finishes_what_runs_and_refuses_the_rest(system: Any, eventually: Eventually) -> None:
    async with connection(system) as client, connection(system) as other:
        client.send("POST", COMPLETIONS, complete("hold", stream=True))
        await eventually(lambda: bool(system.engine.live))
        draining = asyncio.create_task(system.server.drain(0.3))
        await eventually(lambda: system.server._context.leaves_at is not None)
        reply = await other.ask("POST", COMPLETIONS, complete())
        assert (reply.status, reply.error["code"]) == (503, "server_unavailable")
        assert reply.headers["connection"] == "close"
        assert "retry-after" in reply.headers
        await draining
        assert json.loads((await client.receive()).data[-1])["error"]["code"] == "server_unavailable"
    await eventually(lambda: not system.engine.live)


@pytest.mark.parametrize("fields", [{}, {"stream": True}])
async def test_a_request_cut_by_shutdown_has_the_same_code_for_the_client_and_in_the_log(
    system: Any, eventually: Eventually, fields: dict[str, Any]
) -> None:
    with capture_logs() as logs:
        async with connection(system) as client:
            client.send("POST", COMPLETIONS, complete("hold", **fields))
            await eventually(lambda: bool(system.engine.live))
            await system.server.drain(0.01)
            error = json.loads((await client.receive()).data[-1])["error"]
        await eventually(lambda: not system.engine.live)
        await eventually(lambda: any(each["event"] == "request failed" for each in logs))
    (line,) = [each for each in logs if each["event"] in ("request failed", "request ended")]
    assert (error["code"], line["code"], line["cause"]) == ("server_unavailable", "UNAVAILABLE", "shutdown")


async def test_an_api_off_loopback_requires_a_key() -> None:
    config = ServerConfig(port=0, operator_port=0, openai_port=0, openai_host="0.0.0.0")
    with pytest.raises(ConfigError, match=r"`openai_host` .* is reachable"):
        await Server().start(None, config)  # type: ignore[arg-type]


async def test_a_unix_socket_without_keys_is_not_widened_to_a_port(serve: Serve, socket_path: Any) -> None:
    assert (await serve(uds=str(socket_path))).server.openai_address == ""
    with_key = await serve(uds=str(socket_path.with_name("other")), token="x")
    assert (await ask(with_key, "/v1/models", method="GET", authorization="Bearer x")).status == 200
