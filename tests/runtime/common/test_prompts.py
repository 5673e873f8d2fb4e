"""Prompts that users pass: token ids of any sequence, and messages whose content becomes text."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from quire.runtime.common.errors import InvalidRequest
from quire.runtime.common.prompts import as_documents, as_token_ids, chat_messages, chat_tools, shown

HELLO = {"role": "user", "content": "Hello"}


def test_token_ids_of_any_sequence() -> None:
    for prompt in ([1, 2], (1, 2), np.array([1, 2]), iter([1, 2])):
        assert as_token_ids(prompt) == (1, 2)


@pytest.mark.parametrize("prompt", [None, 5, "ab", b"ab", {5: 1}, {5}, [True], [1.5], ["a"], [[1]]])
def test_other_values_are_not_token_ids(prompt: object) -> None:
    with pytest.raises(InvalidRequest, match="a prompt is text or a sequence of token ids, not"):
        as_token_ids(prompt)


def test_documents_are_any_ordered_texts() -> None:
    for documents in (["a", "b"], ("a", "b"), iter(["a", "b"])):
        assert as_documents("q", documents) == ("a", "b")


@pytest.mark.parametrize(
    ("query", "documents"), [(None, ["a"]), (["q"], ["a"]), ("q", "a"), ("q", None), ("q", [1]), ("q", {"a"})]
)
def test_other_values_are_not_scored(query: object, documents: object) -> None:
    with pytest.raises(InvalidRequest, match="score takes a text and a list of texts, not"):
        as_documents(query, documents)


def test_messages_are_copied_with_their_other_keys() -> None:
    message = {**HELLO, "name": "Ann"}
    (copy,) = chat_messages([message])
    assert copy == message
    assert copy is not message


def test_text_parts_become_text() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two", "cache_control": {}}]
    assert chat_messages(({"role": "user", "content": parts},)) == ({"role": "user", "content": "one\ntwo"},)
    assert chat_messages([{"role": "user", "content": []}]) == ({"role": "user", "content": ""},)


CALLS = [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]


@pytest.mark.parametrize(
    ("message", "read"),
    [
        ({"role": "assistant", "tool_calls": CALLS}, {"role": "assistant", "content": None, "tool_calls": CALLS}),
        (
            {"role": "assistant", "tool_calls": CALLS, "content": None, "function_call": None, "refusal": None},
            {"role": "assistant", "content": None, "tool_calls": CALLS},
        ),
        ({"role": "assistant"}, {"role": "assistant", "content": ""}),
        ({"role": "assistant", "tool_calls": []}, {"role": "assistant", "content": ""}),
        (
            {"role": "assistant", "content": None, "reasoning_content": "Hm", "tool_calls": None},
            {"role": "assistant", "content": "", "reasoning_content": "Hm"},
        ),
        (
            {"role": "assistant", "content": None, "refusal": "No."},
            {"role": "assistant", "content": "No.", "refusal": "No."},
        ),
        ({"role": "user"}, {"role": "user", "content": ""}),
        ({"role": "system", "content": None}, {"role": "system", "content": ""}),
        ({"role": "user", "name": None, "content": "x"}, {"role": "user", "content": "x"}),
        ({"role": "tool", "tool_call_id": "c1"}, {"role": "tool", "tool_call_id": "c1", "content": ""}),
        ({"role": "developer", "content": "x"}, {"role": "system", "content": "x"}),
    ],
)
def test_fields_that_serializers_leave_out_or_send_as_null(message: dict[str, Any], read: dict[str, Any]) -> None:
    assert chat_messages([HELLO, message]) == (HELLO, read)


def test_deprecated_names_of_calls_and_results() -> None:
    first = {"name": "f", "arguments": "{}"}
    second = {"name": "g", "arguments": '{"a": 1}'}
    assert chat_messages(
        [
            HELLO,
            {"role": "assistant", "content": None, "function_call": first},
            {"role": "function", "name": "f", "content": "ok"},
            {"role": "assistant", "content": "So:", "function_call": second},
            {"role": "function", "name": "g"},
        ]
    ) == (
        HELLO,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "call00001", "type": "function", "function": first}],
        },
        {"role": "tool", "name": "f", "content": "ok", "tool_call_id": "call00001"},
        {
            "role": "assistant",
            "content": "So:",
            "tool_calls": [{"id": "call00002", "type": "function", "function": second}],
        },
        {"role": "tool", "name": "g", "content": "", "tool_call_id": "call00002"},
    )


@pytest.mark.parametrize(
    ("messages", "fault"),
    [
        ("hello", "messages must be a list of at least one map such as .* not 'hello'"),
        (HELLO, "must be a list of at least one map"),
        (["hello"], "must be a list of at least one map"),
        ([], r"must be a list of at least one map such as .* not \[\]"),
        (None, "must be a list"),
        ([HELLO, {"content": "x"}], r"messages\[1\] has no 'role'"),
        ([{"role": 5, "content": "x"}], r"messages\[0\]: role must be one of system, developer, user, .*, not 5"),
        ([{"role": "", "content": "x"}], "role must be one of system"),
        ([HELLO, {"role": "model", "content": "x"}], r"messages\[1\]: role must be one of .*, function, not 'model'"),
        ([{"role": "assistant", "function_call": "f"}], r"messages\[0\]: function_call must be a map such as"),
        ([{"role": "assistant", "function_call": {"name": None}}], r"messages\[0\]: function_call must be a map"),
        ([{"role": "user", "content": 5}], "content must be text or a list of text parts, not 5"),
        ([{"role": "user", "content": ["x"]}], r"messages\[0\]: content\[0\] must be a part such as"),
        ([{"role": "user", "content": [{"text": "x"}]}], r"content\[0\] must be a part such as"),
        (
            [{"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "image_url", "image_url": {}}]}],
            r"messages\[0\]: content\[1\] is a part of type 'image_url', which is not supported; text and images are",
        ),
        ([{"role": "user", "content": [{"type": "text"}]}], r"content\[0\]: text must be text, not None"),
    ],
)
def test_other_forms_are_refused_by_name(messages: Any, fault: str) -> None:
    with pytest.raises(InvalidRequest, match=fault):
        chat_messages(messages)


def test_many_tools_take_linear_time() -> None:
    tools = [{"type": "function", "function": {"name": f"f{index}"}} for index in range(40_000)]
    begin = time.process_time()
    assert len(chat_tools(tools)) == len(tools)
    assert time.process_time() - begin < 4, "comparing all pairs takes above 10 s"


def test_a_value_that_nests_deeply_is_shown() -> None:
    value: list[Any] = []
    for _ in range(5000):
        value = [value]
    assert shown(value) == "a list that nests too deeply"


def test_a_long_value_is_cut_in_the_error() -> None:
    with pytest.raises(InvalidRequest) as error:
        chat_messages("x" * 10_000)
    assert len(str(error.value)) < 250
