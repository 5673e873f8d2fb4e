"""Streaming parsers of a model's output: reasoning, answer, and the names and arguments of tool calls.

The output of a parser is a function of the text alone: for every division of a text into pieces the joined deltas are
the same. Markup never reaches a delta, even when the text ends within it. White space around markup belongs to it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from ...common.types import Delta, DeltaKind
from .argument_streams import SPACE, ArgumentStream, JSONArguments, ParameterArguments, match_literal, num_held
from .literal_arguments import NOTATIONS, LiteralArguments
from .markup import MARK, CallSyntax, Markup

Schemas = Mapping[str, Any]  # tool's name -> schema of its arguments

MAX_HELD_SPACE = 64  # characters of white space that may turn out to belong to markup

_NAME = re.compile(r"[A-Za-z0-9_.:/-]*")
_RECIPIENT = re.compile(r"to=functions\.([A-Za-z0-9_.:/-]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")


class OutputParser(Protocol):
    """A parser of one output."""

    def feed(self, text: str) -> list[Delta]:
        """Return the deltas that the next piece of the text adds."""

    def finish(self, is_cut: bool) -> list[Delta]:
        """Return the rest at the end of the text. A possible beginning of markup is dropped if the text `is_cut`."""

    @property
    def kind(self) -> DeltaKind | None:
        """The kind of the next character if it is plain text; None: it is not shown."""

    @property
    def holds_text(self) -> bool:
        """Whether the text ends with a possible beginning of markup."""


class MarkupParser:
    """Parser of outputs with literals around reasoning, answer and calls.

    Without `schemas` no text is a call. The output begins within reasoning if `in_reasoning`. With `takes_bare_calls`,
    the markup's calls may come without an opening literal.
    """

    def __init__(
        self, markup: Markup, schemas: Schemas | None, *, in_reasoning: bool = False, takes_bare_calls: bool = True
    ) -> None:
        self._reasoning = markup.reasoning
        self._tags = markup.answer
        self._answer_end = ""  # the literal that ends the answer
        self._calls = None if schemas is None else markup.calls
        self._schemas = schemas or {}
        self._takes_bare_calls = takes_bare_calls
        self._stray = re.compile("|".join(re.escape(MARK + name) for name in markup.tokens) or MARK)
        self._buffer = ""
        self._deltas: list[Delta] = []
        self._skips_space = in_reasoning  # the text so far ends with markup
        self._expected = ""  # the literal that must come next
        self._after_expected: Callable[[], Any] = self._name
        self._arguments: ArgumentStream = JSONArguments()
        # A state reads from the buffer, and returns the next state, or None if it needs more text.
        self._state: Callable[[], Any] = self._thoughts if in_reasoning else self._start

    def feed(self, text: str) -> list[Delta]:
        """See `OutputParser.feed`."""
        self._buffer += text
        while (state := self._state()) is not None:
            self._state = state
        deltas = self._deltas
        self._deltas = []
        return deltas

    def finish(self, is_cut: bool) -> list[Delta]:
        """See `OutputParser.finish`."""
        rest = self._buffer.lstrip(SPACE) if self._skips_space else self._buffer
        self._buffer = ""
        if self._state == self._in_arguments:
            self._emit("arguments", self._arguments.finish(is_cut))
        elif self._state == self._thoughts:
            assert self._reasoning is not None
            self._emit("reasoning", _without_start(rest, self._reasoning.close) if is_cut else rest.rstrip(SPACE))
        elif self._state == self._answer:
            self._emit("content", _without_start(rest, *self._ends_of_answer()) if is_cut else rest)
        elif self._state in (self._start, self._tag, self._bare) and (not is_cut or not rest.strip(SPACE)):
            self._emit("content", rest)
        deltas = self._deltas
        self._deltas = []
        return deltas

    @property
    def kind(self) -> DeltaKind | None:
        """See `OutputParser.kind`."""
        if self._state == self._thoughts:
            return "reasoning"
        is_answer = self._state in (self._start, self._tag, self._bare, self._answer) and not self._skips_space
        return "content" if is_answer else None

    @property
    def holds_text(self) -> bool:
        """See `OutputParser.holds_text`."""
        return bool(self._buffer)

    # States: reasoning and the answer's text

    def _start(self) -> Callable[[], Any] | None:
        """Find out whether the output begins with reasoning."""
        if self._reasoning is None:
            return self._tag
        text = self._buffer.lstrip(SPACE)
        literal = self._reasoning.open
        if text.startswith(literal):
            self._buffer = text[len(literal) :]
            self._skips_space = True
            return self._thoughts
        return None if literal.startswith(text) else self._tag

    def _thoughts(self) -> Callable[[], Any] | None:
        assert self._reasoning is not None, "the prompt ends with its literal"
        return self._tag if self._read_until("reasoning", self._reasoning.close) else None

    def _tag(self) -> Callable[[], Any] | None:
        """Find out whether a literal begins the answer."""
        if self._tags is None:
            return self._bare
        text = self._buffer.lstrip(SPACE)
        if text.startswith(self._tags.open):
            self._buffer = text[len(self._tags.open) :]
            self._skips_space = True
            self._answer_end = self._tags.close
            return self._bare
        return None if self._tags.open.startswith(text) else self._bare

    def _bare(self) -> Callable[[], Any] | None:
        """Find out whether the answer begins with calls without an opening literal."""
        calls = self._calls
        if calls is None or not calls.bare or not self._takes_bare_calls:
            return self._answer
        end = match_literal(calls.open, self._buffer)
        if end is None:
            return None
        return self._answer if end < 0 else self._expect(calls.open, self._name)

    def _answer(self) -> Callable[[], Any] | None:
        literal = self._read_until("content", *self._ends_of_answer())
        if not literal:
            return None
        if literal == self._answer_end:
            self._answer_end = ""
            return self._answer
        assert self._calls is not None, "only calls have another literal"
        return self._expect((self._calls.begin + self._calls.open)[len(literal) :], self._name)

    def _ends_of_answer(self) -> list[str]:
        """Return the literals that end the text of the answer."""
        trigger = "" if self._calls is None else self._calls.trigger
        return [literal for literal in (trigger, self._answer_end) if literal]

    # States: calls

    def _literal(self) -> Callable[[], Any] | None:
        """Take the literal that must come next."""
        end = match_literal(self._expected, self._buffer)
        if end is None:
            return None
        if end < 0:
            return self._dropped
        self._buffer = self._buffer[end:]
        return self._after_expected

    def _name(self) -> Callable[[], Any] | None:
        """Take a tool's name, which ends at the first character that names cannot have."""
        self._buffer = self._buffer.lstrip(SPACE)  # more spaces may follow the literal's end
        match = _NAME.match(self._buffer)
        assert match is not None, "it matches the empty text"
        name = match.group()
        if len(name) == len(self._buffer):
            return None
        if not name:
            return self._dropped
        assert self._calls is not None
        self._buffer = self._buffer[len(name) :]
        self._deltas.append(Delta("call", name))
        self._arguments = _arguments(self._calls, self._schemas.get(name))
        return self._call_id

    def _call_id(self) -> Callable[[], Any] | None:
        """Skip an id after the name. Clients get ids of the server's own."""
        assert self._calls is not None
        literal = self._calls.id_open
        if literal and not self._buffer.startswith(literal) and literal.startswith(self._buffer):
            return None
        if literal and self._buffer.startswith(literal):
            match = _NAME.match(self._buffer, len(literal))
            assert match is not None, "it matches the empty text"
            if match.end() == len(self._buffer):
                return None
            self._buffer = self._buffer[match.end() :]
        return self._expect(self._calls.middle, self._in_arguments)

    def _in_arguments(self) -> Callable[[], Any] | None:
        assert self._calls is not None
        text, self._buffer = self._arguments.feed(self._buffer)
        self._emit("arguments", text)
        return self._expect(self._calls.close, self._next_call) if self._arguments.is_complete else None

    def _next_call(self) -> Callable[[], Any] | None:
        """Find out whether another call follows. Other text after a call is dropped."""
        assert self._calls is not None
        literal = self._calls.separator + self._calls.open
        first = next(iter(literal.split()), "")  # empty where only white space is between calls
        text = self._buffer.lstrip(SPACE)
        if text.startswith(first):
            return self._expect(literal, self._name)
        return None if first.startswith(text) else self._dropped

    def _dropped(self) -> None:
        self._buffer = ""

    # Steps

    def _expect(self, literal: str, then: Callable[[], Any]) -> Callable[[], Any]:
        """Return the state that takes `literal`, and then continues with another."""
        self._expected = literal
        self._after_expected = then
        return self._literal

    def _read_until(self, kind: DeltaKind, *literals: str) -> str:
        """Read text up to and including the first of the literals; return it, "" if the text has none of them.

        Without literals, read everything.
        """
        if self._skips_space:
            self._buffer = self._buffer.lstrip(SPACE)
            self._skips_space = not self._buffer
        if not literals:
            self._emit(kind, self._buffer)
            self._buffer = ""
            return ""
        places = [(place, each) for each in literals if (place := self._buffer.find(each)) >= 0]
        held = max(num_held(self._buffer, each) for each in literals)
        end, literal = min(places, default=(len(self._buffer) - held, ""))
        last_space = self._buffer[max(0, end - MAX_HELD_SPACE) : end]
        end_of_text = end - (len(last_space) - len(last_space.rstrip(SPACE)))
        self._emit(kind, self._buffer[:end_of_text])
        self._buffer = self._buffer[end + len(literal) if literal else end_of_text :]
        self._skips_space |= bool(literal)
        return literal

    def _emit(self, kind: DeltaKind, text: str) -> None:
        """Append a piece without special tokens, which do not belong in it."""
        if MARK in text:
            text = self._stray.sub("", text)
        if text:
            self._deltas.append(Delta(kind, text))


class ChannelParser:
    """Parser of OpenAI's harmony format: messages, each with a header that names its channel and its recipient."""

    def __init__(self, markup: Markup, schemas: Schemas | None) -> None:
        self._message, self._start = markup.marked("<|message|>"), markup.marked("<|start|>")
        self._ends = (*map(markup.marked, ("<|end|>", "<|call|>", "<|return|>")), self._start)
        self._first = (markup.marked("<|channel|>"), "to=functions.", *self._ends, self._message)  # starts of a header
        self._takes_calls = schemas is not None
        self._buffer = ""
        self._kind: DeltaKind | None = None  # kind of the message's body; None: dropped
        self._seen: set[DeltaKind] = set()
        self._in_body = False
        self._arguments: JSONArguments | None = None

    def feed(self, text: str) -> list[Delta]:
        """See `OutputParser.feed`."""
        self._buffer += text
        deltas: list[Delta] = []
        while self._header(deltas) if not self._in_body else self._body(deltas):
            pass
        return deltas

    def finish(self, is_cut: bool) -> list[Delta]:
        """See `OutputParser.finish`."""
        deltas: list[Delta] = []
        text = self._buffer.lstrip(SPACE)
        if text and not self._in_body and not any(map(text.startswith, self._first)):  # the text is not a header
            self._begin("content", deltas)
        rest = self._buffer
        self._buffer = ""
        if self._in_body and not is_cut:
            self._add_text(rest, deltas)
        if self._arguments is not None and (text := self._arguments.finish(is_cut)):
            deltas.append(Delta("arguments", text))
        return deltas

    @property
    def kind(self) -> DeltaKind | None:
        """See `OutputParser.kind`."""
        return self._kind if self._in_body and self._arguments is None else None

    @property
    def holds_text(self) -> bool:
        """See `OutputParser.holds_text`."""
        return bool(self._buffer)

    def _header(self, deltas: list[Delta]) -> bool:
        """Take a message's header; return whether parsing can continue. Text without a header is the answer."""
        text = self._buffer.lstrip(SPACE)
        if not any(each.startswith(text) or text.startswith(each) for each in self._first):
            self._begin("content", deltas)
            return True
        end = self._buffer.find(self._message)
        if end < 0:
            return False
        header = self._buffer[:end]
        self._buffer = self._buffer[end + len(self._message) :]
        recipient = _RECIPIENT.search(header)
        channel = _CHANNEL.search(header)
        if recipient and self._takes_calls:
            self._begin("call", deltas)
            self._arguments = JSONArguments()
            deltas.append(Delta("call", recipient.group(1)))
        else:
            self._begin("reasoning" if channel and channel.group(1) == "analysis" else "content", deltas)
        return True

    def _begin(self, kind: DeltaKind, deltas: list[Delta]) -> None:
        """Begin a message's body. Messages of one kind are joined with a line break."""
        self._in_body = True
        self._kind = kind
        self._arguments = None
        if kind in self._seen and kind != "call":
            deltas.append(Delta(kind, "\n"))
        self._seen.add(kind)

    def _body(self, deltas: list[Delta]) -> bool:
        places = [(place, each) for each in self._ends if (place := self._buffer.find(each)) >= 0]
        if not places:
            end = len(self._buffer) - max(num_held(self._buffer, each) for each in self._ends)
            self._add_text(self._buffer[:end], deltas)
            self._buffer = self._buffer[end:]
            return False
        end, literal = min(places)
        self._add_text(self._buffer[:end], deltas)
        if self._arguments is not None and (text := self._arguments.finish(is_cut=False)):
            deltas.append(Delta("arguments", text))
        self._arguments = None
        self._buffer = self._buffer[end if literal == self._start else end + len(literal) :]
        self._in_body = False
        return True

    def _add_text(self, text: str, deltas: list[Delta]) -> None:
        if self._arguments is not None:
            if not self._arguments.is_complete and (piece := self._arguments.feed(text)[0]):
                deltas.append(Delta("arguments", piece))
        elif text and self._kind is not None:
            deltas.append(Delta(self._kind, text))


def _arguments(calls: CallSyntax, schema: Any) -> ArgumentStream:
    if calls.arguments == "parameters":
        return ParameterArguments(calls, schema)
    return JSONArguments() if calls.arguments == "json" else LiteralArguments(NOTATIONS[calls.arguments], calls.quote)


def _without_start(text: str, *literals: str) -> str:
    """Return the text without the beginning of a literal at its end, and without white space before that."""
    held = max((num_held(text, literal) for literal in literals), default=0)
    return text[: len(text) - held].rstrip(SPACE) if held else text
