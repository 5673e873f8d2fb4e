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


def test_an_assistants_tool_calls_need_no_content() -> None:
    calls = [{"function": {"name": "f", "arguments": {}}}]
    for message in ({"role": "assistant", "tool_calls": calls},
                    {"role": "assistant", "tool_calls": calls, "content": None}):  # fmt: skip
        assert chat_messages([HELLO, message])[1] == message


@pytest.mark.parametrize(
    ("messages", "fault"),
    [
        ("hello", "messages must be a list of at least one map such as .* not 'hello'"),
        (HELLO, "must be a list of at least one map"),
        (["hello"], "must be a list of at least one map"),
        ([], r"must be a list of at least one map such as .* not \[\]"),
        (None, "must be a list"),
        ([HELLO, {"content": "x"}], r"messages\[1\] has no 'role'"),
        ([{"role": "user"}], r"messages\[0\] has no 'content'"),
        ([{"role": "user", "tool_calls": [1]}], r"messages\[0\] has no 'content'"),
        ([{"role": 5, "content": "x"}], r"messages\[0\]: role must be text such as user or assistant, not 5"),
        ([{"role": "", "content": "x"}], "role must be text"),
        ([{"role": "user", "content": None}], r"messages\[0\]: content must be text or a list of text parts, not None"),
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


def test_an_answer_without_text_is_a_message() -> None:
    """An answer that was cut within its reasoning, which clients send back."""
    message = {"role": "assistant", "content": None, "reasoning_content": "Hm", "tool_calls": None}
    assert chat_messages([HELLO, message])[1] == {**message, "content": ""}


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
