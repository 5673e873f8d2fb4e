"""One request's tool calls and reasoning: the grammar that its output must match, and the parser that reads it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from itertools import product
from typing import Any

import structlog

from ...common.errors import InvalidRequest
from ...common.types import StructuredOutputs, ToolChoice
from ..facade import NewParser
from ..json_schema.schema import enforceable_schema
from ..json_schema.tools import closed, relaxed
from ..markup.argument_streams import SPACE, parameters_schema
from ..markup.markup import KNOWN_MARKUPS, MARK
from ..markup.markup_grammar import MarkupGrammar
from ..markup.markup_parser import ChannelParser, MarkupParser
from ..text import Markup
from .grammars import check_structure, lark_rule

ANY_OBJECT: dict[str, Any] = {"type": "object"}

_SchemaOf = Callable[[Mapping[str, Any], bool], dict[str, Any]]  # True: bounded integers

_log = structlog.get_logger("quire.engine")


class ToolCalls:
    """The forms of an output: text with `markup`, with calls of `tools` according to `choice`.

    Raises InvalidRequest for unknown tools, and for tools that the model cannot call.
    """

    def __init__(
        self,
        markup: Markup,
        tools: tuple[dict[str, Any], ...],
        choice: ToolChoice,
        check: Callable[[StructuredOutputs], None] = check_structure,
        *,
        open_arguments: bool = False,
    ) -> None:
        """Check grammars with `check`, which raises as `check_structure` does.

        With `open_arguments`, objects may have properties that their schemas do not declare.
        """
        self._choice = choice
        self._check_anew = check
        self._refusals: dict[StructuredOutputs, InvalidRequest | None] = {}  # None: a valid grammar
        functions = {tool["function"]["name"]: tool["function"] for tool in tools}
        names = functions if choice.names is None else choice.names
        if unknown := [name for name in names if name not in functions]:
            raise InvalidRequest(
                f"tool_choice: there is no tool {unknown[0]!r}; tools has {', '.join(functions) or 'no functions'}"
            )
        if choice.needed == "required" and not names:
            raise InvalidRequest("tool_choice: a call is required, but tools has no functions")
        if tools and not (markup.calls or markup.channels):
            raise InvalidRequest(
                "tools: this server offers no tools to its model: --tool-call-parser is none; leave it out, or name "
                f"one of {', '.join(KNOWN_MARKUPS)}"
            )
        self._has_tools = bool(tools)
        self._functions = {
            name: function if open_arguments else _with_closed_objects(function)
            for name, function in functions.items()
            if name in names and choice.needed != "none"
        }
        self._grammar_markup = markup
        self.markup = markup if self._functions else markup.without_calls()  # markup in the parser's text

    def structure(self, prompt: str, answer: StructuredOutputs | None) -> StructuredOutputs | None:
        """Return the rule that the output must match: calls, or else `answer`, after any reasoning. None: any text.

        `prompt` is the rendered chat. The call takes milliseconds: use a thread. Raises InvalidRequest.
        """
        if not self._has_tools and (answer is None or not (self.markup.reasoning or self.markup.channels)):
            return answer
        if answer is not None:
            self._check(answer)
        # A bounded integer takes thousands of a grammar's expressions, too many for many tools. A schema that is not
        # strict, and that no grammar can enforce, is left to the model.
        ways: tuple[_SchemaOf, ...] = (_schema, partial(self._possible_schema, prompt))
        for schema_of, bounds_integers in product(ways, (True, False)):
            if not (bounds_integers or self._has_bounded_integers()):
                continue  # the grammar would be the one that was refused
            try:
                schemas = {name: schema_of(each, bounds_integers) for name, each in self._functions.items()}
                structure = self._grammar(schemas, prompt, answer)
                self._check(structure)
            except InvalidRequest as error:
                refusal = error
            else:
                return structure
        raise refusal

    def _has_bounded_integers(self) -> bool:
        """Return whether a grammar may bound any integer of the arguments."""
        try:
            return any(_schema(each) != _schema(each, bounds_integers=False) for each in self._functions.values())
        except InvalidRequest:
            return True

    def _check(self, structure: StructuredOutputs) -> None:
        """Raise InvalidRequest for an unusable grammar.

        Results are kept: without integers, two schemas give the same one.
        """
        if structure not in self._refusals:
            try:
                self._check_anew(structure)
                self._refusals[structure] = None
            except InvalidRequest as error:
                self._refusals[structure] = error
        if (refusal := self._refusals[structure]) is not None:
            raise refusal

    def new_parser(self, prompt: str, answer: StructuredOutputs | None) -> NewParser | None:
        """Return the factory of parsers for outputs; None if every output is only an answer."""
        schemas = {name: self._types(function) for name, function in self._functions.items()}
        if self.markup.channels:
            return partial(ChannelParser, self.markup, schemas)
        if self.markup.calls is None and self.markup.reasoning is None:
            return None
        return partial(
            MarkupParser,
            self.markup,
            schemas,
            in_reasoning=self._in_reasoning(prompt),
            takes_bare_calls=answer is None,
        )

    def _grammar(self, schemas: Mapping[str, Any], prompt: str, answer: StructuredOutputs | None) -> StructuredOutputs:
        content = None if answer is None else lark_rule(answer)
        needed = self._choice.needed if schemas else "none"
        grammar = MarkupGrammar(self._grammar_markup, content).write(
            schemas, needed, parallel=self._choice.parallel, in_reasoning=self._in_reasoning(prompt)
        )
        return StructuredOutputs(lark=grammar)

    def _possible_schema(self, prompt: str, function: Mapping[str, Any], bounds_integers: bool) -> dict[str, Any]:
        """Return the schema of a tool's arguments, or the part of it that a grammar can enforce.

        Raises InvalidRequest for a strict tool.
        """
        try:
            return self._checked_schema(function, prompt, bounds_integers)
        except InvalidRequest as error:
            reason = str(error).removeprefix("structured_outputs: ")
            if function.get("strict"):
                raise InvalidRequest(f"tools: the parameters of {function['name']!r}: {reason}") from None
        try:
            part = {**function, "parameters": relaxed(function.get("parameters", {}))}
            schema = self._checked_schema(part, prompt, bounds_integers)
            _log.info("a tool's arguments match its schema in part", tool=function["name"], reason=reason)
        except (InvalidRequest, RecursionError):
            _log.info("a tool's arguments are any object", tool=function["name"], reason=reason)
            return ANY_OBJECT
        return schema

    def _checked_schema(self, function: Mapping[str, Any], prompt: str, bounds_integers: bool) -> dict[str, Any]:
        schema = _schema(function, bounds_integers)
        self._check(StructuredOutputs(json=schema))
        self._check(self._grammar({function["name"]: schema}, prompt, None))
        return schema

    def _types(self, function: Mapping[str, Any]) -> dict[str, Any]:
        """Return a schema with the types of the arguments, even if it cannot be enforced."""
        calls = self._grammar_markup.calls
        try:
            schema = _schema(function)
            if calls is None or calls.arguments != "parameters":
                return schema
            return parameters_schema(schema, never=calls.key_close[0])
        except InvalidRequest:
            return {**ANY_OBJECT, **function["parameters"]}

    def _in_reasoning(self, prompt: str) -> bool:
        """Return whether the template has written the beginning of the reasoning."""
        reasoning = self.markup.reasoning
        return reasoning is not None and prompt.rstrip(SPACE).endswith(reasoning.open.removeprefix(MARK))


def _with_closed_objects(function: Mapping[str, Any]) -> Mapping[str, Any]:
    try:
        return {**function, "parameters": closed(function.get("parameters", {}))}
    except RecursionError:  # `_schema` refuses it
        return function


def _schema(function: Mapping[str, Any], bounds_integers: bool = True) -> dict[str, Any]:
    """Return the schema of a tool's arguments. Raises InvalidRequest, as `enforceable_schema` does."""
    try:
        schema: dict[str, Any] = enforceable_schema(function.get("parameters", {}), bounds_integers=bounds_integers)
    except RecursionError:
        raise InvalidRequest("a JSON schema is nested too deeply") from None
    if "$ref" in schema and "allOf" not in schema:  # some drafts ignore a type next to a reference
        schema["allOf"] = [{"$ref": schema.pop("$ref")}]
    return {**ANY_OBJECT, **schema}
