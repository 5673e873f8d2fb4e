"""Grammars in llama.cpp's notation rewritten in Lark's, for llguidance.

A parser of characters is slow, so regular parts of rules become terminals. A lexer takes the longest text of a
terminal, so a part becomes a terminal only if none of its texts begins another one (`Ends.are_final`). Other parts are
divided.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from .gbnf import ANY, Alternation, Characters, Node, Reference, Repetition, Sequence, read, references

MAX_TERMINAL_PARTS = 64  # parts of a sequence that become one terminal
MAX_TERMINAL_CHARACTERS = 300  # characters of a part that may become a terminal
MAX_EXPRESSION = 4_000  # characters of a regular expression that a rule becomes


def as_lark(grammar: str) -> str:
    """Return a grammar in Lark's notation. Raises ValueError for a grammar that llama.cpp could not read."""
    return _Writer(read(grammar)).write()


class _Writer:
    def __init__(self, rules: dict[str, Node]) -> None:
        self._rules = rules
        self._names = {name: "start" if name == "root" else f"rule_{index}" for index, name in enumerate(rules)}
        self._regexes: dict[str, str] = {}  # name of a rule -> its regular expression

    def write(self) -> str:
        self._find_regexes()
        if "root" in self._regexes:
            return f"start: {_terminal(self._regexes['root'])}"
        needed = {"root"}
        pending = ["root"]
        lines: list[str] = []
        while pending:
            name = pending.pop()
            lines.append(f"{self._names[name]}: {self._lark(self._rules[name])}")
            for used in sorted(references(self._rules[name]) - needed):
                needed.add(used)
                pending.append(used)
        return "\n".join(lines)

    def _find_regexes(self) -> None:
        """Find the rules that are regular expressions, the rules that they refer to first."""
        waiting = {name: references(node) for name, node in self._rules.items()}
        users: dict[str, list[str]] = {}
        for name, used in waiting.items():
            for each in used:
                users.setdefault(each, []).append(name)
        ready = [name for name, used in waiting.items() if not used]
        while ready:
            name = ready.pop()
            regex = self._regex(self._rules[name])
            if regex is None or len(regex) > MAX_EXPRESSION:
                continue
            self._regexes[name] = regex
            for user in users.get(name, ()):
                waiting[user].discard(name)
                if not waiting[user]:
                    ready.append(user)

    def _regex(self, node: Node) -> str | None:
        """Return the regular expression of a part; None if it refers to a rule that is not a regular expression."""
        match node:
            case Characters():
                return _class(node)
            case Reference(name):
                return self._regexes.get(name)
            case Repetition(part, least, most):
                inside = self._regex(part)
                return None if inside is None else f"(?:{inside}){_times(least, most)}"
        regexes = [self._regex(part) for part in node.parts]
        if None in regexes:
            return None
        found = [
            f"(?:{regex})" if isinstance(node, Sequence) and "|" in regex else regex for regex in map(str, regexes)
        ]
        return "".join(found) if isinstance(node, Sequence) else f"(?:{'|'.join(found)})"

    def _lark(self, node: Node, *, of_characters: bool = False) -> str:
        """Return a part in Lark's notation; `of_characters`: no terminal has more than one."""
        regex = self._regex(node)
        if regex == "":
            return '""'
        is_terminal = isinstance(node, Characters) or not of_characters
        if regex is not None and is_terminal and self._ends(node).are_final():
            return _terminal(regex)
        match node:
            case Reference(name):
                if name in self._regexes:
                    return self._lark(self._rules[name], of_characters=of_characters)
                return self._names[name]
            case Repetition(part, least, most):
                return f"({self._lark(part, of_characters=of_characters)}){_times(least, most)}"
            case Alternation(parts):
                are_apart = _are_apart([self._ends(part).first for part in parts if self._regex(part) is not None])
                return f"({' | '.join(self._lark(part, of_characters=not are_apart) for part in parts)})"
            case Sequence(parts):
                groups = list(parts) if of_characters else self._groups(parts)
                return f"({' '.join(self._lark(each, of_characters=of_characters) for each in groups)})"
        return _terminal(str(regex))

    def _groups(self, parts: tuple[Node, ...]) -> list[Node]:
        """Return the parts of a sequence, with neighbors joined where they can be one terminal."""
        groups: list[Node] = []
        at = 0
        while at < len(parts):
            end = at + 1
            for last in range(at + 1, min(len(parts), at + MAX_TERMINAL_PARTS)):
                if self._regex(parts[last]) is None:
                    break
                if self._regex(parts[at]) is not None and self._ends(Sequence(parts[at : last + 1])).are_final():
                    end = last + 1
            groups.append(parts[at] if end == at + 1 else Sequence(parts[at:end]))
            at = end
        return groups

    def _ends(self, node: Node) -> Ends:
        """Return the ends of the texts of a regular part."""
        match node:
            case Characters():
                return Ends.of_one(node)
            case Reference(name):
                return self._ends(self._rules[name])
            case Repetition(part, least, most):
                inside = self._ends(part)
                return inside.repeated(is_optional=least == 0, is_single=most is not None and most <= 1)
            case Alternation(parts):
                return Ends.of_choice([self._ends(part) for part in parts])
            case Sequence(parts):
                return Ends.of_sequence([self._ends(part) for part in parts])


@dataclass(frozen=True)
class Ends:
    """The positions of Glushkov's automaton of a regular expression: classes of characters, by number."""

    first: tuple[Characters, ...] = ()
    last: tuple[int, ...] = ()  # positions at which a text may end, of `follow`
    follow: tuple[tuple[Characters, ...], ...] = ()  # position -> characters that may follow it
    is_optional: bool = True

    @classmethod
    def of_one(cls, characters: Characters) -> Ends:
        """Return the ends of one character."""
        return cls((characters,), (0,), ((),), is_optional=False)

    @classmethod
    def of_choice(cls, parts: list[Ends]) -> Ends:
        """Return the ends of alternatives."""
        found = cls(is_optional=any(part.is_optional for part in parts))
        for part in parts:
            last = tuple(len(found.follow) + index for index in part.last)
            found = cls(found.first + part.first, found.last + last, found.follow + part.follow, found.is_optional)
        return found

    @classmethod
    def of_sequence(cls, parts: list[Ends]) -> Ends:
        """Return the ends of consecutive parts."""
        found = cls()
        for part in parts:
            if len(found.follow) + len(part.follow) > MAX_TERMINAL_CHARACTERS:
                return cls(last=(0,), follow=((ANY, ANY),))  # too long to decide
            follow = [each + part.first if index in found.last else each for index, each in enumerate(found.follow)]
            last = tuple(len(follow) + index for index in part.last)
            found = cls(
                found.first + part.first if found.is_optional else found.first,
                found.last + last if part.is_optional else last,
                (*follow, *part.follow),
                found.is_optional and part.is_optional,
            )
        return found

    def repeated(self, *, is_optional: bool, is_single: bool) -> Ends:
        """Return the ends of a repetition."""
        follow = self.follow
        if not is_single:
            follow = tuple(each + self.first if index in self.last else each for index, each in enumerate(follow))
        return Ends(self.first, self.last, follow, self.is_optional or is_optional)

    def are_final(self) -> bool:
        """Return whether it is certain that no text begins another one."""
        return (
            not self.is_optional
            and not any(self.follow[index] for index in self.last)
            and all(map(_are_distinct, (self.first, *self.follow)))
        )


def _are_distinct(classes: tuple[Characters, ...]) -> bool:
    return all(_excludes(one, other) for one, other in itertools.combinations(classes, 2))


def _are_apart(groups: list[tuple[Characters, ...]]) -> bool:
    """Return whether no character belongs to the beginnings of two groups."""
    return all(_excludes(a, b) for one, other in itertools.combinations(groups, 2) for a in one for b in other)


def _excludes(one: Characters, other: Characters) -> bool:
    """Return whether no character belongs to both classes."""
    if one.is_negated and other.is_negated:
        return False
    if one.is_negated:
        one, other = other, one
    if other.is_negated:
        return all(any(low <= begin and end <= high for low, high in other.ranges) for begin, end in one.ranges)
    return all(end < low or high < begin for begin, end in one.ranges for low, high in other.ranges)


def _times(least: int, most: int | None) -> str:
    return f"{{{least},{'' if most is None else most}}}"


def _terminal(regex: str) -> str:
    return f"/{regex}/" if regex else '""'


def _class(characters: Characters) -> str:
    """Return a class in Rust's syntax of regular expressions."""
    if characters == ANY:
        return "(?s:.)"
    if not characters.is_negated and len(characters.ranges) == 1 and characters.ranges[0][0] == characters.ranges[0][1]:
        return _written(characters.ranges[0][0])
    ranges = "".join(f"{_written(first)}-{_written(last)}" for first, last in characters.ranges)
    return f"[{'^' if characters.is_negated else ''}{ranges}]"


def _written(code: int) -> str:
    character = chr(code)
    return character if character.isascii() and character.isalnum() else f"\\x{{{code:x}}}"
