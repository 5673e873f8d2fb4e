"""Tool calls in a model's syntax, for prompts: calls of earlier answers, and an example in an instruction."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from .literal_arguments import gemma_arguments, python_arguments
from .markup import ID, MARK, CallSyntax

FUNCTION_TAG = CallSyntax("<function=", ">", "</function>")  # syntax for a model with an unknown one
EXAMPLE = "TOOL", "ARGUMENT", "VALUE"

NAME = "\x00"  # place of the name in a call
ARGUMENTS = "\x01"  # place of the arguments in a call

# The optional white space of a syntax in its usual form: after JSON punctuation, and as line breaks between tags and
# between calls without punctuation.
_AFTER_SIGNS = re.compile(" ([:,;]) ?")
_LINES = re.compile(
    f"(?<=[^|\uff5c]>) (?=[<{{{ARGUMENTS}])|(?<=[}}{ARGUMENTS}]) (?=<[^|\uff5c]|`)|(?<=json) |(?<=\\)) (?={NAME})"
)
_NONE = re.compile("(?<![:,;]) ")


def calls_text(syntax: CallSyntax, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """Return calls, names with arguments, in the model's syntax."""
    values = [(name, _arguments(syntax, arguments)) for name, arguments in calls]
    literals = [
        f"{syntax.open}{NAME}{syntax.middle}{ARGUMENTS * bool(text)}{syntax.close}".replace(ID, f"{number}")
        for number, (_, text) in enumerate(values)
    ]
    begin = "" if syntax.bare and len(calls) == 1 else syntax.begin
    literal = f"{begin}{syntax.separator.join(literals)}{syntax.end}".replace(MARK, "")
    literal = _AFTER_SIGNS.sub(r"\1 ", re.sub(" +", " ", literal))
    written = _NONE.sub("", _LINES.sub("\n", literal)).strip()
    texts = iter([text for name, arguments in values for text in (name, *([arguments] if arguments else []))])
    return re.sub(f"[{NAME}{ARGUMENTS}]", lambda _: next(texts), written)


def call_example(syntax: CallSyntax) -> str:
    """Return an example of a call, with words in capitals for its name, an argument and the value."""
    tool, argument, value = EXAMPLE
    return calls_text(syntax, [(tool, {argument: value})]).replace(f'"{value}"', value)


def _arguments(syntax: CallSyntax, arguments: Mapping[str, Any]) -> str:
    if syntax.arguments == "json":
        return json.dumps(arguments, ensure_ascii=False)
    if syntax.arguments == "python":
        return python_arguments(arguments)
    if syntax.arguments == "gemma":
        return gemma_arguments(arguments, syntax.quote.replace(MARK, ""))
    if syntax.arguments == "assignments":
        return ", ".join(f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in arguments.items())
    texts = {
        key: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        for key, value in arguments.items()
    }
    literals = (syntax.key_open, syntax.key_close, syntax.value_close)
    key_open, key_close, value_close = (each.replace(MARK, "").replace(" ", "\n") for each in literals)
    line = "\n" if syntax.on_lines else ""
    written = (f"{key_open}{key}{key_close}{line}{text}{line}{value_close}" for key, text in texts.items())
    return "\n".join(written)
