"""Regular expressions for all texts except some, and patterns without look-aheads."""

from __future__ import annotations

import re
from collections.abc import Iterable

from .patterns import may_have_newline

_PART = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|.", re.DOTALL)
_ANYWHERE = re.compile(r"\.\*(\[(?:\\.|[^\]\\^])(?:\\.|[^\]\\])*\]|\\[sdw]|[^\\\[\](){}|.*+?^$])")
_ONE_CLASS = re.compile(r"\^?(\\[sdw]|\[(?!\^)(?:\\.|[^\\\]])+\])([*+])\$")
_ALTERNATIVES = re.compile(r"\((?:\?:)?([^()]*)\)\$?|([^()]*)", re.DOTALL)
_LITERAL = re.compile(r"(?:[^\\\[\](){}|.*+?^$]|\\[^a-zA-Z0-9])+\$?")
_ENDED = re.compile(r"((?:[^\\]|\\.)*)\$", re.DOTALL)
_QUANTIFIERS = ("*", "+", "?", "{")
MAX_EXCLUDED_TEXTS = 64  # texts that a complement leaves out
MAX_EXCLUDED_CHARACTERS = 2_000  # characters of these texts


def other_texts(texts: Iterable[str], *, beginning: bool = False) -> str | None:
    """Return a pattern for all other texts, or for texts that begin with none of these; None if it is too long."""
    distinct = sorted(set(texts))
    if len(distinct) > MAX_EXCLUDED_TEXTS or sum(map(len, distinct)) > MAX_EXCLUDED_CHARACTERS:
        return None
    return f"^(?:{_others(distinct, beginning)})$" if distinct else r"^[\s\S]*$"


def without_look_aheads(pattern: str) -> list[str]:
    """Return patterns that together equal this one, which begins with look-aheads; none if they are unknown."""
    rest = pattern.removeprefix("^")
    found: list[str] = []
    while rest != pattern and (opening := rest[:3]) in ("(?=", "(?!"):
        end = end_of_group(rest)
        inner = rest[3 : end - 1]
        rest = rest[end:]
        if end == 0 or rest[:1] in _QUANTIFIERS:
            return []
        other: str | None = f"^(?:{inner})" if opening == "(?=" else _complement(inner)
        if other is None:
            return []
        found.append(other)
    return [f"^{rest}", *found] if found and not _has_alternatives(rest) else []


def _has_alternatives(pattern: str) -> bool:
    """Return whether a pattern has alternatives outside of groups."""
    depth = 0
    for part in _PART.finditer(pattern):
        depth += {"(": 1, ")": -1}.get(part[0], 0)
        if part[0] == "|" and depth == 0:
            return True
    return False


def _complement(inner: str) -> str | None:
    """Return a pattern of the texts that do not begin with an expression."""
    if part := _ONE_CLASS.fullmatch(inner):
        other = f"[^{part[1][1:-1] if part[1][0] == '[' else part[1]}]"
        return other if part[2] == "*" else f"^$|{other}"
    if part := _ANYWHERE.fullmatch(inner):
        excluded = part[1][1:-1] if part[1][0] == "[" else part[1]
        end = "$" if may_have_newline(excluded) else r"(?:$|\n)"
        escape = "\\" if excluded[0] == "-" else ""  # After another character, a hyphen would make a range.
        return rf"^[^\n{escape}{excluded}]*{end}"
    alternatives = _ALTERNATIVES.fullmatch(inner)
    texts = [each.removeprefix("^") for each in (alternatives[1] or alternatives[2]).split("|")] if alternatives else []
    is_whole = _without_end(inner) != inner
    if not alternatives or not all(map(_LITERAL.fullmatch, texts)):
        return None
    literals = [re.sub(r"\\(.)", r"\1", _without_end(text)) for text in texts]
    if is_whole and not alternatives[1] and len(texts) > 1:  # only the last text ends there
        return None
    return other_texts(literals, beginning=not is_whole)


def end_of_group(pattern: str) -> int:
    """Return the index after the group with which a pattern begins; 0 if the group has no end."""
    depth = 0
    for part in _PART.finditer(pattern):
        depth += {"(": 1, ")": -1}.get(part[0], 0)
        if depth == 0:
            return part.end()
    return 0


def _without_end(expression: str) -> str:
    """Return an expression without the `$` at its end, unless a backslash makes that a character."""
    found = _ENDED.fullmatch(expression)
    return found[1] if found else expression


def _others(texts: list[str], beginning: bool) -> str:
    """Return an expression for all other texts, or texts that begin with none of these; a common prefix is left out."""
    if beginning and "" in texts:
        return r"[^\s\S]"
    firsts = sorted({text[0] for text in texts if text})
    rest = r"[\s\S]*"
    anything_else = f"[^{''.join(map(_in_class, firsts))}]{rest}" if firsts else rf"[\s\S]{rest}"
    options = [] if "" in texts else [""]
    options.append(anything_else)
    for first in firsts:
        options.append(_escaped(first) + _group(_others([text[1:] for text in texts if text[:1] == first], beginning)))
    return "|".join(options)


def _group(expression: str) -> str:
    return f"(?:{expression})"


def _escaped(character: str) -> str:
    return (
        re.escape(character)
        if character.isascii() and character.isprintable() and not character.isalnum()
        else character
    )


def _in_class(character: str) -> str:
    return f"\\{character}" if character in "\\]^-[&~" else character
