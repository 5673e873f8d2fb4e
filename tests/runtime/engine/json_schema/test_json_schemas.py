"""JSON schemas: every valid instance can be generated, no invalid one can, and what cannot be enforced is refused.

`tests/data/json_schemas.json` has one schema per line: its name, the schema, valid instances and invalid ones.
"""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher
from quire.runtime.common.errors import InvalidRequest
from quire.runtime.common.types import StructuredOutputs
from quire.runtime.engine.json_schema import numbers as json_numbers
from quire.runtime.engine.json_schema import rewriting as json_rewriting
from quire.runtime.engine.json_schema.patterns import as_read, rotated
from quire.runtime.engine.structured.grammar_vocabulary import load_tables
from quire.runtime.engine.structured.grammars import check_structure, grammar_of
from quire.runtime.engine.text_processor import TextProcessor
from quire.runtime.model import BUNDLED_MODEL

SCHEMAS: list[list[Any]] = json.loads((Path(__file__).parents[3] / "data" / "json_schemas.json").read_text())
TEXT = TextProcessor.load(BUNDLED_MODEL)
REFUSED: dict[str, Any] = {
    "minProperties: 2 cannot be enforced": {"type": "object", "minProperties": 2, "required": []},
    "minProperties: 3 cannot be enforced": {
        "type": "object",
        "properties": {"a": {}, "b": {}, "c": {}},
        "required": ["a"],
        "minProperties": 3,
    },
    'keywords of a JSON schema cannot be enforced: "not"': {"type": "string", "not": {"pattern": "a"}},
    'keywords of a JSON schema cannot be enforced: "if", "then"': {
        "type": "integer",
        "if": {"minimum": 3},
        "then": {"multipleOf": 2},
    },
    'keywords of a JSON schema cannot be enforced: "uniqueItems"': {"type": "array", "uniqueItems": True},
    'keywords of a JSON schema cannot be enforced: "contains"': {"type": "array", "contains": {"type": "integer"}},
    'keywords of a JSON schema cannot be enforced: "propertyNames"': {
        "type": "object",
        "propertyNames": {"pattern": "^a"},
        "properties": {"b": {}},
    },
    'keywords of a JSON schema cannot be enforced: "unevaluatedProperties"': {
        "type": "object",
        "unevaluatedProperties": False,
    },
    'keywords of a JSON schema cannot be enforced: "$dynamicRef"': {"$dynamicRef": "#x"},
    "patternProperties of a JSON schema may have 128 patterns at most": {
        "patternProperties": {f"^a{index}b": {} for index in range(129)}
    },
    "valid under its alternatives 0 and 1, which": {"oneOf": [{"type": "integer"}, {"minimum": 3}]},
    "valid under its alternatives 1 and 2, which": {
        "oneOf": [{"type": "null"}, {"type": "string", "pattern": "a"}, {"type": "string"}]
    },
    "Resource 'https://example.org/x' is not present": {"$ref": "https://example.org/x"},
    "Pointer '/$defs/x' does not exist": {"$ref": "#/$defs/x"},
    "Expected string for 'format'": {"type": "string", "format": ["date"]},
    "look-around": {"type": "string", "pattern": "^a(?=b)"},
    "backreferences are not supported": {"type": "string", "pattern": r"^(a)\1$"},
    "Invalid type: text": {"type": "text"},
    "minimum (5) is greater than maximum (3)": {"type": "integer", "minimum": 5, "maximum": 3},
    "minimum: 9007199254740993 cannot be enforced": {"type": "integer", "minimum": 2**53 + 1},
    "maximum: 1e+20 cannot be enforced": {"type": "integer", "maximum": 1e20},
    "9007199254740993 in const": {"const": [{"a": 2**53 + 1}]},
    "-1e+300 in const": {"type": "integer", "const": -1e300},
    "-9007199254740993 in enum": {"enum": [1, -(2**53) - 1]},
    "between 0, which is excluded, and 0.5": {"type": "number", "allOf": [{"exclusiveMinimum": 0}, {"maximum": 0.5}]},
    "between -3, which is excluded, and -3.5": {"type": "number", "exclusiveMaximum": -3, "exclusiveMinimum": -3.5},
    "maximum: 9223372036854775807 cannot be enforced": {"type": ["number", "null"], "maximum": 2**63 - 1},
    "multiples of 1000003 cannot be enforced": {"type": "integer", "multipleOf": 1000003},
    "multiples of 1000000007 cannot": {"type": "integer", "multipleOf": 10**9 + 7},
    "multiples of 7919 and bounds": {"type": "integer", "multipleOf": 7919, "minimum": 10**12},
    "divisors beyond 2^53 are rounded": {"type": "integer", "multipleOf": 10**400},
    "multipleOf: 1e-20 cannot": {"type": "number", "multipleOf": 1e-20, "minimum": 5e-324},
    "multiples of 9.97 cannot be enforced": {"type": "number", "multipleOf": 9.97},
    "multiples of 1005973 cannot be enforced": {"allOf": [{"multipleOf": 997}, {"anyOf": [{"multipleOf": 1009}]}]},
    "multiples of 997 and bounds with 13 digits": {"multipleOf": 997, "anyOf": [{"minimum": 2e12}, {"minimum": 2e13}]},
    "multipleOf: 0.53 cannot be enforced: such a divisor is rounded": {"type": "number", "multipleOf": 0.53},
    "more than 200 combinations of limits": {
        "allOf": [{"anyOf": [{"minimum": n + 100 * m} for n in range(15)]} for m in range(2)]
    },
    "more than 50 limits of one number": {"allOf": [{"minimum": n} for n in range(60)]},
    "anyOf is empty": False,
    "required property 'a' is unsatisfiable": {"type": "object", "required": ["a"], "additionalProperties": False},
    "incompatible types": {"allOf": [{"type": "string"}, {"type": "integer"}]},
}


@cache
def tables() -> Any:
    """Return llguidance's tables of the bundled model's vocabulary."""
    return load_tables(BUNDLED_MODEL)


def can_be_generated(matcher: LLMatcher, instance: Any) -> bool:
    """Return whether the instance's usual text is a complete output."""
    assert TEXT.tokenizer is not None
    tokens = TEXT.tokenizer.encode(json.dumps(instance, ensure_ascii=False), add_special_tokens=False)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("schema", "valid", "invalid"), [case[1:] for case in SCHEMAS], ids=[case[0] for case in SCHEMAS]
)
def test_valid_instances_and_no_others_can_be_generated(schema: Any, valid: list[Any], invalid: list[Any]) -> None:
    structure = StructuredOutputs(json=schema)
    check_structure(structure)
    matcher = LLMatcher(tables(), grammar_of(structure), log_level=0)
    assert [each for each in valid if not can_be_generated(matcher.deep_copy(), each)] == []
    assert [each for each in invalid if can_be_generated(matcher.deep_copy(), each)] == []


@pytest.mark.parametrize(
    "schema",
    [
        '{"oneOf": [{"enum": [1e400]}, {"type": "integer"}]}',
        '{"oneOf": [{"required": ["a", 5]}, {"required": ["b", {}]}]}',
        '{"type": "object", "oneOf": [{"required": true}, {"properties": {"a": {"required": true}}}]}',
        '{"type": "object", "required": true, "dependencies": {"a": ["b"]}}',
        '{"type": "object", "required": 5, "not": {"required": [{}]}}',
        '{"not": {"type": [["string"]]}}',
        '{"type": "array", "uniqueItems": true, "items": {"enum": ["a"]}, "minItems": "2"}',
        '{"type": "string", "pattern": "^(?="}',
        '{"type": "string", "pattern": "^(?!a){0}a"}',
        '{"type": "string", "pattern": "^(?=a)?b"}',
    ],
)
def test_schemas_that_are_none_are_refused(schema: str) -> None:
    with pytest.raises(InvalidRequest, match="structured_outputs: "):
        check_structure(StructuredOutputs(json=schema))


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_be_enforced_is_refused_with_the_reason(message: str) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(message)):
        check_structure(StructuredOutputs(json=REFUSED[message]))
    with pytest.raises(InvalidRequest, match=rf"{re.escape(message)}|required item is unsatisfiable"):
        check_structure(StructuredOutputs(json={"type": "array", "items": REFUSED[message], "minItems": 1}))


@pytest.mark.parametrize(
    ("reference", "schema"),
    [
        ("#", {"$ref": "#"}),
        ("#", {"$ref": "#", "title": "x"}),
        ("https://a.example/b", {"$id": "https://a.example/b", "$ref": "https://a.example/b"}),
        ("#/$defs/a", {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}),
        ("#/$defs/a", {"$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}]}}, "items": {"$ref": "#/$defs/a"}}),
        (
            "#/properties/b",
            {"properties": {"a": {"$ref": "#/properties/b"}, "b": {"anyOf": [{"$ref": "#/properties/a"}]}}},
        ),
        (
            "#/$defs/a~1b%25",
            {
                "definitions": {},
                "$defs": {"a/b%": {"$ref": "#/$defs/a~1b%25"}},
                "anyOf": [{}, {"$ref": "#/$defs/a~1b%25"}],
            },
        ),
        ("#/$defs/a%20b", {"$defs": {"a b": {"$ref": "#/$defs/a%20b"}}, "$ref": "#/$defs/a%20b"}),
        ("#/$defs/a~01b", {"$defs": {"a~1b": {"$ref": "#/$defs/a~01b"}}, "$ref": "#/$defs/a~01b"}),
        ("#/allOf/0", {"allOf": [{"$ref": "#/allOf/0"}, {"type": "string"}]}),
    ],
    ids=str,
)
def test_references_that_lead_in_a_circle_are_refused(reference: str, schema: dict[str, Any]) -> None:
    message = f"the references of the JSON schema lead in a circle: {reference!r} refers to itself"
    with pytest.raises(InvalidRequest, match=re.escape(message)):
        check_structure(StructuredOutputs(json=schema))


@pytest.mark.parametrize(
    ("keyword", "schema"),
    [
        ("not", {"not": {"$ref": "#"}}),
        ("not", {"type": "string", "not": {"anyOf": [{"const": "a"}, {"$ref": "#"}]}}),
        ("not", {"not": {"not": {"$ref": "#"}}}),
        ("not", {"type": "object", "properties": {"a": {"not": {"$ref": "#/properties/a"}}}}),
        ("if", {"if": {"$ref": "#"}, "then": {"type": "string"}}),
        ("else", {"if": {"type": "string"}, "else": {"allOf": [{"$ref": "#"}]}}),
    ],
    ids=str,
)
def test_conditions_that_depend_on_themselves_are_refused(keyword: str, schema: dict[str, Any]) -> None:
    with pytest.raises(
        InvalidRequest, match=f"lead in a circle: '{keyword}' is about values that are valid or invalid"
    ):
        check_structure(StructuredOutputs(json=schema))


def test_conditions_about_values_inside_are_no_circle() -> None:
    schema = {"type": "object", "properties": {"a": {"not": {"$ref": "#"}}}}
    check_structure(StructuredOutputs(json=schema))


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "items": {"enum": [*range(15)]}, "uniqueItems": True, "minItems": 4},
        {"type": "array", "items": {"enum": [*range(40)]}, "uniqueItems": True},
        {"type": "array", "items": {"type": "integer", "minimum": 0}, "uniqueItems": True},
        {"type": "array", "items": {"type": "number", "minimum": 0, "maximum": 2}, "uniqueItems": True},
        {"type": "array", "items": {"type": ["boolean", "string"]}, "uniqueItems": True},
        {"type": "array", "prefixItems": [{"const": 1}], "items": {"const": 1}, "uniqueItems": True},
    ],
    ids=str,
)
def test_unique_items_of_many_values_are_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match='keywords of a JSON schema cannot be enforced: "uniqueItems"'):
        check_structure(StructuredOutputs(json=schema))


@pytest.mark.parametrize(
    "names",
    [
        {"format": "email"},
        {"type": "integer", "pattern": "^a"},
        {"pattern": "^a", "maxLength": 3},
        {"enum": ["a", "b"], "pattern": "a"},
        {"not": {"const": "a"}},
    ],
    ids=str,
)
def test_names_of_properties_that_are_neither_listed_nor_a_pattern_are_refused(names: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match='keywords of a JSON schema cannot be enforced: "propertyNames"'):
        check_structure(StructuredOutputs(json={"type": "object", "propertyNames": names}))


@pytest.mark.parametrize(
    "schema",
    [
        {"$defs": {"a": {"$anchor": "a", "const": 1}}, "$ref": "#a"},
        {"$id": "https://a.example/b/c", "$defs": {"a": {"const": 1}}, "$ref": "c#/$defs/a"},
        {
            "$defs": {"a": {"$id": "https://a.example/d", "$defs": {"b": {"const": 1}}}},
            "$ref": "https://a.example/d#/$defs/b",
        },
    ],
    ids=str,
)
def test_definitions_are_kept_for_references_by_identifiers(schema: dict[str, Any]) -> None:
    check_structure(StructuredOutputs(json=schema))
    matcher = LLMatcher(tables(), grammar_of(StructuredOutputs(json=schema)), log_level=0)
    assert [can_be_generated(matcher.deep_copy(), value) for value in (1, 2)] == [True, False]


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#/$defs/p", "maximum": 0.5, "$defs": {"p": {"type": "number", "exclusiveMinimum": 0}}},
        {"type": "number", "exclusiveMinimum": 0, "anyOf": [{"maximum": 0.5}, {"minimum": 7}]},
        {"type": "number", "exclusiveMinimum": 0, "allOf": [{"allOf": [{"maximum": 0.5}]}]},
        {"type": "number", "oneOf": [{"exclusiveMinimum": 0}], "maximum": 0.5},
        {"type": "number", "exclusiveMaximum": 0, "anyOf": [{"minimum": -0.5}, {"maximum": -7}]},
        {"items": {"anyOf": [{"exclusiveMinimum": 0}, {}], "oneOf": [{"maximum": 0.5}]}},
    ],
    ids=str,
)
def test_open_ranges_that_combined_schemas_form_are_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match=r"numbers between -?0, which is excluded, and -?0\.5 cannot be enforced"):
        check_structure(StructuredOutputs(json=schema))


def test_long_chains_of_references_are_refused() -> None:
    chain = {str(n): {"$ref": f"#/$defs/{n + 1}"} for n in range(5_000)}
    with pytest.raises(InvalidRequest, match="more than 100 references"):
        check_structure(StructuredOutputs(json={"$defs": {**chain, "5000": {}}, "$ref": "#/$defs/0"}))


OBJECT = {"type": "object", "required": ["a"]}


@pytest.mark.parametrize(
    ("one", "other", "are_disjoint"),
    [
        ({"type": "integer", "maximum": 5}, {"type": "integer", "minimum": 6}, True),
        ({"type": "integer", "maximum": 5}, {"type": "integer", "minimum": 5}, False),
        ({"type": "string", "maxLength": 2}, {"type": "string", "minLength": 3}, True),
        ({"type": "string", "maxLength": 2}, {"type": "string", "minLength": 2}, False),
        ({"type": "array", "minItems": 1, "items": {}}, {"type": "array", "maxItems": 1, "items": {}}, False),
        ({"type": "integer"}, {"const": 1.5}, True),
        ({"type": "integer"}, {"enum": [1.5, 2.0]}, False),
        ({"allOf": [{"type": "integer"}, {"minimum": 0}]}, {"enum": [0.5, -1]}, True),
        (
            {**OBJECT, "additionalProperties": {"type": "string"}},
            {**OBJECT, "properties": {"a": {"type": "integer"}}},
            True,
        ),
        (
            {**OBJECT, "patternProperties": {"^a": {"type": "integer"}}, "additionalProperties": {"type": "string"}},
            {**OBJECT, "properties": {"a": {"type": "integer"}}},
            False,
        ),
    ],
)
def test_alternatives_of_one_of_have_no_value_in_common(one: Any, other: Any, are_disjoint: bool) -> None:
    for schemas in ([one, other], [other, one]):
        structure = StructuredOutputs(json={"oneOf": schemas})
        if are_disjoint:
            check_structure(structure)
        else:
            with pytest.raises(InvalidRequest, match="valid under its alternatives 0 and 1, which"):
                check_structure(structure)


def test_limits_of_different_alternatives_are_not_combined() -> None:
    schema = {"anyOf": [{"type": "number", "exclusiveMinimum": 0}, {"type": "integer", "multipleOf": 9973}]}
    check_structure(StructuredOutputs(json={**schema, "oneOf": [{"minimum": 0}], "not": False}))
    old = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "$ref": "#/definitions/p",
        "maximum": 0.5,
        "definitions": {"p": {"type": "number", "exclusiveMinimum": 0}},
    }
    check_structure(StructuredOutputs(json=old))


@pytest.mark.parametrize(
    "schema",
    [
        {"anyOf": [{"$ref": "#"}, {"$ref": "#"}]},
        {"type": "object", "required": ["a"], "properties": {"a": {"$ref": "#"}}},
        {"type": "array", "minItems": 1, "items": {"$ref": "#"}},
        {"type": "array", "minItems": 2, "prefixItems": [{"type": "null"}, {"$ref": "#"}]},
        {"type": "array", "minItems": 2, "prefixItems": [{"type": "null"}], "items": {"$ref": "#"}},
        {"type": "array", "minItems": 1, "items": [{"$ref": "#"}]},
        {"type": "array", "minItems": 2, "items": [{"type": "null"}], "additionalItems": {"$ref": "#"}},
        {
            "$defs": {
                "a": {"type": "object", "required": ["b"], "properties": {"b": {"allOf": [{"$ref": "#/$defs/a"}]}}}
            },
            "items": {"oneOf": [{"$ref": "#/$defs/a"}, {"type": "object", "$ref": "#/$defs/a"}]},
        },
        {"type": ["object"], "required": ["a"], "properties": {"a": {"$ref": "#"}}},
        {"type": "object", "required": ["a"], "additionalProperties": {"$ref": "#"}},
        {"type": ["array"], "minItems": 1, "items": {"$ref": "#"}},
    ],
    ids=str,
)
def test_values_that_would_contain_themselves_are_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="another value of the same schema, without end"):
        check_structure(StructuredOutputs(json=schema))


@pytest.mark.parametrize(
    ("schema", "valid", "invalid"),
    [
        ({"enum": [0.3, 0.1, 0.25, "a", True, [0.25]], "multipleOf": 0.1}, [0.3, 0.1, "a", True, [0.25]], [0.25, 1]),
        ({"const": 0.3, "multipleOf": 0.1}, [0.3], [0.1]),
        ({"type": "number", "multipleOf": 0.07}, [0, 0.07, 0.14, 0.7, -7, 0.49], [0.06, 0.077, 1, 0.5]),
        ({"type": "number", "multipleOf": 0.035}, [0.07, 0.035, 3.5], [0.03, 0.05]),
        ({"type": "integer", "multipleOf": 9973}, [9973, 19946, 0], [9974, 1]),
        ({"type": "integer", "multipleOf": 300, "minimum": 10**12}, [10**12 + 200], [10**12, 300]),
    ],
    ids=str,
)
def test_multiples_are_exact_decimals(schema: Any, valid: list[Any], invalid: list[Any]) -> None:
    for given in (schema, json_numbers.with_left_out(json_numbers.with_listed_multiples(schema))):
        structure = StructuredOutputs(json=given)
        check_structure(structure)
        matcher = LLMatcher(tables(), grammar_of(structure), log_level=0)
        assert [each for each in valid if not can_be_generated(matcher.deep_copy(), each)] == []
        assert [each for each in invalid if can_be_generated(matcher.deep_copy(), each)] == []


def test_old_dialects_do_not_count_what_an_array_contains() -> None:
    schema = {"type": "array", "contains": {"type": "integer"}, "minContains": 0}
    check_structure(StructuredOutputs(json=schema))
    with pytest.raises(InvalidRequest, match='cannot be enforced: "contains"'):
        check_structure(StructuredOutputs(json={"$schema": "http://json-schema.org/draft-07/schema#", **schema}))


def test_keywords_of_extensions_are_no_schemas() -> None:
    schema = {"x-a": {"not": {}, "$ref": "#/x-a", "minimum": 1e300}, "properties": {"x-a": {"type": "integer"}}}
    structure = StructuredOutputs(json={**schema, "type": "object"})
    check_structure(structure)
    matcher = LLMatcher(tables(), grammar_of(structure), log_level=0)
    assert can_be_generated(matcher.deep_copy(), {"x-a": 1})
    assert not can_be_generated(matcher, {"x-a": "1"})
    referred = {"x-a": {"b": {"type": "string", "pattern": "^[[b]$"}}, "$ref": "#/x-a/b"}
    matcher = LLMatcher(tables(), grammar_of(StructuredOutputs(json=referred)), log_level=0)
    assert can_be_generated(matcher.deep_copy(), "[")
    assert not can_be_generated(matcher, "a")


@pytest.mark.parametrize(
    ("schema", "valid", "invalid"),
    [
        (
            {"prefixItems": [{"type": "integer"}, {"$ref": "#"}], "minItems": 1},
            [[1], [1, [2]], [1, [2, [3], 4]]],
            [1, [2, ""]],
        ),
        ({"prefixItems": [{"$ref": "#"}]}, [[], [[]], [[[], 1]]], [1]),
        (
            {
                "prefixItems": [{"type": "string"}, {"anyOf": [{"type": "null"}, {"$ref": "#"}]}],
                "minItems": 2,
                "items": False,
            },
            [["a", None], ["a", ["b", ["c", None]]]],
            ["a", ["b"]],
        ),
    ],
    ids=["one", "none", "list"],
)
def test_first_items_of_an_array_may_be_arrays_of_the_same_schema(
    schema: dict[str, Any], valid: list[Any], invalid: Any
) -> None:
    structure = StructuredOutputs(json={"type": "array", **schema})
    check_structure(structure)
    matcher = LLMatcher(tables(), grammar_of(structure), log_level=0)
    assert [each for each in valid if not can_be_generated(matcher.deep_copy(), each)] == []
    assert not can_be_generated(matcher, invalid)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "additionalProperties": {"$ref": "#"}},
        {"type": "object", "required": ["a"], "properties": {"a": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}},
        {"type": "object", "properties": {"a": {"$ref": "#"}}},
        {"type": "array", "minItems": 0, "items": {"$ref": "#"}},
        {"required": ["a"], "properties": {"a": {"$ref": "#"}}},
        {"anyOf": [{"$ref": "#"}, {"type": "string"}]},
        {"$defs": {"a": {"$ref": "#/$defs/a"}}, "type": "string"},
        {
            "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"type": "array", "items": {"$ref": "#/$defs/a"}}},
            "$ref": "#/$defs/a",
        },
        {"enum": [{"$ref": "#/enum/0"}]},
        {"properties": {"$ref": {"type": "string"}, "const": {"items": {"$ref": "#"}}}},
        {"$defs": {str(n): {"$ref": f"#/$defs/{n + 1}"} for n in range(40)} | {"40": {}}, "$ref": "#/$defs/0"},
    ],
    ids=str,
)
def test_other_references_are_accepted(schema: dict[str, Any]) -> None:
    check_structure(StructuredOutputs(json=schema))


IDLE: list[dict[str, Any]] = [
    {"uniqueItems": False, "minItems": 0},
    {"not": False},
    {"contains": {"type": "integer"}, "minContains": 0},
    {"additionalItems": False},
    {"minContains": 2},
    {"maxContains": 0},
    {"unevaluatedItems": True},
    {"unevaluatedProperties": {}},
    {"propertyNames": {}},
    {"propertyNames": {"type": "string"}},
    {"dependentRequired": {"a": []}},
    {"dependentSchemas": {"a": {}}},
    {"dependencies": {"a": [], "b": True}},
    {"if": {"minItems": 2}},
    {"if": {"minItems": 2}, "then": True, "else": {}},
    {"then": {"minItems": 2}, "else": False},
]


@pytest.mark.parametrize("keywords", IDLE, ids=str)
def test_keywords_that_allow_everything_are_accepted_wherever_a_schema_may_stand(keywords: dict[str, Any]) -> None:
    idle = {"items": {"type": "integer"}, **keywords}
    schema = {
        "$defs": {"list": {"type": "array", **idle}},
        "properties": {"a": {"anyOf": [{"$ref": "#/$defs/list"}]}, "uniqueItems": {"const": {"uniqueItems": False}}},
        "additionalProperties": {"type": "array", "prefixItems": [{"type": "object", **keywords}], **idle},
    }
    structure = StructuredOutputs(json=schema)
    check_structure(structure)
    matcher = LLMatcher(tables(), grammar_of(structure), log_level=0)
    assert can_be_generated(matcher.deep_copy(), {"a": [1, 1], "uniqueItems": {"uniqueItems": False}, "c": [{}, 2]})
    for wrong in ({"a": ["1"]}, {"uniqueItems": {}}, {"c": [1]}):
        assert not can_be_generated(matcher.deep_copy(), wrong)


@pytest.mark.parametrize(
    "keywords",
    [
        {"uniqueItems": True},
        {"contains": {}, "minContains": 0, "maxContains": 2},
        {"contains": {}},
        {"unevaluatedItems": False},
    ],
    ids=str,
)
def test_keywords_that_may_forbid_something_are_still_refused(keywords: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="keywords of a JSON schema cannot be enforced"):
        check_structure(StructuredOutputs(json={"type": "array", **keywords}))


@pytest.mark.parametrize("others", [{}, {"items": {"type": "integer"}}, {"items": False}], ids=str)
def test_the_first_items_count_beside_a_keyword_of_older_dialects(others: dict[str, Any]) -> None:
    schema = {"type": "array", "prefixItems": [{"type": "string"}], "additionalItems": False, **others}
    structure = StructuredOutputs(json=schema)
    check_structure(structure)
    matcher = LLMatcher(tables(), grammar_of(structure), log_level=0)
    assert can_be_generated(matcher.deep_copy(), ["a"])
    assert can_be_generated(matcher.deep_copy(), ["a", 1]) is (others.get("items") is not False)
    assert not can_be_generated(matcher, [1])


@pytest.mark.parametrize("own", [{}, {"pattern": "^[12]"}, {"pattern": "^[12]", "allOf": [{"maxLength": 30}]}], ids=str)
@pytest.mark.parametrize(("form", "time"), [("date", ""), ("date-time", "T10:00:00Z")])
def test_29_february_is_a_date_in_leap_years_only(form: str, time: str, own: dict[str, Any]) -> None:
    structure = StructuredOutputs(json={"type": "string", "format": form, **own})
    check_structure(structure)
    matcher = LLMatcher(tables(), grammar_of(structure), log_level=0)

    def found(*days: str) -> list[str]:
        return [day for day in days if can_be_generated(matcher.deep_copy(), day + time)]

    real = [
        "2024-02-29",
        "2000-02-29",
        "1996-02-29",
        "2023-02-28",
        "1900-02-19",
        "2023-01-29",
        "2023-12-31",
        "1999-10-01",
    ]
    assert found(*real) == real
    assert found("2023-02-29", "1900-02-29", "2100-02-29", "2022-02-29", "2024-02-30", "2023-04-31", "2023-13-01") == []


SOME = 'ab"\\/[]-&~!\n\x1f'
CLASSES = {  # a pattern for one character -> which of SOME it matches
    r'[^"\\]': "ab/[]-&~!\n\x1f",
    '[^"]': "ab\\/[]-&~!\n\x1f",
    r"[^\\/]": 'ab"[]-&~!\n\x1f',
    "[^-/]": 'ab"\\[]&~!\n\x1f',
    r'[^\x00-\x1f"]': "ab\\/[]-&~!",
    r'[^\]"]': "ab\\/[-&~!\n\x1f",
    r"\P{P}": "ab~\n\x1f",
    r"[^\p{P}]": "ab~\n\x1f",
    r"[\x00-!]": "!\n\x1f",
    r"[\0-\x1fa]": "a\n\x1f",
    r"[a\\x00-]": "a\\-",
    "[[]": "[",
    r"[[\]]": "[]",
    "[^[]": 'ab"\\/]-&~!\n\x1f',
    "[!-/:-@[-`{-~]": '"\\/[]-&~!',
    "[a&&b]": "ab&",
    "[~~a]": "a~",
    "[!--a]": 'a"&!-',
    "[+--]": "-",
    "[--/]": "/-",
    "[ --~]": '"-&~!',
    "[*--0-9]": "-",
    "[a-b--/]": "ab/-",
    "[--]": "-",
    "[---]": "-",
    "[!-]": "!-",
    r"[\w--]": "ab-",
    r"[\w--~]": "ab-~",
    r"[a\z]|\a": "a",
    r"\A|\a": "a",
    r"\p|[\P-]": "-",
    r"\p{Cc}": "\n\x1f",
    r"\p{C}": "\n\x1f",
    r"[\p{Cc}]": "\n\x1f",
    r"[\P{P}]": "ab~\n\x1f",
    r"[\u0001-\u001f\u0000]": "\n\x1f",
    r"[\0-\b\s\u{e}-\x1f]": "\n\x1f",
    r"[\cA-\x1f\x00a]": "a\n\x1f",
    r"[\x00a]": "a",
    r"[\b\n]": "\n",
    r"[\p{Cc}a\x00]": "a\n\x1f",
    "[^]": SOME,
    "([]|a)": "a",
    r"\[": "[",
    r"\\": "\\",
    r"[^\s\S]|b": "b",
}


@pytest.mark.parametrize("pattern", CLASSES)
def test_classes_of_characters_are_those_of_ecmascript(pattern: str) -> None:
    structures = [
        StructuredOutputs(json={"type": "string", "pattern": f"^({pattern})$"}),
        StructuredOutputs(
            json={"type": "object", "patternProperties": {f"^({pattern})$": {}}, "additionalProperties": False}
        ),
    ]
    for structure, instance_of in zip(structures, (str, lambda key: {key: 1}), strict=True):
        check_structure(structure)
        matcher = LLMatcher(tables(), grammar_of(structure), log_level=0)
        found = [each for each in SOME if can_be_generated(matcher.deep_copy(), instance_of(each))]
        assert "".join(found) == "".join(each for each in SOME if each in CLASSES[pattern])


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        (r"^(?:\S+\s+){0,49}\S+$", r"^\S+(?:\s+\S+){0,49}$"),
        (r"^$|(^(?:\S+\s+){0,99}\S+$)", r"^$|(^\S+(?:\s+\S+){0,99}$)"),
        ("^([a-z]+-){1,3}[a-z]+$", "^[a-z]+(-[a-z]+){1,3}$"),
        ("a(b|c)", "a(b|c)"),
        ("(a(b|c)d){0,2}a(b|c)e", "a(b|c)(da(b|c)){0,2}e"),
        (r"([(]x\)){1,2}[(]y", r"[(](x\)[(]){1,2}y"),
        ("((a,){0,2}a;){0,3}(a,){0,2}a", "a(,a){0,2}(;a(,a){0,2}){0,3}"),
        ("(ab){2,3}a*", "(ab){2,3}a*"),
        ("(ab){2,3}a{2}", "(ab){2,3}a{2}"),
        ("(a|b){1,2}a", "(a|b){1,2}a"),
        ("(ab){1,2}ab", "(ab){1,2}ab"),
        ("(?=ab){1,2}a", "(?=ab){1,2}a"),
        ("(ab){1,2", "(ab){1,2"),
        ("(((", "((("),
        ("(ab){0,2}a" * 200, "(ab){0,2}a" * 200),
    ],
)
def test_a_repetition_before_its_own_beginning_is_written_in_the_cheaper_way(pattern: str, expected: str) -> None:
    """Both forms have the same meaning; long patterns stay as they are."""
    assert rotated(pattern) == expected
    assert rotated(expected) == expected


@pytest.mark.parametrize("pattern", CLASSES)
def test_a_class_that_is_written_twice_is_the_same(pattern: str) -> None:
    once = as_read(pattern)
    assert as_read(once) == once


@pytest.mark.parametrize("scheme", ["http", "https"])
@pytest.mark.parametrize("dialect", ["draft-04", "draft-06", "draft-07#", "draft/2019-09", "draft/2020-12#"])
def test_a_dialect_is_known_with_either_scheme(scheme: str, dialect: str) -> None:
    uri = f"{scheme}://json-schema.org/{dialect.removesuffix('#')}/schema{'#' if dialect.endswith('#') else ''}"
    check_structure(StructuredOutputs(json={"$schema": uri, "items": {"$schema": uri, "type": "integer"}}))


@pytest.mark.parametrize(
    "dialect", ["http://json-schema.org/draft-04/schema#", "https://json-schema.org/draft-07/schema"]
)
def test_old_dialects_ignore_what_stands_beside_a_reference(dialect: str) -> None:
    schema: dict[str, Any] = {
        "$ref": "#/definitions/a~1b",
        "required": ["c"],
        "not": {"type": "object"},
        "definitions": {
            "a/b": {
                "properties": {"$ref": {"type": "integer"}, "c": {"$ref": "#/definitions/name", "maxLength": 1}},
                "additionalProperties": False,
            },
            "name": {"type": "string"},
        },
    }
    structure = StructuredOutputs(json={"$schema": dialect, **schema})
    check_structure(structure)
    matcher = LLMatcher(tables(), grammar_of(structure), log_level=0)
    assert all(can_be_generated(matcher.deep_copy(), each) for each in ({}, {"$ref": 1, "c": "long"}))
    assert not any(can_be_generated(matcher.deep_copy(), each) for each in ({"c": 1}, {"$ref": "a"}))
    del schema["not"]
    newer = LLMatcher(tables(), grammar_of(StructuredOutputs(json=schema)), log_level=0)
    assert not any(can_be_generated(newer.deep_copy(), each) for each in ({}, {"c": "long"}))
    assert can_be_generated(newer, {"c": "l"})


@pytest.mark.parametrize(("own", "most"), [({}, 253), ({"maxLength": 400}, 253), ({"maxLength": 90}, 90)], ids=str)
def test_host_names_have_at_most_253_characters(own: dict[str, Any], most: int) -> None:
    structure = StructuredOutputs(json={"type": "string", "format": "hostname", **own})
    check_structure(structure)
    matcher = LLMatcher(tables(), grammar_of(structure), log_level=0)
    name = ".".join(["a" * 49] * 6)
    assert can_be_generated(matcher.deep_copy(), name[:most])
    assert not can_be_generated(matcher, name[: most + 1])


def test_there_are_enough_schemas() -> None:
    assert len({case[0] for case in SCHEMAS}) == len(SCHEMAS) >= 200
    assert all(case[2] for case in SCHEMAS)


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"properties": {"ab": {"type": "integer"}}}, r'{"a\u0062": "x"}'),
        ({"properties": {"secret": False}}, r'{"\u0073ecret": 1}'),
        ({"patternProperties": {"^a": {"type": "integer"}}}, r'{"\u0061b": "x"}'),
        ({"minProperties": 2, "required": ["a"]}, r'{"a": 1, "\u0061": 2}'),
        ({"allOf": [{"properties": {'q"': {"type": "integer"}}}]}, r'{"q\u0022": "x"}'),
        ({"properties": {"a\n": {"type": "integer"}}}, r'{"a\u000a": "x"}'),
    ],
)
def test_an_escaped_name_is_no_way_around_its_schema(schema: dict[str, Any], text: str) -> None:
    structure = StructuredOutputs(json={"type": "object", **schema})
    check_structure(structure)
    matcher = LLMatcher(tables(), grammar_of(structure), log_level=0)
    assert TEXT.tokenizer is not None
    tokens = TEXT.tokenizer.encode(text, add_special_tokens=False)
    assert matcher.try_consume_tokens(tokens) < len(tokens) or not matcher.is_accepting()


@pytest.mark.parametrize("integer", [{}, {"minimum": 0}, {"type": ["integer", "null"], "description": "N"}], ids=str)
@pytest.mark.parametrize(
    "root",
    [
        {},
        {"$id": "https://example.org/x", "$defs": {"integer": {"type": "integer"}}},
        {"$schema": "http://json-schema.org/draft-04/schema#", "definitions": {"a": {"type": "string"}}},
    ],
    ids=str,
)
def test_hundreds_of_integers_with_64_bits_are_one_definition(root: dict[str, Any], integer: dict[str, Any]) -> None:
    names = [f"v{number}" for number in range(300)]
    properties = {name: {"type": "integer", **integer, "title": name} for name in names}
    structure = StructuredOutputs(json={**root, "type": "object", "properties": properties, "required": names[:2]})
    check_structure(structure)
    matcher = LLMatcher(tables(), grammar_of(structure), log_level=0)
    assert can_be_generated(matcher.deep_copy(), {"v0": 0, "v1": 2**63 - 1})
    assert not any(can_be_generated(matcher.deep_copy(), {"v0": 0, "v1": each}) for each in (1.5, "a", 2**63, -(2**63)))


@pytest.mark.parametrize(
    ("own", "bounds"),
    [
        ({}, {"minimum": 1024 - 2**63, "maximum": 2**63 - 1}),
        ({"minimum": 1}, {"minimum": 1, "maximum": 2**63 - 1}),
        ({"exclusiveMinimum": 1}, {"exclusiveMinimum": 1, "maximum": 2**63 - 1}),
        ({"exclusiveMaximum": 9}, {"minimum": 1024 - 2**63, "exclusiveMaximum": 9}),
        ({"exclusiveMinimum": 1, "exclusiveMaximum": 9}, {"exclusiveMinimum": 1, "exclusiveMaximum": 9}),
        ({"multipleOf": 3}, {"multipleOf": 3}),
    ],
    ids=str,
)
def test_an_integer_gets_the_bounds_that_it_lacks(own: dict[str, int], bounds: dict[str, int]) -> None:
    assert json_numbers.with_own_bounds({"type": "integer", **own}) == {"type": "integer", **bounds}


def test_integers_with_a_hundred_different_limits_keep_these_and_get_no_others() -> None:
    properties = {f"v{number}": {"type": "integer", "minimum": number} for number in range(100)}
    structure = StructuredOutputs(json={"type": "object", "properties": properties, "required": ["v9"]})
    check_structure(structure)
    matcher = LLMatcher(tables(), grammar_of(structure), log_level=0)
    allowed = {value: can_be_generated(matcher.deep_copy(), {"v9": value}) for value in (8, 9, 2**63 - 1)}
    assert allowed == {8: False, 9: True, 2**63 - 1: True}


@pytest.mark.parametrize("own", [{}, {"pattern": "Z$"}], ids=str)
@pytest.mark.parametrize(("form", "day"), [("time", ""), ("date-time", "2016-12-31T")])
def test_no_minute_has_a_second_60(form: str, day: str, own: dict[str, Any]) -> None:
    structure = StructuredOutputs(json={"type": "string", "format": form, **own})
    check_structure(structure)
    matcher = LLMatcher(tables(), grammar_of(structure), log_level=0)
    assert can_be_generated(matcher.deep_copy(), f"{day}23:59:59.5Z")
    assert not can_be_generated(matcher, f"{day}23:59:60Z")


@pytest.mark.parametrize(
    "schema",
    [
        {"oneOf": [{"type": "string", "format": {}}, {"type": "string"}]},
        {"oneOf": [{"required": 5}, {"type": "object", "required": [["a"], "b"]}]},
        {"dependentRequired": {"a": ["b"]}, "required": True},
        {"not": {"type": ["string", {}]}},
        {"not": {"required": [{}]}},
        {"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True, "minItems": "1"},
        {"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True, "maxItems": [2]},
    ],
    ids=str,
)
def test_keywords_with_values_of_another_kind_are_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match=r"^structured_outputs: "):
        check_structure(StructuredOutputs(json=schema))


def test_unions_of_many_alternatives_are_told_apart_by_their_constants() -> None:
    names = [f"a{index}" for index in range(40)]
    texts = {name: {"type": "string"} for name in names}
    alternatives = [
        {"type": "object", "properties": {**texts, "kind": {"const": kind}}, "required": [*names, "kind"]}
        for kind in range(44)
    ]
    grammar = grammar_of(StructuredOutputs(json={"oneOf": alternatives}))
    assert grammar == grammar_of(StructuredOutputs(json={"anyOf": alternatives}))


def test_alternatives_are_negated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each pair of alternatives needs the negation of one of them, which here has 900 constants."""
    num_negated = [0]
    others = json_rewriting._others

    def count(values: list[Any]) -> list[Any] | None:
        num_negated[0] += 1
        return others(values)

    monkeypatch.setattr(json_rewriting, "_others", count)
    constants = [{"anyOf": [{"const": 40 * group + index} for index in range(30)]} for group in range(30)]
    choices = {"anyOf": [{"type": "object", "required": ["b"], "properties": {"b": each}} for each in constants]}
    alternatives = [
        {"type": "object", "required": ["a"], "properties": {"a": choices, "k": {"const": kind}}} for kind in range(6)
    ]
    check_structure(StructuredOutputs(json={"oneOf": alternatives}))
    assert num_negated[0] <= 2 * 901
