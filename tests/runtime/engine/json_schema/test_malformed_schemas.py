"""JSON schemas whose keywords have values of the wrong type: refused with the keyword's name, wherever they stand."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from quire.runtime.common.errors import InvalidRequest
from quire.runtime.common.types import StructuredOutputs
from quire.runtime.engine.json_schema.schema import enforceable_schema
from quire.runtime.engine.json_schema.tools import closed, relaxed
from quire.runtime.engine.structured.grammars import check_structure

KEYWORDS = (
    "$ref", "additionalProperties", "allOf", "anyOf", "const", "dependencies", "dependentRequired", "dependentSchemas",
    "discriminator", "else", "enum", "exclusiveMinimum", "format", "if", "items", "maxItems", "maximum", "minItems",
    "minLength", "minimum", "multipleOf", "not", "oneOf", "pattern", "patternProperties", "prefixItems", "properties",
    "required", "then", "type", "uniqueItems",
)  # fmt: skip
VALUES: tuple[Any, ...] = (True, False, None, 3, -1, 1.5, "x", [], [1], ["a"], [None], [[]], {}, {"a": 1}, {"a": None})
OBJECT = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}
LIST = {"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True}


def around(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the schema, and others with the schema below each keyword that is written in other words."""
    yield schema
    yield {"oneOf": [schema, {**OBJECT, "properties": {"a": {"const": 2}}}]}
    yield {"not": schema}
    yield {"if": schema, "then": {"required": ["b"]}}
    yield {"type": "object", "properties": {"a": schema}, "dependencies": {"a": schema}}


@pytest.mark.parametrize(
    ("message", "schema"),
    [
        ("Expected array for 'required', got true", {**OBJECT, "required": True, "dependencies": {"a": ["b"]}}),
        ("valid under its alternatives 0 and 1", {"oneOf": [{"required": 1.5}, OBJECT]}),
        ('cannot be enforced: "uniqueItems"', {**LIST, "maxItems": "2"}),
        ('cannot be enforced: "uniqueItems"', {**LIST, "minItems": None}),
        ('cannot be enforced: "not"', {"not": {"type": [["object"]]}}),
        ('cannot be enforced: "not"', {"not": {"required": [[]]}}),
    ],
    ids=str,
)
def test_a_malformed_keyword_is_refused_beside_one_that_is_written_in_other_words(
    message: str, schema: dict[str, Any]
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        check_structure(StructuredOutputs(json=schema))
    assert message in str(refused.value)


@pytest.mark.parametrize("keyword", KEYWORDS)
def test_no_value_of_a_keyword_is_an_internal_error(keyword: str) -> None:
    for base, value in itertools.product((OBJECT, LIST, {"type": "integer"}, {"type": "string"}), VALUES):
        for schema in around({**base, keyword: value}):
            closed(schema)
            relaxed(schema)
            with suppress(InvalidRequest):
                enforceable_schema(schema)
