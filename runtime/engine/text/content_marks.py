"""Marks in the content of a chat, which distinguish the request's characters in a prompt from the template's.

A chat's content must not become control tokens: `<|im_end|>` in a user's text is text. Before the template runs, the
characters with which control tokens begin and end are replaced in the content by private characters, one by one, so
that lengths stay. No control token in the rendered text then has a character of the content, however the template
trims, divides or joins it. The replacement is undone after rendering.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ...common.errors import InvalidRequest

PRIVATE = re.compile("[\U00100000-\U0010fffd]")
PRIVATE_CODES = range(0x100000, 0x10FFFE)  # the last private plane, which is rarely used
NO_MATCH = "(?!)"
MAX_COMPARED = 100  # length of texts with which a template compares content
MAX_NESTED = 40  # length of texts whose common prefixes are compared once
JSON_SYNTAX = '"\\\n\r\t'  # characters that JSON escapes
# Keys of messages, parts, calls and tools that templates read by name.
STRUCTURE = frozenset(
    {"type", "text", "content", "role", "id", "function", "name", "arguments", "description", "parameters"}
    | {"properties", "required", "items", "enum", "tool_calls", "tool_call_id"}
)


@dataclass(frozen=True)
class RenderedChat:
    """The prompt text of a chat, and the same text with private characters in the content of the request."""

    marked: str
    originals: Mapping[int, str] = field(default_factory=dict)  # original characters by private code

    @cached_property
    def text(self) -> str:
        """The prompt text for the model."""
        return self.marked.translate(self.originals) if self.originals else self.marked

    def with_marked(self, marked: str) -> RenderedChat:
        """Return the chat with another text."""
        return RenderedChat(marked, self.originals)


class ContentMarks:
    """The marking of content for one vocabulary and chat template.

    `special` has the names of special tokens, `written` the names of other added tokens that the template writes as
    markup. Neither kind is markup in content. In answers and in variables of the template, `written` names stay markup:
    the model may have written them. `literals` has the texts with which the template compares content.
    """

    def __init__(self, special: Collection[str], written: Collection[str], literals: Collection[str]) -> None:
        names = {*special, *written} - {""}
        self.names = one_of(names)
        self._edges = frozenset(edge for name in names for edge in (name[0], name[-1]) if _is_edge(edge))
        self._has_edge = re.compile(f"[{re.escape(''.join(sorted(self._edges)))}]" if self._edges else NO_MATCH)
        self._without_edges = one_of(name for name in names if not {name[0], name[-1]} <= self._edges)
        self._bare_names = frozenset(map(_bare, names)) - {"", *literals}
        compared = {text for text in literals if 1 < len(text) <= MAX_COMPARED and self._has_edge.search(text)}
        kept = frozenset(_apart(compared, names, self.names))
        self._kept = one_of(kept)
        self._kept_in_answers = one_of(kept | frozenset(written) - frozenset(special))

    def begin(self, values: Iterable[Any]) -> ChatMarks:
        """Return the marks of one chat, whose content is in `values`. Raises InvalidRequest."""
        used = {character for text in _texts(values) if not text.isascii() for character in PRIVATE.findall(text)}
        free = (chr(code) for code in PRIVATE_CODES if chr(code) not in used)
        return ChatMarks(self, free)

    def mark(self, text: str, private: Callable[[str], str], *, keeps_added: bool) -> str:
        """Return `text` with marks; `private` returns the mark of a character.

        With `keeps_added`, added tokens that are not special stay.
        """
        text = self._without_edges.sub(lambda found: _with_private(found.group(), private), text)
        if not self._has_edge.search(text):
            if len(text) <= MAX_COMPARED and (bare := _bare(text)) in self._bare_names:
                return text.replace(bare, _with_private(bare, private), 1)
            return text
        kept = self._kept_in_answers if keeps_added else self._kept
        table = {ord(edge): private(edge) for edge in self._edges}
        parts = []
        at = 0
        for found in kept.finditer(text):
            parts += [text[at : found.start()].translate(table), found.group()]
            at = found.end()
        return "".join(parts) + text[at:].translate(table)


class ChatMarks:
    """The private characters of one chat, and the characters that they replace."""

    def __init__(self, marks: ContentMarks, free: Iterator[str]) -> None:
        self._marks = marks
        self._free = free
        self._private: dict[str, str] = {}
        self._originals: dict[int, str] = {}

    def message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Return a message with marked content. Its role must be one of the API's roles."""
        is_answer = message.get("role") == "assistant"
        return {
            key: value if key == "role" else self.value(value, keeps_added=is_answer and key != "tool_calls")
            for key, value in message.items()
        }

    def value(self, value: Any, *, keeps_added: bool = False) -> Any:
        """Return a text, or all texts and keys of a list or map, with marks.

        With `keeps_added`, added tokens that are not special stay.
        """
        if isinstance(value, str):
            return self._marks.mark(value, self._stand_in, keeps_added=keeps_added)
        if isinstance(value, list):
            return [self.value(each, keeps_added=keeps_added) for each in value]
        if isinstance(value, dict):
            return {
                key if key in STRUCTURE else self.value(key): self.value(each, keeps_added=keeps_added)
                for key, each in value.items()
            }
        return value

    def rendered(self, text: str) -> RenderedChat:
        """Return the prompt that a template has made from the marked content."""
        return RenderedChat(text, self._originals)

    def _stand_in(self, character: str) -> str:
        """Return the private character that stands for `character`. Raises InvalidRequest."""
        if character not in self._private:
            private = next(self._free, None)
            if private is None:
                raise InvalidRequest("messages: the texts have every private character of Unicode")
            self._private[character] = private
            self._originals[ord(private)] = character
        return self._private[character]


def one_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern for the longest of `texts` at a position; common prefixes are compared once."""
    tree: dict[str, Any] = {}
    long: list[str] = []  # separate, because a pattern with many nested groups cannot be compiled
    for text in texts:
        if len(text) > MAX_NESTED:
            long.append(text)
            continue
        node = tree
        for character in text:
            node = node.setdefault(character, {})
        node[""] = {}
    choices = [re.escape(text) for text in sorted(long, key=len, reverse=True)]
    return re.compile("|".join([*choices, *([_pattern(tree)] if tree else [])]) or NO_MATCH)


def _pattern(tree: Mapping[str, Any]) -> str:
    parts = []
    for character, rest in tree.items():
        if character:
            parts.append(re.escape(character) + _pattern(rest))
    if not parts:
        return ""
    joined = parts[0] if len(parts) == 1 and "" not in tree else f"(?:{'|'.join(parts)})"
    return joined + "?" if "" in tree else joined


def _apart(texts: Collection[str], names: Collection[str], pattern: re.Pattern[str]) -> Iterator[str]:
    """Yield each of `texts` that is not part of a name, contains no name, and does not overlap with a name."""
    longest = max(map(len, texts), default=0)
    joined = "\n".join(names)
    begins = {name[:length] for name in names for length in range(1, min(len(name), longest))}
    ends = {name[-length:] for name in names for length in range(1, min(len(name), longest))}
    for text in texts:
        parts = range(1, len(text))
        overlaps = any(text[at:] in begins or text[:at] in ends for at in parts)
        if text not in joined and not pattern.search(text) and not overlaps:
            yield text


def _is_edge(character: str) -> bool:
    """Return whether a character may be replaced throughout a text; the syntax of JSON must stay."""
    return not character.isalnum() and not character.isspace() and character not in JSON_SYNTAX


def _with_private(text: str, private: Callable[[str], str]) -> str:
    """Return the text with a private character for the first one that JSON does not escape."""
    at = next((at for at, character in enumerate(text) if character not in JSON_SYNTAX), None)
    return text if at is None else text[:at] + private(text[at]) + text[at + 1 :]


def _bare(text: str) -> str:
    """Return the text without characters at its ends that are neither letters nor digits."""
    begin, end = 0, len(text)
    while begin < end and not text[begin].isalnum():
        begin += 1
    while end > begin and not text[end - 1].isalnum():
        end -= 1
    return text[begin:end]


def _texts(values: Iterable[Any]) -> Iterator[str]:
    """Yield all texts in nested lists and maps."""
    unseen = list(values)
    while unseen:
        each = unseen.pop()
        if isinstance(each, str):
            yield each
        elif isinstance(each, list):
            unseen.extend(each)
        elif isinstance(each, dict):
            unseen.extend(each.keys())
            unseen.extend(each.values())
