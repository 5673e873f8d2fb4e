"""Grammars of markup: they restrict an output from its first token on, so that every tool call in it is valid.

The grammar of a markup allows only text that its parser reads as intended. It is llguidance's variant of Lark's
notation.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from ...common.errors import InvalidRequest
from ..json_schema.references import BY_REFERENCE, schemas_inside, with_references
from ..json_schema.schema import library_options
from .argument_streams import parameters_schema, text_values, value_form
from .literal_arguments import NOTATIONS, Notation, gemma_literal
from .literal_values import LiteralForms, LiteralValues, python_forms
from .markup import ID, MARK, CallSyntax, Markup

CallsNeeded = Literal["none", "auto", "required"]

GRAMMAR_HEADER = """%llguidance {}
ANY: /[^\\uFDD0]*/
SPACES: /[ \\t\\r\\n]*/
ws: /[ \\t\\r\\n]{1,8}/
"""
_DEFINITION = re.compile(r"#/(\$defs|definitions)/")


class MarkupGrammar:
    """Writer of one grammar.

    `content` is the rule of an answer without calls; None: any text.
    """

    def __init__(self, markup: Markup, content: str | None = None) -> None:
        self._markup = markup
        self._special = {MARK + name: token for name, token in markup.tokens.items()}
        self._lines: list[str] = []
        self._content = None if content is None else self._rule(content)
        self._split = re.compile("(" + "|".join(map(re.escape, sorted(self._special, key=len, reverse=True))) + ")")

    def write(
        self, tools: Mapping[str, Any], needed: CallsNeeded, *, parallel: bool = True, in_reasoning: bool = False
    ) -> str:
        """Return the grammar of an output that may or must call `tools`, schemas of arguments by name."""
        if self._markup.channels:
            start = self._channels(tools, needed)
        else:
            start = self._outputs(tools, needed, parallel, in_reasoning)
        return GRAMMAR_HEADER + "\n".join([f"start: {start}", *self._lines, ""])

    # Literals around reasoning and calls

    def _outputs(self, tools: Mapping[str, Any], needed: CallsNeeded, parallel: bool, in_reasoning: bool) -> str:
        reasoning = self._markup.reasoning
        calls = self._markup.calls
        tail = self._tail(calls, tools, parallel) if calls is not None and needed != "none" else ""
        after = self._answer(calls, needed, tail, "")
        if reasoning is None:
            return after
        thoughts = f"{self._until(reasoning.close, 'ANY')} ws? ({after})"
        if in_reasoning:
            return thoughts
        return f"{self._literal(reasoning.open)} {thoughts} | {self._answer(calls, needed, tail, reasoning.open)}"

    def _answer(self, calls: CallSyntax | None, needed: CallsNeeded, tail: str, never_first: str) -> str:
        """Return the rule of an answer. A text in it does not begin with `never_first`."""
        if calls is None:
            return self._content or self._terminal([], [never_first])
        first = [never_first, calls.open.strip(" ")[0] if calls.bare else ""]
        text = self._content or self._terminal([calls.trigger] if needed == "none" else [], first)
        if needed == "none":
            return text
        announced = self._literal(calls.trigger)
        if needed == "required":
            return f"ws? {announced}{'?' if calls.bare else ''} {tail}"
        if self._content:
            return f"{text} | ws? {announced} {tail}"
        bare = f" | ws? {tail}" if calls.bare else ""
        return f"{text} | {self._until(calls.trigger, self._terminal([], first))} {tail}{bare}"

    def _tail(self, calls: CallSyntax, tools: Mapping[str, Any], parallel: bool) -> str:
        """Return the rule of the calls after their trigger."""
        rest = (calls.begin or calls.open)[len(calls.trigger) :]
        opening = calls.open if calls.begin else rest
        each = [self._call(calls, opening, name, schema) for name, schema in tools.items()]
        call = self._rule(" | ".join(each))
        separator = self._literal(calls.separator + ("" if calls.begin else calls.trigger))
        more = f" ({separator} {call})*" if parallel else ""
        return self._rule(f"{self._literal(rest) if calls.begin else ''} {call}{more} {self._literal(calls.end)}")

    def _call(self, calls: CallSyntax, opening: str, name: str, schema: Any) -> str:
        match calls.arguments:
            case "json":
                arguments = self._json(schema)
            case "parameters":
                arguments = self._parameters(calls, schema)
            case "python" | "assignments" | "gemma":
                arguments = self._literals(calls, NOTATIONS[calls.arguments], schema)
        head = self._literal(opening + name + calls.middle)
        if calls.id_open:
            call_id = f"({self._literal(calls.id_open)} /[A-Za-z0-9]{{9}}/)?"
            head = f"{self._literal(opening + name)} {call_id} {self._literal(calls.middle)}"
        return self._rule(f"{head} {arguments} {self._literal(calls.close)}")

    def _parameters(self, calls: CallSyntax, schema: Any) -> str:
        """Return the rule of parameters, in the schema's order."""
        key_end, _, value_open = calls.key_close.partition(" ")
        flat = parameters_schema(schema, never=key_end[0])
        after = f"ws? {self._literal(value_open)} " if value_open else ""
        rules = []
        for key, given in flat["properties"].items():
            if given is not False:
                head = self._exactly(f"{calls.key_open}{key}{key_end}")
                rule = self._rule(f"ws? {head} {after}{self._parameter(calls, schema, given)}")
                rules.append(rule if key in flat["required"] else f"{rule}?")
        if (others := flat["additionalProperties"]) is not False:
            head = self._other_name(calls.key_open, key_end, flat["properties"])
            rules.append(self._rule(f"ws? {head} {after}{self._parameter(calls, schema, others)}") + "*")
        return " ".join(rules)

    def _other_name(self, opening: str, closing: str, known: Iterable[str]) -> str:
        """Return the rule of the head of a parameter with another name.

        It is one terminal, because a known head may begin as it does, unless it begins with a special token.
        """
        name = f"HEAD_{len(self._lines)}"
        inner = f"[^{re.escape(closing[0])}\\uFDD0]+"
        if {opening, closing} & self._special.keys():
            self._define(name, f"/{inner}/", known)
            return f"{self._exactly(opening)} {name} {self._exactly(closing)}"
        literals = [re.escape(each).replace("/", "\\/") for each in (opening, closing)]
        self._define(name, f"/{literals[0]}{inner}{literals[1]}/", [f"{opening}{key}{closing}" for key in known])
        return name

    def _define(self, name: str, pattern: str, never: Iterable[str]) -> None:
        """Define a terminal that matches no text in `never`."""
        others = " | ".join(map(_quoted, never))
        self._lines.append(f"{name}: {pattern}" + (f" & ~({others})" if others else ""))

    def _parameter(self, calls: CallSyntax, schema: Mapping[str, Any], given: Any) -> str:
        """Return the rule of one value, up to the end of its parameter."""
        form = value_form(given)
        values = text_values(given)
        line_break = "\n" if calls.on_lines else ""
        line = f"{_quoted(line_break)} " if line_break else ""
        end = f"{line}{self._exactly(calls.value_close)}"
        if form == "text" and values:
            return f"{line}({' | '.join(map(_quoted, values))}) {end}"
        if form == "json":
            return f"{line}{self._json(_with_definitions(schema, given))} {end}"
        if form == "mixed":  # a tool without an enforceable schema: the parser may read the value as JSON
            text = self._terminal([calls.value_close], [])
            return f"{line}{self._until(line_break + calls.value_close, text)}"
        return f"{line}{self._until(calls.value_close, 'ANY')}"

    def _literals(self, calls: CallSyntax, notation: Notation, schema: Any) -> str:
        """Return the rule of arguments as literals, in the schema's order."""
        flat = parameters_schema(schema, never=notation.never_in_keys)
        if "" in flat["properties"]:
            raise InvalidRequest("a property without a name cannot be an argument of this model")
        forms = self._gemma_forms(calls.quote) if calls.quote else python_forms(self._json({"type": "string"}))

        def json_rule_of(given: Any) -> str:
            return self._json(_with_definitions(schema, given))

        values = LiteralValues(notation, forms, self._lines, self._rule, json_rule_of)
        value = json_rule_of if calls.arguments == "assignments" else values.rule
        arguments = [
            (f"{_quoted(f'{key}{notation.sign}')} {value(given)}", key in flat["required"])
            for key, given in flat["properties"].items()
            if given is not False
        ]
        more = ""
        if (others := flat["additionalProperties"]) is not False:
            name = f"KEY_{len(self._lines)}"
            known = [f"{key}{notation.sign}" for key in flat["properties"]]
            self._define(name, f"/[A-Za-z_][A-Za-z0-9_]*{notation.sign}/", known)
            more = self._rule(f"{name} {value(others)}")
        return values.sequence(arguments, more)

    def _gemma_forms(self, quote: str) -> LiteralForms:
        """Return the forms of Gemma's literals."""
        notation = NOTATIONS["gemma"]

        def key(name: str) -> str:
            return _quoted(f"{name}:") if notation.key.fullmatch(name) else ""

        return LiteralForms(
            text=f"{self._exactly(quote)} {self._until(quote, 'ANY')}",
            literal=lambda value: self._exactly(gemma_literal(value, quote)),
            key=key,
            any_key="/[A-Za-z_][A-Za-z0-9_.-]*:/",
        )

    # Messages of channels

    def _channels(self, tools: Mapping[str, Any], needed: CallsNeeded) -> str:
        channel, message, start = map(self._marker, ("channel", "message", "start"))
        before = " | ".join(
            f'{channel} "{name}" {message} {self._until(self._markup.marked("<|end|>"), "ANY")} {start} "assistant"'
            for name in ("analysis", *(["commentary"] if tools else []))
        )
        last = []
        if needed != "required":
            last.append(f'{channel} "final" {message} {self._content or "ANY"}')
        if needed != "none":
            last += [self._channel_call(name, schema) for name, schema in tools.items()]
        return f"({before})* ({' | '.join(last)})"

    def _channel_call(self, name: str, schema: Any) -> str:
        channel, message, constrain = map(self._marker, ("channel", "message", "constrain"))
        to = f"to=functions.{name}"
        header = f"({channel} {_quoted(f'commentary {to}')} | {_quoted(f' {to}')} {channel} {_quoted('commentary')})"
        return self._rule(f'{header} (" "? {constrain} "json" | " json")? {message} {self._json(schema)}')

    def _marker(self, name: str) -> str:
        return self._literal(self._markup.marked(f"<|{name}|>"))

    # Parts

    def _literal(self, literal: str) -> str:
        """Return a literal as tokens and texts, with optional white space where it has a space."""
        return " ws? ".join(map(self._exactly, literal.split(" ")))

    def _exactly(self, text: str) -> str:
        """Return a text as tokens and texts, with a terminal in the place of a call's number."""
        pieces = self._split.split(text) if self._special else [text]
        parts = [part for piece in pieces for part in re.split(f"({ID})", piece) if part]
        return " ".join("/[0-9]{1,3}/" if part == ID else self._token(part) for part in parts)

    def _token(self, text: str) -> str:
        return f"<[{self._special[text]}]>" if text in self._special else _quoted(text)

    def _until(self, literal: str, terminal: str) -> str:
        """Return the rule of a text of `terminal` up to and including `literal`."""
        if literal in self._special:
            return f"{terminal} {self._literal(literal)}"
        name = f"until_{len(self._lines)}"
        self._lines.append(f"{name}[lazy]: {terminal} {_quoted(literal)}")
        return name

    def _terminal(self, never: list[str], never_first: list[str], terminal: str = "ANY") -> str:
        """Return the terminal of a text without the literals `never`, and without the others at its beginning."""
        parts = [f"~(ANY {_quoted(each)} ANY)" for each in never if each not in self._special]
        parts += [f"~(SPACES {_quoted(each)} ANY)" for each in never_first if each and each not in self._special]
        if not parts:
            return terminal
        name = f"TEXT_{len(self._lines)}"
        self._lines.append(f"{name}: {' & '.join([terminal, *parts])}")
        return name

    def _json(self, schema: Any) -> str:
        return self._rule(json_rule(schema))

    def _rule(self, body: str) -> str:
        name = f"rule_{len(self._lines)}"
        self._lines.append(f"{name}: {body}")
        return name


def json_rule(schema: Any) -> str:
    """Return the rule of a schema's JSON. Its options of the library are left out: they would switch off limits."""
    if isinstance(schema, bool):
        schema = {} if schema else {"enum": []}
    kept = {key: value for key, value in schema.items() if key != "x-guidance"}
    return f"%json {json.dumps(kept | {'x-guidance': library_options(kept)})}"


def _with_definitions(root: Mapping[str, Any], schema: Any) -> Any:
    """Return a schema within `root` together with the schemas that its references refer to."""
    if not isinstance(schema, dict):
        return schema
    dialect = {"$schema": root["$schema"]} if "$schema" in root else {}
    roots = {name: root[name] for name in BY_REFERENCE if name in root}
    found = [each["$ref"] for each in schemas_inside([roots, schema]) if "$ref" in each]
    if not schema.keys() & BY_REFERENCE and all(map(_DEFINITION.match, map(str, found))):
        return dialect | roots | schema

    def moved(reference: str) -> str:
        own, _, place = reference.partition("#")
        return f"#/$defs/root{place}" if own in ("", root.get("$id")) and place[:1] in ("", "/") else reference

    whole = {key: value for key, value in root.items() if key not in ("$id", "$schema")}
    return dialect | with_references(schema, moved) | {"$defs": {"root": with_references(whole, moved)}}


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
