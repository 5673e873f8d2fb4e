"""Grammars in llama.cpp's notation, GBNF: a reader, whose result `gbnf_lark.py` writes for llguidance."""

from __future__ import annotations

import re
from dataclasses import dataclass

MAX_GBNF_CHARACTERS = 32 << 10  # characters of a grammar
MAX_PARENTHESES = 100  # depth of parentheses
MAX_REPETITIONS = 2_000  # llama.cpp's limit

_SPACE = re.compile(r"(?:[ \t]|#[^\r\n]*)*")
_SPACE_AND_LINES = re.compile(r"(?:[ \t\r\n]|#[^\r\n]*)*")
_NAME = re.compile(r"[a-zA-Z0-9_-]+")
_TIMES = re.compile(r"\{[ \t]*(\d+)[ \t]*(?:(,)[ \t]*(\d+)?[ \t]*)?\}")
_ESCAPED = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|([trn\\\"\[\]-]))")
_CONTROLS = {"t": "\t", "r": "\r", "n": "\n"}
_QUANTIFIERS = {"*": (0, None), "+": (1, None), "?": (0, 1)}
_END_OF_LINE = re.compile(r"\r?\n|\r|$")


@dataclass(frozen=True)
class Characters:
    """One character inside, or outside, some ranges of codes."""

    ranges: tuple[tuple[int, int], ...]
    is_negated: bool = False


@dataclass(frozen=True)
class Reference:
    """The name of a rule."""

    name: str


@dataclass(frozen=True)
class Sequence:
    """Parts that follow each other."""

    parts: tuple[Node, ...]


@dataclass(frozen=True)
class Alternation:
    """Alternatives."""

    parts: tuple[Node, ...]


@dataclass(frozen=True)
class Repetition:
    """A part that is repeated."""

    part: Node
    least: int
    most: int | None


Node = Characters | Reference | Sequence | Alternation | Repetition
ANY = Characters((), is_negated=True)


def read(grammar: str) -> dict[str, Node]:
    """Return the rules of a grammar. Raises ValueError for a grammar that llama.cpp could not read."""
    if len(grammar) > MAX_GBNF_CHARACTERS:
        raise ValueError(f"a grammar in llama.cpp's notation has at most {MAX_GBNF_CHARACTERS} characters")
    rules = _Reader(grammar).rules()
    if "root" not in rules:
        raise ValueError("a grammar in llama.cpp's notation needs a rule named root")
    for name, node in rules.items():
        for used in references(node):
            if used not in rules:
                raise ValueError(f"the rule {used!r}, to which the rule {name!r} refers, is not defined")
    return rules


def references(node: Node) -> set[str]:
    """Return the names of the rules to which a part refers."""
    found: set[str] = set()
    pending = [node]
    while pending:
        match pending.pop():
            case Reference(name):
                found.add(name)
            case Sequence(parts) | Alternation(parts):
                pending.extend(parts)
            case Repetition(part):
                pending.append(part)
    return found


class _Reader:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._depth = 0

    def rules(self) -> dict[str, Node]:
        rules: dict[str, Node] = {}
        self._skip(_SPACE_AND_LINES)
        while self._at < len(self._text):
            name = self._expect(_NAME, "the name of a rule")[0]
            self._skip(_SPACE)
            if not self._text.startswith("::=", self._at):
                raise self._error(f"::= must follow the name of the rule {name!r}")
            self._at += 3
            self._skip(_SPACE_AND_LINES)
            if name in rules:
                raise self._error(f"the rule {name!r} is defined twice")
            rules[name] = self._alternatives(_SPACE)
            self._expect(_END_OF_LINE, "the end of the line")
            self._skip(_SPACE_AND_LINES)
        return rules

    def _alternatives(self, space: re.Pattern[str]) -> Node:
        found = [self._sequence(space)]
        while self._text.startswith("|", self._at):
            self._at += 1
            self._skip(_SPACE_AND_LINES)
            found.append(self._sequence(space))
        return found[0] if len(found) == 1 else Alternation(tuple(found))

    def _sequence(self, space: re.Pattern[str]) -> Node:
        parts: list[Node] = []
        while (part := self._part()) is not None:
            self._skip(space)
            parts.append(self._repeated(part, space))
        return parts[0] if len(parts) == 1 else Sequence(tuple(parts))

    def _part(self) -> Node | None:
        match self._text[self._at : self._at + 1]:
            case '"':
                return self._literal()
            case "[":
                return self._class()
            case ".":
                self._at += 1
                return ANY
            case "(":
                return self._group()
            case "*" | "+" | "?" | "{":
                raise self._error("a repetition must follow what it repeats")
            case "<" | "!":
                raise self._error("tokens in angle brackets are not supported; write their text")
        if name := _NAME.match(self._text, self._at):
            self._at = name.end()
            return Reference(name[0])
        return None

    def _group(self) -> Node:
        self._depth += 1
        if self._depth > MAX_PARENTHESES:
            raise self._error(f"more than {MAX_PARENTHESES} parentheses are open")
        self._at += 1
        self._skip(_SPACE_AND_LINES)
        inside = self._alternatives(_SPACE_AND_LINES)
        if not self._text.startswith(")", self._at):
            raise self._error("a closing parenthesis is missing")
        self._at += 1
        self._depth -= 1
        return inside

    def _repeated(self, part: Node, space: re.Pattern[str]) -> Node:
        while (sign := self._text[self._at : self._at + 1]) and sign in "*+?{":
            if sign in _QUANTIFIERS:
                self._at += 1
                least, most = _QUANTIFIERS[sign]
            else:
                times = self._expect(_TIMES, "a number of repetitions, as in {2}, {2,} or {2,5}")
                least = int(times[1])
                most = least if times[2] is None else None if times[3] is None else int(times[3])
                if max(least, most or 0) > MAX_REPETITIONS or (most is not None and most < least):
                    raise self._error(
                        f"repetitions are at most {MAX_REPETITIONS}, and the second number is the greater"
                    )
            part = Repetition(part, least, most)
            self._skip(space)
        return part

    def _literal(self) -> Node:
        self._at += 1
        characters: list[Node] = []
        while not self._text.startswith('"', self._at):
            code = ord(self._character("a quotation mark"))
            characters.append(Characters(((code, code),)))
        self._at += 1
        return characters[0] if len(characters) == 1 else Sequence(tuple(characters))

    def _class(self) -> Node:
        self._at += 1
        is_negated = self._text.startswith("^", self._at)
        self._at += is_negated
        ranges: list[tuple[int, int]] = []
        while not self._text.startswith("]", self._at):
            first = self._character("a closing bracket")
            if self._text.startswith("-", self._at) and not self._text.startswith("-]", self._at):
                self._at += 1
                last = self._character("a closing bracket")
                if last < first:
                    raise self._error("a range of characters ends before it begins")
                ranges.append((ord(first), ord(last)))
            else:
                ranges.append((ord(first), ord(first)))
        self._at += 1
        if not ranges:
            raise self._error("a class has no characters")
        return Characters(tuple(ranges), is_negated)

    def _character(self, end: str) -> str:
        """Take a character of a literal or a class, which may be written as an escape."""
        if self._at >= len(self._text):
            raise self._error(f"{end} is missing")
        if self._text[self._at] != "\\":
            self._at += 1
            return self._text[self._at - 1]
        escaped = self._expect(_ESCAPED, r"an escape: \n, \r, \t, \\, \", \[, \], \xHH, \uHHHH or \UHHHHHHHH")
        if (sign := escaped[4]) is not None:
            return _CONTROLS.get(sign, sign)
        code = int(escaped[1] or escaped[2] or escaped[3], 16)
        if code > 0x10FFFF or 0xD800 <= code < 0xE000:
            raise self._error(f"there is no character with the code {code:#x}")
        return chr(code)

    def _skip(self, pattern: re.Pattern[str]) -> None:
        found = pattern.match(self._text, self._at)
        self._at = found.end() if found else self._at

    def _expect(self, pattern: re.Pattern[str], expected: str) -> re.Match[str]:
        found = pattern.match(self._text, self._at)
        if found is None:
            raise self._error(f"expected {expected}")
        self._at = found.end()
        return found

    def _error(self, reason: str) -> ValueError:
        line = self._text.count("\n", 0, self._at) + 1
        return ValueError(f"line {line} of the grammar in llama.cpp's notation: {reason}")
