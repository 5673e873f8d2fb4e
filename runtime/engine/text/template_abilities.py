"""The parts of a chat that a chat template shows, found by rendering trial chats with words that must be in the prompt.

Templates of models that were not trained for tools silently drop calls and results, and others refuse messages of the
role `system`, or two consecutive messages of a user. `chat_history.py` changes chats accordingly.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, Literal

from ...common.errors import InvalidRequest

ToolsPlace = Literal["variable", "tools", "functions", "text"]
Render = Callable[[list[Any], list[Any] | None], str]

ONE = "quireprobe"
TWO = "wordtwo"
THREE = "wordthree"
FOUR = "wordfour"
TOOL_PARAMETERS = {
    "type": "object",
    "properties": {"a": {"type": "string", "description": "a"}},
    "required": ["a"],
}
TOOL = {"type": "function", "function": {"name": ONE, "description": ONE, "parameters": TOOL_PARAMETERS}}
OTHER_TOOL = {"type": "function", "function": {"name": "f", "description": "f", "parameters": TOOL_PARAMETERS}}
CALL_ID, OTHER_ID = "abcdefghi", "abcdefghj"  # ids of nine letters, which Mistral's templates demand
ANY_ID = "call_1"
USER = {"role": "user", "content": "a"}
ANSWER_MESSAGE = {"role": "assistant", "content": "a"}


class TemplateTimeout(InvalidRequest):
    """A template took too long, so the parts that it shows are unknown."""


class Abilities:
    """The abilities of a template for chats with tools, or without. Each answer is found at its first use.

    `render` raises InvalidRequest if the template refuses a chat. Properties raise TemplateTimeout.
    """

    def __init__(self, render: Render, has_tools: bool, may_take_parts: bool) -> None:
        self._render = render
        self._tools = [OTHER_TOOL] if has_tools else None
        self._may_take_parts = may_take_parts
        self._shown_calls: dict[str | None, bool] = {}

    # Messages

    @cached_property
    def takes_parts(self) -> bool:
        """Whether the template reads texts only in lists of parts, as templates of some models with images do."""
        text = {"role": "user", "content": ONE}
        if not self._may_take_parts or ONE in self._rendered_as_is([text], self._tools):
            return False
        return ONE in self._rendered_as_is([with_parts(text)], self._tools)

    @cached_property
    def takes_system(self) -> bool:
        """Whether a chat may begin with a system message."""
        return self._shows([ONE], [{"role": "system", "content": ONE}, USER])

    @cached_property
    def takes_later_system(self) -> bool:
        """Whether a chat may have one system message, after its first message."""
        return self._shows([ONE], [USER, ANSWER_MESSAGE, {"role": "system", "content": ONE}, USER])

    @cached_property
    def takes_several_systems(self) -> bool:
        """Whether there may be system messages after one at the beginning."""
        first, later = ({"role": "system", "content": word} for word in (ONE, TWO))
        return self._shows([ONE, TWO], [first, USER, ANSWER_MESSAGE, later, USER])

    @cached_property
    def takes_repeated_users(self) -> bool:
        """Whether a user may have two consecutive messages."""
        return self._shows([ONE, TWO], [{"role": "user", "content": ONE}, {"role": "user", "content": TWO}])

    @cached_property
    def takes_repeated_answers(self) -> bool:
        """Whether two answers may be consecutive."""
        answers = [{"role": "assistant", "content": ONE}, {"role": "assistant", "content": TWO}]
        return self._shows([ONE, TWO], [USER, *answers, USER])

    @cached_property
    def takes_users(self) -> bool:
        """Whether the template takes the simplest chat."""
        return self._rendered([USER]) != ""

    @cached_property
    def shows_answers(self) -> bool:
        """Whether earlier answers are in the prompt."""
        return self._shows([ONE], [USER, {"role": "assistant", "content": ONE}, USER])

    # Tools, calls and results

    @cached_property
    def tools_place(self) -> ToolsPlace:
        """The place of tools for the template: a variable, a field of a system message, or only a message's text."""
        if self._shows([ONE], [USER], [TOOL]):
            return "variable"
        fields: tuple[Literal["tools", "functions"], ...] = ("tools", "functions")
        for field in fields:
            if self._shows([ONE], [{"role": "system", "content": "a", field: ONE}, USER], None):
                return field
        return "text"

    @cached_property
    def takes_argument_text(self) -> bool:
        """Whether the template concatenates the arguments of a call with texts instead of writing a map.

        A map that is only converted to text has Python's quotes.
        """

        def shows(arguments: object) -> bool:
            texts = (self._rendered([USER, _calling(text, [arguments])]) for text in ("", None))
            return any(TWO in text and f"'{TWO}'" not in text for text in texts)

        return not shows({TWO: "a"}) and shows(json.dumps({TWO: "a"}))

    @cached_property
    def reads_calls(self) -> bool:
        """Whether the template shows calls of earlier answers with their arguments."""
        return self.shows_calls("") or self.shows_calls(None)

    def shows_calls(self, content: str | None) -> bool:
        """Return whether the template shows both the calls and `content`, which is a text, empty or None."""
        kind = FOUR if content else content
        if kind not in self._shown_calls:
            self._shown_calls[kind] = self._finds_calls(kind)
        return self._shown_calls[kind]

    def _finds_calls(self, content: str | None) -> bool:
        if not self._tails:
            return False
        chats = [[USER, _calling(content, [self._arguments(TWO)]), *tail] for tail in self._tails]
        texts = [self._rendered(chat) for chat in chats]
        if not all(word in text for text in texts for word in (ONE, TWO)):
            return False
        if content and not any(content in text for text in texts):  # gpt-oss' drops it after the final answer
            return False
        return content is not None or not self._writes_none(texts[0], chats[0])

    @cached_property
    def _tails(self) -> list[list[Any]]:
        """The messages that may follow a call so that the call is shown: its result, then an answer, or nothing."""
        calls = [_calling(content, [self._arguments(TWO)]) for content in ("", None)]
        tails: list[list[Any]] = [[_result("a")], [_result("a"), ANSWER_MESSAGE, USER], []]
        return [tail for tail in tails if any(self._shows([ONE, TWO], [USER, call, *tail]) for call in calls)]

    def _writes_none(self, text: str, chat: list[Any]) -> bool:
        """Return whether the template writes the word None for content that is None."""
        empty = self._rendered([{**each, "content": ""} if each["content"] is None else each for each in chat])
        return text.count("None") > empty.count("None")

    @cached_property
    def shows_calls_after_text(self) -> bool:
        """Whether an answer may be a message with text and then a message with calls."""
        text = {"role": "assistant", "content": FOUR}
        calls = _calling(self.empty_content, [self._arguments(TWO)])
        return self._shows([ONE, TWO, FOUR], [USER, text, calls, _result(THREE)])

    @cached_property
    def empty_content(self) -> str | None:
        """The content of messages that have only calls."""
        return "" if self.shows_calls("") else None

    @cached_property
    def takes_parallel_calls(self) -> bool:
        """Whether a message may have several calls."""
        calls = _calling(self.empty_content, [self._arguments(TWO), self._arguments(THREE)])
        return self._shows([TWO, THREE], [USER, calls, _result("a"), _result("a", OTHER_ID)])

    @cached_property
    def takes_any_id(self) -> bool:
        """Whether the ids of calls may have another form than nine letters and digits."""
        calls = _calling(self.empty_content, [self._arguments(TWO)], ANY_ID)
        return self._shows([ONE, TWO], [USER, calls, _result("a", ANY_ID)])

    @cached_property
    def reads_results(self) -> bool:
        """Whether the template shows messages of the role `tool`."""
        calls: dict[str, Any] = ANSWER_MESSAGE
        if self.reads_calls:
            calls = _calling(self.empty_content, [self._arguments(TWO)])
        return self._shows([ONE], [USER, calls, {**_result(ONE), "name": "a"}])

    @cached_property
    def result_role(self) -> str:
        """The role of results that are messages of their own."""
        result = {"role": "environment", "content": ONE}  # OLMo 3's role
        is_other = not self.reads_results and self._shows([ONE], [USER, ANSWER_MESSAGE, result])
        return "environment" if is_other else "tool" if self.reads_results else "user"

    def _arguments(self, word: str) -> Any:
        return json.dumps({word: word}) if self.takes_argument_text else {word: word}

    def _shows(self, words: Sequence[str], messages: list[Any], tools: list[Any] | None = None) -> bool:
        text = self._rendered(messages, tools)
        return all(word in text for word in words)

    def _rendered(self, messages: list[Any], tools: list[Any] | None = None) -> str:
        return self._rendered_as_is(list(map(with_parts, messages)) if self.takes_parts else messages, tools)

    def _rendered_as_is(self, messages: list[Any], tools: list[Any] | None) -> str:
        """Return the prompt of a trial chat, an empty text if the template refuses it. Raises TemplateTimeout."""
        try:
            return self._render(messages, tools or self._tools)
        except TemplateTimeout:
            raise
        except InvalidRequest:
            return ""


def with_parts(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message whose content is a list of parts."""
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def _calling(content: str | None, arguments: Sequence[object], call_id: str = CALL_ID) -> dict[str, Any]:
    """Return an answer with a call for each of `arguments`."""
    calls = [
        {"id": each_id, "type": "function", "function": {"name": ONE, "arguments": each}}
        for each_id, each in zip((call_id, OTHER_ID), arguments, strict=False)
    ]
    return {"role": "assistant", "content": content, "tool_calls": calls}


def _result(text: str, call_id: str = CALL_ID) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": text}
