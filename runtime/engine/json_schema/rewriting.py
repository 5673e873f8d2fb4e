"""JSON schemas rewritten without keywords that llguidance lacks, where other keywords can express the same.

Alternatives of `oneOf` that exclude each other become alternatives of `anyOf`. `not`, `if`, `dependentRequired` and
`uniqueItems` become alternatives where these are few. Where an exact form would be long, a rewritten schema allows
less, never more: alternatives of `oneOf` get the required property that distinguishes them. A keyword without such a
form stays.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, TypeGuard

from ...common.errors import InvalidRequest
from .complements import other_texts, without_look_aheads
from .disjoint import JSON_TYPES, Case, Comparer, identity, required_names, type_of
from .names import MAX_OPTIONAL, with_least_properties, with_listed_names, with_patterned_names
from .references import ANNOTATIONS, DATA, EXTENSION, MAPS, referred
from .unique import with_unique_items

MAX_NEGATED = 6  # alternatives of the negation of a schema
MAX_NEGATED_VALUES = 64  # values of an enumeration that is negated
MAX_SCHEMAS = 20_000  # schemas inside one schema
MAX_PAIRS = 2_000  # pairs of alternatives of `oneOf`
DEPENDENCIES = ("dependencies", "dependentRequired", "dependentSchemas")
FORBIDDEN = False  # the schema of a forbidden property

_Schema = Mapping[str, Any]


def rewritten(root: _Schema) -> dict[str, Any]:
    """Rewrite a schema with keywords that llguidance supports, as far as possible. Raises InvalidRequest."""
    return dict(_Rewriting(root).schema(root))


class _Rewriting:
    def __init__(self, root: _Schema) -> None:
        self._root = root
        self._comparer = Comparer(root)
        self._negations: dict[int, tuple[_Schema, list[Any] | None]] = {}  # id -> schema and negation
        self._num_left = MAX_SCHEMAS
        self._rules: tuple[tuple[str, Callable[[_Schema], _Schema]], ...] = (
            *((key, partial(self._with_dependencies, key)) for key in DEPENDENCIES),
            ("pattern", _with_pattern),
            ("uniqueItems", partial(with_unique_items, comparer=self._comparer)),
            ("propertyNames", self._with_names),
            ("minProperties", with_least_properties),
            ("if", self._with_condition),
            ("not", self._with_negation),
            ("oneOf", self._with_alternatives),
        )

    def schema(self, schema: Any) -> Any:
        """Return a schema, or a list of schemas, with all schemas inside rewritten."""
        if isinstance(schema, list):
            return [self.schema(each) for each in schema]
        if not isinstance(schema, dict):
            return schema
        self._count()
        for key, rule in self._rules:
            if key in schema:
                schema = rule(schema)
        return {key: self._inside(key, value) for key, value in schema.items()}

    def _count(self) -> None:
        self._num_left -= 1
        if self._num_left < 0:
            raise InvalidRequest(
                f"a JSON schema has more than {MAX_SCHEMAS} schemas, with those that its keywords stand for"
            )

    def _inside(self, key: str, value: Any) -> Any:
        if key in DATA or key.startswith(EXTENSION):
            return value
        if key in MAPS and isinstance(value, dict):
            return {name: self.schema(each) for name, each in value.items()}
        return self.schema(value)

    # Keywords

    def _with_dependencies(self, key: str, schema: _Schema) -> _Schema:
        """Replace rules for objects with a certain property."""
        needed = schema[key]
        if not isinstance(needed, dict):
            return schema
        conditions = []
        for name, each in needed.items():
            needs = {"required": each} if isinstance(each, list) else each
            if each in ([], True, {}):
                continue
            if name in required_names(schema):
                conditions.append(needs)
            else:
                conditions.append({"anyOf": [_without(name), _all_of([{"required": [name]}, needs])]})
        return _and(_left_out(schema, key), conditions)

    def _with_names(self, schema: _Schema) -> _Schema:
        """Replace the schema of the names of properties by these names, or by a pattern."""
        names = self._resolved(schema["propertyNames"])
        if (listed := self._all_values(names)) is not None:
            return with_listed_names(schema, list(listed.values()))
        return with_patterned_names(schema, names) if isinstance(names, dict) else schema

    def _with_condition(self, schema: _Schema) -> _Schema:
        """Replace `if`, `then` and `else` by two alternatives."""
        condition = schema["if"]
        negated = self._negated(condition)
        if negated is None or ("then" not in schema and "else" not in schema):
            return schema
        met = _all_of([condition, schema.get("then", True)])
        others = [_all_of([each, schema.get("else", True)]) for each in negated]
        return _and(_left_out(schema, "if", "then", "else"), [{"anyOf": [met, *others]}])

    def _with_negation(self, schema: _Schema) -> _Schema:
        """Replace `not` by the remaining values, or by alternatives."""
        rest = _left_out(schema, "not")
        negated = schema["not"]
        excluded = self._all_values(negated)
        listed = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if excluded is not None and isinstance(listed, list):
            return {**rest, "enum": [value for value in listed if identity(value) not in excluded]}
        alternatives = self._negated(negated)
        return schema if alternatives is None else _and(rest, [_any_of(alternatives)])

    def _with_alternatives(self, schema: _Schema) -> _Schema:
        """Replace `oneOf` by `anyOf` with alternatives that exclude each other. Raises InvalidRequest."""
        given = schema["oneOf"]
        if not isinstance(given, list) or len(given) ** 2 > MAX_PAIRS:
            return schema
        context = _left_out(schema, "oneOf")
        named = schema.get("discriminator")
        tag = named.get("propertyName") if isinstance(named, dict) else None
        alternatives = []
        for index, each in enumerate(given):
            extra: list[Any] = []
            for at, other in enumerate(given):
                if at != index and not self._excludes(context, [each, *extra], other):
                    apart = next(self._apart(context, each, extra, other, tag), None)
                    if apart is None:
                        raise InvalidRequest(
                            f"a JSON schema with oneOf cannot be enforced: a value may be valid under its alternatives "
                            f"{min(index, at)} and {max(index, at)}, which no required property with different "
                            "constants and no type tells apart; use anyOf"
                        )
                    extra.append(apart)
            alternatives.append(_all_of([each, *extra]))
        return _and(context, [{"anyOf": alternatives}]) if "anyOf" in context else {**context, "anyOf": alternatives}

    def _apart(self, context: _Schema, one: Any, extra: list[Any], other: Any, tag: object) -> Iterator[Any]:
        """Yield conditions under which a value of one schema is invalid under another."""
        mine = {name for case in self._comparer.cases(one) for part in case.parts for name in _names(part)}
        its = {name for case in self._comparer.cases(other) for part in case.parts for name in _names(part)}
        required = _always_required(self._comparer.cases(_all_of([context, one])))
        both = sorted(mine & its, key=lambda name: (name != tag, name))
        foreign = sorted(_always_required(self._comparer.cases(other)) - required)
        candidates: list[Any] = [_object_with(name) for name in both]
        candidates += [{"type": "object", **_without(name)} for name in foreign]
        own = [each for name in sorted(mine - its) if self._excludes(context, [one, each := _object_with(name)], other)]
        candidates += [_any_of(own[:MAX_OPTIONAL])] if own else []
        negated = self._negated(other)
        candidates += [] if negated is None else [_any_of(negated)]
        for each in candidates:
            if self._excludes(context, [one, *extra, each], other) or (negated is not None and each is candidates[-1]):
                yield each

    def _excludes(self, context: _Schema, parts: list[Any], other: Any) -> bool:
        """Return whether the context and all parts together exclude another schema."""
        return self._comparer.are_disjoint({"allOf": [context, *parts]}, other)

    # Negation

    def _negated(self, schema: Any) -> list[Any] | None:
        """Return alternatives that together are the negation of a schema; None if they are unknown."""
        if isinstance(schema, bool):
            return [] if schema else [True]
        schema = self._resolved(schema)
        if not isinstance(schema, dict):
            return None
        if id(schema) not in self._negations:
            self._count()
            self._negations[id(schema)] = (schema, self._new_negation(schema))
        return self._negations[id(schema)][1]

    def _new_negation(self, schema: _Schema) -> list[Any] | None:
        found: list[Any] = []
        for key in schema:
            if key in ANNOTATIONS:
                continue
            parts = self._negated_keyword(key, schema)
            if parts is None:
                return None
            found += parts
        return found if len(found) <= MAX_NEGATED else None

    def _negated_keyword(self, key: str, schema: _Schema) -> list[Any] | None:
        value = schema[key]
        match key:
            case "const":
                return _others([value])
            case "enum" if isinstance(value, list):
                return _others(value)
            case "type":
                kinds = [value] if isinstance(value, str) else value
                if not _are_texts(kinds) or "integer" in kinds:
                    return None
                return [{"type": sorted(set(JSON_TYPES).difference(kinds))}]
            case "required" if _are_texts(value):
                return [{"type": "object", **_without(name)} for name in value]
            case "properties" if isinstance(value, dict):
                return self._negated_properties(value)
            case "not":
                return [value]
            case "allOf" if isinstance(value, list):
                lists = [self._negated(each) for each in value]
                return None if None in lists else [each for found in lists for each in found or ()]
            case "anyOf" if isinstance(value, list):
                lists = [self._negated(each) for each in value]
                return None if None in lists else [_all_of([_any_of(found or []) for found in lists])]
        return None

    def _negated_properties(self, properties: Mapping[str, Any]) -> list[Any] | None:
        found: list[Any] = []
        for name, each in properties.items():
            negated = self._negated(each)
            if negated is None:
                return None
            if negated:
                found.append({"type": "object", "required": [name], "properties": {name: _any_of(negated)}})
        return found

    def _all_values(self, schema: Any) -> dict[Any, Any] | None:
        """Return the values of a schema that only lists values, by their identity."""
        schema = self._resolved(schema)
        if not isinstance(schema, dict) or not schema.keys() - ANNOTATIONS <= {"const", "enum", "type"}:
            return None
        cases = self._comparer.cases(schema)
        if any(case.values is None for case in cases):
            return None
        return {key: value for case in cases for key, value in (case.values or {}).items()}

    def _resolved(self, schema: Any) -> Any:
        for _ in range(MAX_NEGATED):
            if not isinstance(schema, dict) or schema.keys() - ANNOTATIONS != {"$ref"}:
                break
            schema = referred(self._root, schema["$ref"])
        return schema


def _with_pattern(schema: _Schema) -> _Schema:
    """Replace look-aheads at the beginning of a pattern by separate patterns."""
    pattern = schema["pattern"]
    parts = without_look_aheads(pattern) if isinstance(pattern, str) else None
    if not parts:
        return schema
    return _and({**schema, "pattern": parts[0]}, [{"pattern": each} for each in parts[1:]])


def _others(values: list[Any]) -> list[Any] | None:
    """Return alternatives for all values except these; None if these include arrays or objects."""
    kinds = {type_of(value) for value in values}
    if kinds & {"array", "object"} or len(values) > MAX_NEGATED_VALUES:
        return None
    left: list[Any] = [{"type": [kind for kind in JSON_TYPES if kind not in kinds]}] if kinds != set(JSON_TYPES) else []
    booleans = {value for value in values if isinstance(value, bool)}
    left += [{"const": not value} for value in booleans if len(booleans) == 1]
    if "string" in kinds:
        pattern = other_texts([value for value in values if isinstance(value, str)])
        if pattern is None:
            return None
        left.append({"type": "string", "pattern": pattern})
    if "number" in kinds:
        numbers = sorted({value for value in values if type_of(value) == "number"})
        ends = [None, *numbers, None]
        for low, high in itertools.pairwise(ends):
            bounds = {"exclusiveMinimum": low, "exclusiveMaximum": high}
            left.append({"type": "number", **{key: end for key, end in bounds.items() if end is not None}})
    return left


def _and(schema: _Schema, conditions: list[Any]) -> dict[str, Any]:
    """Return a schema with additional conditions."""
    if not conditions:
        return dict(schema)
    given = schema.get("allOf", [])
    return {**schema, "allOf": [*given, *conditions] if isinstance(given, list) else conditions}


def _are_texts(value: Any) -> TypeGuard[list[str]]:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def _all_of(schemas: list[Any]) -> Any:
    kept = [each for each in schemas if each is not True and each != {}]
    return True if not kept else kept[0] if len(kept) == 1 else {"allOf": kept}


def _any_of(schemas: list[Any]) -> Any:
    return schemas[0] if len(schemas) == 1 else {"anyOf": schemas} if schemas else False


def _without(name: str) -> dict[str, Any]:
    return {"properties": {name: FORBIDDEN}}


def _object_with(name: str) -> dict[str, Any]:
    return {"type": "object", "required": [name]}


def _left_out(schema: _Schema, *keys: str) -> dict[str, Any]:
    return {key: value for key, value in schema.items() if key not in keys}


def _names(part: _Schema) -> Iterator[str]:
    known = part.get("properties")
    yield from known if isinstance(known, dict) else ()


def _always_required(cases: list[Case]) -> set[str]:
    return set.intersection(*(set(case.required) for case in cases)) if cases else set()
