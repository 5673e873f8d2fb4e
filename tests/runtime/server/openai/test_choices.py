"""Choices of an answer as they grow, and the fields and items of requests with tools and reasoning."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import h11
import pytest
from quire.runtime.common.errors import (
    Cancelled,
    ContextLengthExceeded,
    DeadlineExceeded,
    GenerationFailed,
    InvalidRequest,
    QuireError,
    RequestNotFound,
)
from quire.runtime.common.types import (
    Delta,
    FinishReason,
    OutputChunk,
    SamplingParams,
    TokenLogprobs,
    ToolChoice,
    Usage,
)
from quire.runtime.engine.facade import GenerateRequest
from quire.runtime.engine.markup.markup import KNOWN_MARKUPS, THINK
from quire.runtime.engine.markup.markup_parser import MarkupParser
from quire.runtime.engine.text import Token
from quire.runtime.server.http.calls import Call, call_id
from quire.runtime.server.http.choices import Choice
from quire.runtime.server.http.logprobs import ChatLogprobs, CompletionLogprobs, Vocabulary, shown_in_delta
from quire.runtime.server.http.prompt_logprobs import PromptPart
from quire.runtime.server.http.request_cycle import RequestCycle
from quire.runtime.server.openai.api import OPENAI_FORM
from quire.runtime.server.openai.errors import error_answer
from quire.runtime.server.openai.formats import ChatFormat
from quire.runtime.server.openai.response_items import chat_fields, input_messages
from quire.runtime.server.openai.responses import ResponseFormat, listed_items
from quire.runtime.server.openai.structure import structure_of
from quire.runtime.server.openai.tools import qualified_name, template_variables, tool_choice
from quire.runtime.server.requests.send_buffer import SendBuffer

MARKUP = replace(KNOWN_MARKUPS["hermes"], reasoning=THINK)


def vocabulary_of(texts: Sequence[str]) -> Vocabulary:
    return Vocabulary(lambda token_id: Token(texts[token_id].encode(), is_special=False))


def choice_of(*texts: str, end: FinishReason = "stop") -> Choice:
    """Return a choice that has read a token for each text, and then the end."""
    choice = Choice(ChatLogprobs(vocabulary_of(texts)))
    choice.parser = MarkupParser(MARKUP, {})
    for index, text in enumerate(texts):
        logprobs = (TokenLogprobs(index, -float(index)),)
        choice.add(OutputChunk(first_index=index, token_ids=(index,), text=text, logprobs=logprobs))
    choice.add(OutputChunk(first_index=len(texts), token_ids=(), text="", logprobs=(), finish_reason=end))
    return choice


def shown_tokens(choice: Choice) -> list[str]:
    return [entry["token"] for entry in json.loads(choice.whole_logprobs())["content"]]


def test_the_markers_of_reasoning_do_not_count_as_reasoning() -> None:
    choice = choice_of("<think>", "So", ".", "</think>", "Hello", "!")
    assert [(run.kind, run.text) for run in choice.runs] == [("reasoning", "So."), ("content", "Hello!")]
    assert choice.num_reasoning_tokens == 2
    assert shown_tokens(choice) == ["Hello", "!"]


@pytest.mark.parametrize("markup", [[], ["<think>", "So", "</think>"], ["<think>", "So", "</think>", "\n\n"]])
@pytest.mark.parametrize("tokens", [["a", " <", "b", " c"], ["<", "b"], ["<", "tool", "s"]])
def test_logprobs_of_held_text_are_shown_once(markup: list[str], tokens: list[str]) -> None:
    choice = choice_of(*markup, *tokens)
    assert "".join(choice.texts) == "".join(tokens)
    assert shown_tokens(choice) == tokens


@pytest.mark.parametrize(("end", "text"), [("length", "a"), ("stop", "a <tool")])
def test_an_output_that_is_cut_within_markup(end: FinishReason, text: str) -> None:
    assert "".join(choice_of("a", " <", "tool", end=end).texts) == text


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"reasoning_effort": "none"}, {"reasoning_effort": "none", "enable_thinking": False}),
        *(
            ({"reasoning_effort": effort}, {"reasoning_effort": effort, "enable_thinking": True})
            for effort in ("minimal", "low", "medium", "high", "xhigh")
        ),
        ({"reasoning_effort": "none", "enable_thinking": True}, {"reasoning_effort": "none", "enable_thinking": True}),
        ({"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": False}}, {"enable_thinking": False}),
    ],
)
def test_the_more_specific_field_about_reasoning_wins(body: dict[str, Any], expected: dict[str, Any]) -> None:
    assert template_variables(body) == expected


def test_calls_of_all_choices_have_ids_of_their_own() -> None:
    assert len({call_id(answer, choice, index) for answer in "ab" for choice in range(3) for index in range(3)}) == 18


@pytest.mark.parametrize(
    "allowed", [{"allowed_tools": {"mode": "auto", "tools": ["F"]}}, {"mode": "auto", "tools": ["F"]}]
)
def test_allowed_tools_of_responses_and_chats_are_the_same(allowed: dict[str, Any]) -> None:
    choice = json.loads(
        json.dumps({"type": "allowed_tools", **allowed}).replace('"F"', '{"type":"function","name":"f"}')
    )
    assert tool_choice(chat_fields({"tool_choice": choice})) == ToolChoice(needed="auto", names=("f",))


def test_options_of_tools_and_templates_are_the_same_in_responses_and_chats() -> None:
    values = {"parallel_tool_calls": False, "chat_template_kwargs": {"a": 1}, "enable_thinking": False}
    assert chat_fields({**values, "input": "a"}) == values


def test_an_image_of_a_response_is_that_of_a_chat() -> None:
    image = {"type": "input_image", "image_url": "data:a", "detail": "low"}
    ((_, message),) = input_messages([{"role": "user", "content": [image]}])
    assert message["content"] == [{"type": "image_url", "image_url": {"url": "data:a", "detail": "low"}}]


def test_reasoning_after_a_call_or_a_text_begins_a_message() -> None:
    def thought(text: str) -> dict[str, Any]:
        return {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": text}]}

    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
    placed = input_messages([thought("a"), call, thought("b"), {"role": "assistant", "content": "c"}])
    assert [place for place, _ in placed] == ["input[0]", "input[3]"]
    messages = [message for _, message in placed]
    summary = {"type": "reasoning", "summary": [{"type": "summary_text", "text": text} for text in "xy"]}
    ((_, summarized),) = input_messages([summary, {"role": "assistant", "content": "z"}])
    assert (summarized["reasoning_content"], summarized["content"]) == ("x\ny", "z")
    assert [(each["reasoning_content"], each.get("content")) for each in messages] == [("a", None), ("b", "c")]
    assert [len(each.get("tool_calls", ())) for each in messages] == [1, 0]


def test_items_are_listed_in_the_form_of_responses() -> None:
    chat = {"type": "image_url", "image_url": {"url": "data:a", "detail": "low"}}
    parts = [{"type": "text", "text": "b"}, chat, {"type": "input_image", "image_url": "data:c"}]
    message, reasoning = listed_items(
        [{"role": "user", "content": parts}, {"type": "reasoning", "content": []}], "name"
    )
    own = {"id": "msg_name_input_1", "status": "completed"}
    assert reasoning == {**own, "type": "reasoning", "summary": [], "content": []}
    assert message["content"] == [
        {"type": "input_text", "text": "b"},
        {"type": "input_image", "image_url": "data:a", "detail": "low"},
        {"type": "input_image", "image_url": "data:c", "detail": "auto"},
    ]


def test_a_refusal_is_listed_with_its_text() -> None:
    (message,) = listed_items([{"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}], "name")
    assert message["content"] == [{"type": "refusal", "refusal": "No."}]


@pytest.mark.parametrize("namespace", ["mcp__x", "mcp__x__"])
def test_a_namespace_and_a_function_are_joined_once(namespace: str) -> None:
    assert qualified_name("f", namespace) == "mcp__x__f"


def test_offsets_of_completions_count_characters() -> None:
    texts = ["é", "日", "a"]
    form = CompletionLogprobs(vocabulary_of(texts))
    shown = json.loads(form.join([form.piece([TokenLogprobs(index, -1.0) for index in range(3)])]))
    assert (shown["tokens"], shown["text_offset"]) == (texts, [0, 1, 2])


def test_special_tokens_move_no_offset() -> None:
    tokens = [Token(b"ab", is_special=False), Token(b"<s>", is_special=True)]
    form = CompletionLogprobs(Vocabulary(tokens.__getitem__))
    shown = json.loads(form.join([form.piece([TokenLogprobs(token_id, -1.0) for token_id in (0, 1, 0)])]))
    assert (shown["tokens"], shown["text_offset"]) == (["ab", "<s>", "ab"], [0, 2, 2])


def test_the_first_token_of_an_echo_moves_the_offsets_of_the_others() -> None:
    form = CompletionLogprobs(vocabulary_of(["é日", "a"]))
    shown = json.loads(form.join([form.first(0), form.piece([TokenLogprobs(1, -1.0), TokenLogprobs(0, -1.0)])]))
    assert (shown["token_logprobs"], shown["text_offset"]) == ([None, -1.0, -1.0], [0, 2, 3])


def test_the_deltas_of_a_response_have_finite_logprobs_and_no_special_tokens() -> None:
    tokens = [Token(b"a", is_special=False), Token(b"<s>", is_special=True)]
    logprobs = [TokenLogprobs(0, -math.inf, ((0, -0.5), (1, -math.inf))), TokenLogprobs(1, -0.25)]
    top = [{"token": "a", "logprob": -0.5}, {"token": "<s>", "logprob": -9999.0}]
    known = Vocabulary(tokens.__getitem__)
    assert shown_in_delta(logprobs, known) == [{"token": "a", "logprob": -9999.0, "top_logprobs": top}]
    chat = ChatLogprobs(known)
    assert [each["token"] for each in json.loads(chat.join([chat.piece(logprobs)]))["content"]] == ["a"]


def test_a_completion_has_the_drawn_token_among_the_top_ones() -> None:
    form = CompletionLogprobs(vocabulary_of(["a", "b"]))
    shown = json.loads(form.join([form.piece([TokenLogprobs(0, -math.inf, ((1, -0.5),))])]))
    assert (shown["token_logprobs"], shown["top_logprobs"]) == ([-9999.0], [{"a": -9999.0, "b": -0.5}])


def test_the_name_of_a_part_of_a_character_has_two_digits_for_each_byte() -> None:
    assert Vocabulary(lambda _: Token(b"\xff\x05\n", is_special=False)).texts[0] == r"bytes:\xff\x05\x0a"


def test_the_table_of_known_tokens_is_limited() -> None:
    known = Vocabulary(lambda token_id: Token(b"%d" % token_id, is_special=False)).texts
    assert [known[token_id] for token_id in range(20_000)] == [str(token_id) for token_id in range(20_000)]
    assert len(known) == 16_384


@pytest.mark.parametrize("as_ids", [False, True])
def test_logprobs_are_the_same_from_known_tokens(as_ids: bool) -> None:
    texts = [b'"a"\n', b"\xc3", b"\xe6\x97\xa5", b""]
    known = Vocabulary(lambda token_id: Token(texts[token_id], is_special=False))
    top = ((0, -0.5), (1, -math.inf), (2, -1e-30), (3, -3.0))
    tokens = [TokenLogprobs(token_id, -math.inf, top) for token_id in range(4)]
    names = [f"token_id:{index}".encode() if as_ids else text for index, text in enumerate(texts)]
    numbers = [-0.5, -9999.0, -1e-30, -3.0]
    entries = [
        {"token": name.decode(errors="replace"), "logprob": number, "bytes": list(name)}
        for name, number in zip(names, numbers, strict=True)
    ]
    unique = ["bytes:\\xc3" if name == b"\xc3" else name.decode() for name in names]
    for _ in range(2):  # second round: the tokens are known
        chat = ChatLogprobs(known, as_ids=as_ids)
        shown = json.loads(chat.join([chat.piece(tokens[:1]), chat.piece(tokens[1:])]))["content"]
        assert shown == [{**each, "logprob": -9999.0, "top_logprobs": entries} for each in entries]
        completion = CompletionLogprobs(known, as_ids=as_ids)
        columns = json.loads(completion.join([completion.piece(tokens[:1]), completion.piece(tokens[1:])]))
        assert columns["tokens"] == unique
        assert columns["top_logprobs"] == [{each: -9999.0} | dict(zip(unique, numbers, strict=True)) for each in unique]


def test_only_a_rule_named_start_makes_a_grammar_larks() -> None:
    structure = structure_of({"guided_grammar": 'root ::= "start"'})
    assert structure is not None
    assert (structure.lark, structure.gbnf) == (None, 'root ::= "start"')


def test_a_prompt_ends_within_the_second_of_two_chunks() -> None:
    part = PromptPart([0, 1, 2], lambda token_id: Token(b"abc"[token_id : token_id + 1], is_special=False), 1, None)
    texts = []
    for token, text in ((1, "b"), (2, "cx")):
        logprobs = (TokenLogprobs(token, -3.0, ((0, -1.0), (token, -3.0))),)
        texts.append(part.split(OutputChunk(first_index=0, token_ids=(token,), text=text, logprobs=logprobs)).text)
    assert texts == ["", "x"]
    assert {key: each["rank"] for key, each in json.loads(part.json())[1].items()} == {"1": 2, "0": 1}


def test_the_logprobs_of_a_prompt_are_finite() -> None:
    part = PromptPart([0, 1], lambda token_id: Token(b"ab"[token_id : token_id + 1], is_special=False), 1, None)
    part.split(
        OutputChunk(first_index=0, token_ids=(1,), text="b", logprobs=(TokenLogprobs(1, -math.inf, ((0, -0.5),)),))
    )
    shown = json.loads(part.json())[1]
    assert {each["decoded_token"]: (each["logprob"], each["rank"]) for each in shown.values()} == {
        "b": (-9999.0, None),
        "a": (-0.5, 1),
    }


def test_special_tokens_of_a_prompt_take_no_text_from_the_output() -> None:
    tokens = [Token(b"a", is_special=False), Token(b"<s>", is_special=True), Token(b"b", is_special=False)]
    part = PromptPart([0, 1, 2], tokens.__getitem__, 0, None)
    logprobs = tuple(TokenLogprobs(token, -1.0) for token in (1, 2, 0))
    chunk = OutputChunk(first_index=0, token_ids=(1, 2, 0), text="ba or not", logprobs=logprobs)
    left = part.split(chunk)
    assert (left.token_ids, left.text) == ((0,), "a or not")
    assert len(json.loads(part.json())) == 3


vocabulary = Vocabulary(lambda token_id: Token(bytes([token_id]), is_special=False))
CALL = Call((GenerateRequest(prompt="p", sampling_params=SamplingParams(logprobs=0)),), True, returns_token_ids=True)
CHUNK = OutputChunk(
    first_index=0,
    token_ids=(97, 98),
    text="<think>So</think>Hello",
    logprobs=(TokenLogprobs(97, -0.5), TokenLogprobs(98, -0.25)),
)


def test_the_token_ids_of_a_chunk_are_shown_once() -> None:
    form = ChatFormat(CALL, "m", vocabulary)
    form.read_with(partial(MarkupParser, MARKUP, {}))
    events = form.events(0, CHUNK).decode().split("\n\n")[:-1]
    shown = [json.loads(event.removeprefix("data: "))["choices"][0]["token_ids"] for event in events]
    assert shown == [[97, 98], []], "reasoning, then text"


TWO_TEXTS = OutputChunk(
    first_index=0,
    token_ids=(97, 98, 99),
    text="a<think>So</think>b",
    logprobs=(TokenLogprobs(97, -0.5), TokenLogprobs(98, -0.25), TokenLogprobs(99, -1.0)),
)


def deltas_of(events: bytes) -> list[dict[str, Any]]:
    lines = [line for line in events.decode().split("\n") if line.startswith("data: ")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def test_the_logprobs_of_a_chunk_with_two_texts_are_shown_once() -> None:
    chunk = TWO_TEXTS
    parser = partial(FakeParser, [Delta("content", "a"), Delta("reasoning", "So"), Delta("content", "b")])
    form = ChatFormat(CALL, "m", vocabulary)
    form.read_with(cast(Any, parser))
    choices = [event["choices"][0] for event in deltas_of(form.events(0, chunk))]
    shown = [[each["token"] for each in (choice["logprobs"] or {}).get("content", ())] for choice in choices]
    assert shown == [["a", "b", "c"], [], []]
    response = ResponseFormat(CALL, "m", vocabulary)
    response.read_with(cast(Any, parser))
    deltas = [each for each in deltas_of(response.events(0, chunk)) if each["type"] == "response.output_text.delta"]
    assert [[each["token"] for each in delta["logprobs"]] for delta in deltas] == [["a", "b", "c"], []]


class FakeParser:
    """A parser that reads the same deltas of every chunk."""

    kind = "content"
    holds_text = False

    def __init__(self, deltas: list[Delta]) -> None:
        self._deltas = deltas

    def feed(self, _: str) -> list[Delta]:
        return self._deltas

    def finish(self, *, is_cut: bool) -> list[Delta]:
        return []


def test_two_calls_of_one_chunk_have_two_indexes() -> None:
    form = ChatFormat(CALL, "m", vocabulary)
    parser = FakeParser([Delta(kind, text) for kind, text in (("call", "f"), ("arguments", "{}")) * 2])
    form.read_with(cast(Any, lambda: parser))
    calls = [event["choices"][0]["delta"]["tool_calls"][0] for event in deltas_of(form.events(0, TWO_TEXTS))]
    assert [(each["index"], each["function"]["arguments"]) for each in calls] == [
        (0, ""),
        (0, "{}"),
        (1, ""),
        (1, "{}"),
    ]
    assert [each["id"] for each in calls if "id" in each] == [
        call_id(f"chatcmpl-{CALL.name}", 0, index) for index in (0, 1)
    ]


def test_the_logprobs_of_a_chunk_belong_to_its_first_text() -> None:
    form = ResponseFormat(CALL, "m", vocabulary)
    parser = FakeParser([Delta("content", "a"), Delta("call", "f"), Delta("arguments", "{}"), Delta("content", "b")])
    form.read_with(cast(Any, lambda: parser))
    form.choices[0].add(TWO_TEXTS)
    first, _, last = json.loads(form.whole(Usage(prompt_tokens=1, completion_tokens=3)))["output"]
    shown = [[each["token"] for each in item["content"][0]["logprobs"]] for item in (first, last)]
    assert shown == [["a", "b", "c"], []]


def test_an_item_begins_empty_though_its_chunk_has_all_of_it() -> None:
    form = ResponseFormat(CALL, "m", vocabulary)
    parser = FakeParser([Delta("content", "a"), Delta("call", "f"), Delta("arguments", "{}")])
    form.read_with(cast(Any, lambda: parser))
    events = deltas_of(form.events(0, TWO_TEXTS))
    message, call = [each["item"] for each in events if each["type"] == "response.output_item.added"]
    assert (message["content"], call["name"], call["arguments"]) == ([], "f", "")
    assert [each["delta"] for each in events if each["type"].endswith(".delta")] == ["a", "{}"]


def test_an_output_that_is_only_reasoning_is_shown() -> None:
    cut = OutputChunk(first_index=0, token_ids=(97, 98), text="<think>So", logprobs=(), finish_reason="length")
    usage = Usage(prompt_tokens=1, completion_tokens=2)
    chat = ChatFormat(CALL, "m", vocabulary)
    response = ResponseFormat(CALL, "m", vocabulary)
    for form in (chat, response):
        form.read_with(partial(MarkupParser, MARKUP, {}))
        form.choices[0].add(cut)
    message = json.loads(chat.whole(usage))["choices"][0]["message"]
    assert (message["content"], message["reasoning"], message["reasoning_content"]) == (None, "So", "So")
    for shown in (response.unfinished("in_progress", None), response.whole(usage)):
        (item,) = json.loads(shown)["output"]
        assert (item["type"], item["content"]) == ("reasoning", [{"type": "reasoning_text", "text": "So"}])


@pytest.mark.parametrize(
    ("status", "expected"),
    [("in_progress", "in_progress"), ("cancelled", "incomplete"), ("failed", "incomplete")],
)
@pytest.mark.parametrize("parser", [None, partial(MarkupParser, MARKUP, {})])
def test_the_items_of_a_response_that_ended_early_are_incomplete(status: Any, expected: str, parser: Any) -> None:
    form = ResponseFormat(CALL, "m", vocabulary)
    form.read_with(parser)
    form.choices[0].add(OutputChunk(first_index=0, token_ids=(97,), text="Hello", logprobs=()))
    (item,) = json.loads(form.unfinished(status, None))["output"]
    assert (item["type"], item["status"]) == ("message", expected)


def test_logprobs_count_as_held_until_the_answer_is_whole() -> None:
    choice = Choice(ChatLogprobs(vocabulary))
    num_bytes = choice.add(CHUNK)
    assert num_bytes >= len(CHUNK.text) + sum(len(fragment) for piece in choice.columns for fragment in piece)


def test_logprobs_of_a_prompt_count_as_held_once() -> None:
    choice = Choice(None)
    choice.prompt = PromptPart(range(10), lambda token_id: Token(b"a", is_special=False), 0, None)
    chunks = [
        OutputChunk(first_index=index, token_ids=(index,), text="a", logprobs=(TokenLogprobs(index, -0.5),))
        for index in range(1, 10)
    ]
    num_bytes = [choice.add(chunk) for chunk in chunks]
    assert len(set(num_bytes)) == 1, "each token's own"
    assert sum(num_bytes) >= len(choice.prompt.json()) - len("[null,,,,,,,,,]")


def test_what_the_end_of_a_streamed_response_repeats_counts_as_held() -> None:
    form = ResponseFormat(CALL, "m", vocabulary)
    form.read_with(None)
    form.events(0, CHUNK)
    assert form.held_bytes >= len(CHUNK.text) + sum(len(fragment) for fragment in form.choices[0].columns[0])


def test_the_usage_of_a_response_has_its_cached_tokens() -> None:
    form = ResponseFormat(CALL, "m", vocabulary)
    form.read_with(None)
    form.choices[0].add(CHUNK)
    usage = json.loads(form.whole(Usage(prompt_tokens=5, completion_tokens=2, cached_tokens=3)))["usage"]
    assert usage == {
        "input_tokens": 5,
        "input_tokens_details": {"cached_tokens": 3, "cache_write_tokens": 0},
        "output_tokens": 2,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 7,
    }


def test_the_times_of_a_usage_are_in_milliseconds() -> None:
    form = ChatFormat(replace(CALL, returns_timings=True), "m", vocabulary)
    form.choices[0].add(CHUNK)
    usage = Usage(prompt_tokens=1, completion_tokens=2, queue_ms=1.25, prefill_ms=30.5, decode_ms=1500, stall_ms=0.1239)
    assert json.loads(form.whole(usage))["usage"]["timings"] == {
        "queue_ms": 1.25,
        "prefill_ms": 30.5,
        "decode_ms": 1500,
        "stall_ms": 0.124,
    }


@pytest.mark.parametrize(
    ("error", "status", "kind", "code"),
    [
        (InvalidRequest("a"), 400, "invalid_request_error", None),
        (ContextLengthExceeded("a"), 400, "invalid_request_error", "context_length_exceeded"),
        (RequestNotFound("a"), 404, "invalid_request_error", "not_found"),
        (Cancelled("a"), 499, "invalid_request_error", "cancelled"),
        (GenerationFailed("a"), 500, "server_error", "server_error"),
        (DeadlineExceeded("a"), 504, "timeout_error", "timeout"),
    ],
)
def test_errors_that_no_retry_helps_have_statuses_of_their_own(
    error: QuireError, status: int, kind: str, code: str | None
) -> None:
    answer = error_answer(error)
    assert (answer.status, dict(answer.headers)) == (status, {"x-should-retry": "false"})
    assert json.loads(answer.content)["error"] == {"message": "a", "type": kind, "param": None, "code": code}


async def test_a_stream_is_kept_alive_by_its_events_or_else_by_comments(monkeypatch: pytest.MonkeyPatch) -> None:
    timers: list[Callable[[], object]] = []

    def call_later(_: float, callback: Callable[..., object], *args: object) -> Any:
        timers.append(partial(callback, *args))
        return SimpleNamespace(cancel=lambda: None)

    monkeypatch.setattr(asyncio.get_running_loop(), "call_later", call_later)
    sent: list[bytes] = []
    http = h11.Connection(h11.SERVER)
    http.receive_data(b"POST / HTTP/1.1\r\nhost: x\r\n\r\n")
    request = http.next_event()
    assert isinstance(request, h11.Request)
    cycle = RequestCycle(http, cast(SendBuffer, SimpleNamespace(send_bytes=sent.append)), request, 1, OPENAI_FORM)
    cycle.begin_events()
    cycle.send_events(b"data: 1\n\n")
    sent.clear()
    timers.pop()()
    assert sent == [], "an event was sent since"
    timers.pop()()
    assert sent == [b"2\r\n:\n\r\n"]
    cycle.leave("disconnect")
    cycle.send_events(b"data: 2\n\n")
    assert sent == [b"2\r\n:\n\r\n"], "the client has left"
