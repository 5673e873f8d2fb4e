"""Regular expressions of JSON schemas for llguidance, which reads classes of characters in Rust's syntax.

Rewriting a rewritten pattern does not change it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

# A character after a backslash, a Unicode property, or a class of characters.
_ESCAPE = r"\\(?:[pP]\{[^}]*\}|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|u\{[0-9a-fA-F]+\}|c[a-zA-Z]|.)"
_PATTERN_PART = re.compile(rf"{_ESCAPE}|\[(\^?)((?:\\.|[^\]\\])*)\]", re.DOTALL)
# A character of a class, or a class within it.
_ATOM = re.compile(f"{_ESCAPE}|.", re.DOTALL)
_ANY_PART = re.compile(f"{_PATTERN_PART.pattern}|.", re.DOTALL)
_OPENING = re.compile(r"\((?:\?:)?(?!\?)")  # opening of a group
_TIMES = re.compile(r"\{\d+,\d+\}(?![?+*{])")
_TIMES_OF_PART = re.compile(r"(?:[*+?]|\{\d+(?:,\d*)?\})\??")
MAX_ROTATED = 1_000  # characters of a pattern whose repetitions may be rewritten
_SYNTAX = frozenset("-[&~")  # syntax of classes in Rust
_MEANT = frozenset("bBcdDfknrsStuvwWx")  # letters with a meaning after a backslash in ECMAScript
_NUMBERED = re.compile(r"\\[xu]\{?([0-9a-fA-F]+)\}?")
_ESCAPED = {"t": 9, "n": 10, "v": 11, "f": 12, "r": 13, "b": 8, "0": 0}  # characters after a backslash, in a class
CONTROL = frozenset(range(32))


def as_read(pattern: str) -> str:
    """Return a pattern whose classes mean the same in llguidance as the original ones in ECMAScript."""
    return rotated(_PATTERN_PART.sub(_written, pattern))


def rotated(pattern: str) -> str:
    """Return a pattern with each (?:XY){m,n}X rewritten as X(?:YX){m,n}, which has the same meaning.

    For a limit of words, (?:\\S+\\s+){0,99}\\S+, the library then makes a hundredth of the expressions.
    """
    if len(pattern) > MAX_ROTATED:
        return pattern
    while (changed := _with_one_rotation(pattern)) != pattern:
        pattern = changed
    return pattern


def may_have_newline(inner: str) -> bool:
    """Return whether a class of characters, without its brackets, may have a line feed."""
    for ends in _ranges(_ATOM.findall(inner)):
        first, last = _code(ends[0]), _code(ends[-1])
        if first is None or last is None:
            if ends[0] not in (r"\d", r"\w"):
                return True
        elif first <= ord("\n") <= last:
            return True
    return False


def _with_one_rotation(pattern: str) -> str:
    for begin, end in _groups(pattern):
        times = _TIMES.match(pattern, end)
        opening = _OPENING.match(pattern, begin)
        if times is None or opening is None:
            continue
        moved = kept = ""
        behind = times.end()
        for part in _sequence(pattern[opening.end() : end - 1]):
            is_behind = pattern.startswith(part, behind) and not _TIMES_OF_PART.match(pattern, behind + len(part))
            if is_behind and not kept:
                moved = moved + part
                behind = behind + len(part)
            else:
                kept += part
        if moved and kept:
            return f"{pattern[:begin]}{moved}{opening[0]}{kept}{moved}){times[0]}{pattern[behind:]}"
    return pattern


def _groups(pattern: str) -> list[tuple[int, int]]:
    """Return where groups begin and end."""
    groups: list[tuple[int, int]] = []
    open_groups: list[int] = []
    for part in _ANY_PART.finditer(pattern):
        if part[0] == "(":
            open_groups.append(part.start())
        elif part[0] == ")" and open_groups:
            groups.append((open_groups.pop(), part.end()))
    return groups


def _sequence(pattern: str) -> list[str]:
    """Return the consecutive parts of a pattern, each with its quantifier; none if it has alternatives."""
    ends = dict(_groups(pattern))
    parts: list[str] = []
    at = 0
    while part := _ANY_PART.match(pattern, at):
        if part[0] in "|)*+?{":
            return []
        end = ends.get(at, part.end())
        times = _TIMES_OF_PART.match(pattern, end)
        end = times.end() if times else end
        parts.append(pattern[at:end])
        at = end
    return parts


def _written(part: re.Match[str]) -> str:
    """Return a part of a pattern in llguidance's syntax.

    A class with all control characters would also allow the quotation mark and the backslash, which JSON escapes in the
    same way, so the class gets all but the first. In Rust's syntax, a bracket in a class begins an inner class, and &&,
    ~~ and -- are operators. A class may be empty, or the complement of an empty class.
    """
    if part[2] is None:
        return _without_nul([(part[0],)]) if _is_property(part[0]) else _without_escape(part[0])
    if not part[2]:
        return r"[\s\S]" if part[1] else r"[^\s\S]"
    ranges = list(_ranges(_ATOM.findall(part[2])))
    body = _body(ranges)
    if part[1]:
        return f"[^{body}]" if body.startswith((r"\x00", r"\s\S")) else rf"[^\x00{body}]"
    has_controls = frozenset().union(*map(_controls, ranges)) == CONTROL
    return _without_nul(ranges) if has_controls or any(_is_property(each[0]) for each in ranges) else f"[{body}]"


def _without_nul(ranges: list[tuple[str, ...]]) -> str:
    """Return the expression of a class without its first character: NUL."""
    properties = [each[0] for each in ranges if _is_property(each[0])]
    classes = [rf"[^\x00\{'P' if each[1] == 'p' else 'p'}{each[2:]}]" for each in properties]
    others = [(r"\x01", *each[1:]) if _code(each[0]) == 0 else each for each in ranges if _is_other(each)]
    classes += [f"[{_body(others)}]"] if others else []
    return classes[0] if len(classes) == 1 else f"(?:{'|'.join(classes)})"


def _is_other(ends: tuple[str, ...]) -> bool:
    """Return whether a range is not a property, and has more than NUL."""
    return not _is_property(ends[0]) and _code(ends[-1]) != 0


def _is_property(atom: str) -> bool:
    return atom.startswith((r"\p{", r"\P{"))


def _body(ranges: list[tuple[str, ...]]) -> str:
    return "".join("-".join(map(_atom, each)) for each in ranges)


def _ranges(atoms: list[str]) -> Iterator[tuple[str, ...]]:
    """Yield the atoms of a class: single atoms, or the first and the last atom of a range."""
    at = 0
    while at < len(atoms):
        if atoms[at + 1 : at + 2] != ["-"] or at + 2 >= len(atoms):
            yield (atoms[at],)
            at += 1
            continue
        ends = (atoms[at], atoms[at + 2])
        yield from [ends] if None not in map(_code, ends) else ((each,) for each in atoms[at : at + 3])
        at += 3


def _without_escape(atom: str) -> str:
    """Return a character without a backslash that only has a meaning in Rust's syntax, as in \\z.

    A control character, as in \\cJ, gets its code.
    """
    if len(atom) == 3 and atom.startswith(r"\c"):
        return rf"\x{ord(atom[2]) % 32:02x}"
    is_plain = len(atom) == 2 and atom[0] == "\\" and atom[1].isascii() and atom[1].isalpha()
    return atom[1] if is_plain and atom[1] not in _MEANT else atom


def _atom(atom: str) -> str:
    code = _code(atom) if atom[:2] in (r"\0", r"\b", r"\c") else None  # escapes that Rust's syntax does not have
    return "\\" + atom if atom in _SYNTAX else _without_escape(atom) if code is None else rf"\x{code:02x}"


def _code(atom: str) -> int | None:
    """Return the code of a character in a class; None for a class of characters."""
    if not atom.startswith("\\"):
        return ord(atom)
    if numbered := _NUMBERED.fullmatch(atom):
        return int(numbered[1], 16)
    if atom[1] == "c" and len(atom) == 3:
        return ord(atom[2]) % 32
    return None if _is_property(atom) or atom[1] in "dDsSwW" else _ESCAPED.get(atom[1], ord(atom[1]))


def _controls(ends: tuple[str, ...]) -> frozenset[int]:
    """Return the control characters of a range in a class."""
    if ends[0] == r"\s":
        return frozenset(range(9, 14))
    first, last = _code(ends[0]), _code(ends[-1])
    return CONTROL.intersection(range(first, last + 1)) if first is not None and last is not None else frozenset()
