"""The arguments of a call as literals, `key=value, …`: their JSON as they stream, and the text of given ones."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .argument_streams import SPACE, num_held


@dataclass(frozen=True, slots=True)
class Notation:
    """The notation of arguments in a family of models."""

    sign: str  # sign between a key and its value
    end: str  # sign after the last argument
    words: Mapping[str, str]  # words of JSON -> words of the notation
    key: re.Pattern[str]  # a key, from its first character on
    never_in_keys: str


_WORD = re.compile(r"[^\s=,:()\[\]{}'\"]+")
_NEVER_IN_WORDS = " \t\r\n=,:()[]{}'\""
_JSON_WORDS = {word: word for word in ("true", "false", "null")}

NOTATIONS = {
    "python": Notation("=", ")", {"true": "True", "false": "False", "null": "None"}, _WORD, _NEVER_IN_WORDS),
    "assignments": Notation("=", ")", _JSON_WORDS, _WORD, _NEVER_IN_WORDS),
    "gemma": Notation(
        ":",
        "}",
        _JSON_WORDS,
        re.compile(r"[^\s,:\[\]{}\"](?:[^,:\[\]{}\"]*[^\s,:\[\]{}\"])?"),
        '\t\r\n,:[]{}"',
    ),
}

_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "\n": ""}
_ESCAPES |= {sign: sign for sign in "\\'\"/"}
_DIGITS = {"x": 2, "u": 4, "U": 8}  # letter of an escape -> hexadecimal digits after it
_HEX = re.compile("[0-9a-fA-F]*")
_JSON_PART = re.compile(r'"(?:[^"\\]|\\.)*"|\b(?:true|false|null)\b')


class LiteralArguments:
    """Arguments of LFM2, OLMo 3 and Gemma 4, as a JSON object. They end before the `end` of their notation.

    Values are literals: strings, numbers, True, False, None, lists, tuples and dictionaries. Other words are strings.
    A string may also be between two `quote`, without escapes.
    """

    def __init__(self, notation: Notation, quote: str = "") -> None:
        self.is_complete = False
        self._notation = notation
        self._own_quote = quote
        self._is_broken = False  # the text is not a list of arguments
        self._num_arguments = 0
        self._containers: list[tuple[str, str]] = []  # the end of each, in the text and in JSON
        self._is_first = True  # no element of the innermost container has been read
        self._quote = ""  # end of the string that has begun
        self._is_key = False  # the string is a key of a dictionary
        # A step reads from a place in the text, and returns the next place, or None if it needs more text.
        self._step: Callable[[str, int, list[str]], int | None] = self._argument

    def feed(self, text: str) -> tuple[str, str]:
        """See `ArgumentStream.feed`."""
        pieces: list[str] = []
        at = 0
        while not (self.is_complete or self._is_broken):
            if self._step != self._string:
                at = len(text) - len(text[at:].lstrip(SPACE)) if text[at : at + 1] in SPACE else at
            after = self._step(text, at, pieces) if at < len(text) else None
            if after is None:
                break
            at = after
        return "".join(pieces), "" if self._is_broken else text[at:]

    def finish(self, is_cut: bool) -> str:
        """See `ArgumentStream.finish`."""
        return "{}" if not is_cut and not self._num_arguments and not self.is_complete else ""

    # Steps between values

    def _argument(self, text: str, at: int, pieces: list[str]) -> int | None:
        """Take a key and the sign after it, or find the end of the arguments."""
        if text[at] == self._notation.end:
            return self._end(at, pieces)
        key = self._notation.key.match(text, at)
        if key is None:
            return self._broken(at)
        sign = len(text) - len(text[key.end() :].lstrip(SPACE))
        if sign == len(text):
            return None
        if text[sign] != self._notation.sign:
            return self._broken(at)
        pieces.append(f"{', ' if self._num_arguments else '{'}{_quoted(key.group())}: ")
        self._num_arguments += 1
        self._step = self._value
        return sign + 1

    def _next(self, text: str, at: int, pieces: list[str]) -> int | None:
        """Take the comma or the end after a value."""
        if text[at] == ",":
            self._is_first = False
            self._step = self._element if self._containers else self._argument
            return at + 1
        if self._containers:
            return self._closed(text, at, pieces)
        return self._end(at, pieces) if text[at] == self._notation.end else self._broken(at)

    def _element(self, text: str, at: int, pieces: list[str]) -> int | None:
        """Begin an element of a container, or find its end."""
        closing, _ = self._containers[-1]
        if text[at] == closing:
            return self._closed(text, at, pieces)
        pieces.append("" if self._is_first else ", ")
        self._step = self._dictionary_key if closing == "}" else self._value
        return at

    def _closed(self, text: str, at: int, pieces: list[str]) -> int | None:
        closing, written = self._containers[-1]
        if text[at] != closing:
            return self._broken(at)
        self._containers.pop()
        pieces.append(written)
        self._step = self._next
        return at + 1

    def _colon(self, text: str, at: int, pieces: list[str]) -> int | None:
        if text[at] != ":":
            return self._broken(at)
        pieces.append(": ")
        self._step = self._value
        return at + 1

    def _end(self, at: int, pieces: list[str]) -> int:
        pieces.append("}" if self._num_arguments else "{}")
        self.is_complete = True
        return at

    def _broken(self, at: int) -> int:
        self._is_broken = True
        return at

    # Values

    def _value(self, text: str, at: int, pieces: list[str]) -> int | None:
        """Take a word, or the beginning of a string or a container."""
        sign = text[at]
        if sign in "'\"" or self._may_be_quote(text[at:]):
            return self._open_string(text, at, pieces, is_key=False)
        if sign in "[({":
            written = "{}" if sign == "{" else "[]"
            self._containers.append(({"[": "]", "(": ")", "{": "}"}[sign], written[1]))
            self._is_first = True
            pieces.append(written[0])
            self._step = self._element
            return at + 1
        word = _WORD.match(text, at)
        if word is None:
            return self._broken(at)
        if word.end() == len(text):
            return None
        pieces.append(_word_json(word.group()))
        self._step = self._next
        return word.end()

    def _dictionary_key(self, text: str, at: int, pieces: list[str]) -> int | None:
        if text[at] in "'\"" or self._may_be_quote(text[at:]):
            return self._open_string(text, at, pieces, is_key=True)
        word = self._notation.key.match(text, at)
        if word is None:
            return self._broken(at)
        if not text[word.end() :].lstrip(SPACE):
            return None
        pieces.append(_quoted(word.group()))
        self._step = self._colon
        return word.end()

    def _open_string(self, text: str, at: int, pieces: list[str], *, is_key: bool) -> int | None:
        quote = text[at]
        if quote not in "'\"":
            if not text.startswith(self._own_quote, at):
                return None
            quote = self._own_quote
        elif len(text) < at + 3 and (3 * quote).startswith(text[at:]):
            return None  # one quote, an empty string, or the beginning of three quotes
        self._quote = 3 * quote if quote in "'\"" and text.startswith(3 * quote, at) else quote
        self._is_key = is_key
        self._step = self._string
        pieces.append('"')
        return at + len(self._quote)

    def _string(self, text: str, at: int, pieces: list[str]) -> int | None:
        """Take characters of a string up to an escape or its end, an escape, or the end."""
        if text.startswith(self._quote, at):
            pieces.append('"')
            self._step = self._colon if self._is_key else self._next
            return at + len(self._quote)
        is_plain = self._quote == self._own_quote
        if text[at] == "\\" and not is_plain:
            return _escape(text, at, pieces)
        signs = (self._quote,) if is_plain else (self._quote, "\\")
        ends = [place for sign in signs if (place := text.find(sign, at)) >= 0]
        end = min(ends) if ends else len(text) - num_held(text[at:], self._quote)
        pieces.append(_quoted(text[at:end])[1:-1])
        return end if end > at else None

    def _may_be_quote(self, text: str) -> bool:
        """Return whether a text begins with the quote, or with a part of it that may continue."""
        return bool(self._own_quote) and (text.startswith(self._own_quote) or self._own_quote.startswith(text))


def python_arguments(arguments: Mapping[str, Any]) -> str:
    """Return arguments in Python's syntax."""
    return ", ".join(f"{key}={python_literal(value)}" for key, value in arguments.items())


def python_literal(value: Any) -> str:
    """Return a JSON value as a literal of Python."""
    words = NOTATIONS["python"].words
    return _JSON_PART.sub(lambda part: words.get(part.group(), part.group()), json.dumps(value, ensure_ascii=False))


def gemma_arguments(arguments: Mapping[str, Any], quote: str) -> str:
    """Return arguments in Gemma's notation."""
    return ",".join(f"{key}:{gemma_literal(value, quote)}" for key, value in arguments.items())


def gemma_literal(value: Any, quote: str) -> str:
    """Return a JSON value as a literal of Gemma."""
    match value:
        case str():
            return f"{quote}{value}{quote}"
        case dict():
            return f"{{{gemma_arguments(value, quote)}}}"
        case list():
            return f"[{','.join(gemma_literal(each, quote) for each in value)}]"
    return json.dumps(value)


def _escape(text: str, at: int, pieces: list[str]) -> int | None:
    """Take the escape at a place in a string; None if it may continue after the text."""
    sign = text[at + 1 : at + 2]
    if not sign:
        return None
    if sign in _DIGITS:
        digits = _HEX.match(text, at + 2, at + 2 + _DIGITS[sign])
        assert digits is not None, "it matches the empty text"
        if len(digits.group()) < _DIGITS[sign]:
            if digits.end() == len(text):
                return None
        elif sign == "u":
            pieces.append(f"\\u{digits.group()}")  # JSON joins two halves of a character
            return digits.end()
        elif (code := int(digits.group(), 16)) <= 0x10FFFF and not 0xD800 <= code < 0xE000:
            pieces.append(_quoted(chr(code))[1:-1])
            return digits.end()
    pieces.append(_quoted(_ESCAPES.get(sign, f"\\{sign}"))[1:-1])
    return at + 2


def _word_json(word: str) -> str:
    """Return the JSON of a word: of a constant, a number, or a string."""
    for written, name in NOTATIONS["python"].words.items():
        if word in (written, name):
            return written
    if _NUMBER.fullmatch(word):
        return word
    try:
        return str(int(word, 0))
    except ValueError:
        pass
    try:
        number = float(word)
    except ValueError:
        number = math.nan
    return json.dumps(number) if math.isfinite(number) else _quoted(word)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
