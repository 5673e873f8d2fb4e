"""The sandbox of chat templates with the functions, filters and tags that transformers offers to them."""

from __future__ import annotations

import datetime
import json
import re
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser

from .content_marks import PRIVATE
from .sandbox import Sandbox

MAX_INDENT = 16  # indent of JSON
MAX_DATE_CHARACTERS = 256

_NOT_ASCII = re.compile(r"[^\x00-\x7e]")


class GenerationTag(Extension):
    """The tag `generation`, which marks the answers for training: the block is rendered without the tag.

    As in transformers, a variable that is set within the block does not exist after it.
    """

    tags = {"generation"}  # noqa: RUF012  # the type that jinja2 declares

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def template_sandbox() -> Sandbox:
    """Return a sandbox with the functions that transformers offers to templates."""

    def to_json(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: Any = None,
        sort_keys: bool = False,
    ) -> str:
        form: dict[str, Any] = {"ensure_ascii": False, "sort_keys": bool(sort_keys)}
        form["separators"] = None if separators is None else tuple(map(str, separators))
        if indent is None:
            text = json.dumps(value, **form)
        elif not isinstance(indent, int) or not 0 <= indent <= MAX_INDENT:
            raise TemplateError(f"tojson takes an indent of 0 to {MAX_INDENT}")
        else:
            text = sandbox.concat(json.JSONEncoder(indent=indent, **form).iterencode(value))
        return _NOT_ASCII.sub(_escaped, text) if ensure_ascii else text

    sandbox = Sandbox(filters={"tojson": to_json}, extensions=[GenerationTag])
    sandbox.globals["raise_exception"] = _raise_exception
    sandbox.globals["strftime_now"] = _strftime_now
    return sandbox


def _escaped(found: re.Match[str]) -> str:
    """Return a character as JSON escapes it. A private character stays, because it stands for another one."""
    return found.group() if PRIVATE.match(found.group()) else json.dumps(found.group())[1:-1]


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    if len(pattern) > MAX_DATE_CHARACTERS:
        raise TemplateError(f"strftime_now takes a pattern of at most {MAX_DATE_CHARACTERS} characters")
    return datetime.datetime.now().strftime(pattern)
