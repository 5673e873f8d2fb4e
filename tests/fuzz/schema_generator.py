"""JSON schemas from a seed, in the styles of public ones and of the libraries that write schemas.

A `Style` says how often a schema has each keyword. The shares of manifests and settings follow 575 documents of
schemastore (197,000 schemas), and the forms of Pydantic's style follow its output. The other shares are estimates. No
share depends on which schemas compile; definitions that require values of themselves are left out.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

DRAFT_7 = "http://json-schema.org/draft-07/schema#"
DRAFT_2020 = "https://json-schema.org/draft/2020-12/schema"
_NAMES = (
    "name id kind version type status description labels image ports env command args path url title enabled timeout "
    "replicas strategy metadata spec items tags author license scripts files main include exclude target module rules "
    "options plugins settings level value key limit offset query location date email address city country price count"
)
_WORDS = (
    "always never on off auto error warn info debug tcp udp http read write admin user small medium large open closed "
    "pending active json yaml node python linux windows macos es2015 es2020 strict none all asc desc GET POST"
)
NAMES = tuple(_NAMES.split())
WORDS = tuple(_WORDS.split())
PATTERNS = (  # patterns of public schemas
    r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$",
    r"^[a-zA-Z_][a-zA-Z0-9_]*$",
    r"^\d+\.\d+\.\d+$",
    r"^[^\s]+$",
    r"^#[0-9a-fA-F]{6}$",
    r"^(https?|git)://",
    r"^[A-Z]{2,3}$",
    r"\.(yml|yaml)$",
    r"^\$\{\{(.|[\r\n])*\}\}$",
    r"^(?:@[a-z0-9-*~][a-z0-9-*._~]*/)?[a-z0-9-~][a-z0-9-._~]*$",
    r"^(\+|-)?(([0-9]+(\.[0-9]*)?)|(\.[0-9]+))(([KMGTPE]i)|[numkMGTPE])?$",
    r"^(?!-)[a-z0-9-]+$",
    r"^v?[0-9]+",
    r"^\S+@\S+$",
    r"^[0-9a-f]{8,40}$",
)
NAME_PATTERNS = (r"^x-", r"^[a-zA-Z0-9._-]+$", r"^[_a-zA-Z][a-zA-Z0-9_-]*$", r"^(.*)$", r"^@", r"^\S+$")
FORMATS = (
    "uri",
    "date-time",
    "uri-reference",
    "email",
    "date",
    "hostname",
    "uuid",
    "duration",
    "regex",
    "color",
    "ipv4",
)


@dataclass(frozen=True)
class Style:
    """Shares of keywords and kinds in the schemas of one source."""

    kinds: dict[str, float]  # weights of a property's form
    required: float  # share of properties
    closed: float = 0.0  # objects with `additionalProperties: false`
    enum: float = 0.12  # strings
    pattern: float = 0.05  # strings
    format: float = 0.02  # strings
    lengths: float = 0.02  # strings
    bounds: float = 0.15  # numbers
    min_items: float = 0.1  # arrays
    unique: float = 0.0  # arrays
    described: float = 0.4
    rules: dict[str, float] = field(default_factory=dict)  # rules between properties, of objects
    overlap: float = 0.0  # unions that are `oneOf` although their alternatives may overlap
    num_properties: tuple[int, int] = (2, 9)
    depth: int = 3


_SETTINGS = {"string": 40, "boolean": 18, "object": 10, "array": 12, "integer": 3, "number": 2, "ref": 14, "union": 7}
STYLES = {
    "manifest": Style(
        {**_SETTINGS, "map": 5}, 0.15, 0.35, pattern=0.09, unique=0.09, rules={"patterns": 0.06}, overlap=0.1
    ),
    "settings": Style(
        {**_SETTINGS, "map": 3, "const": 1},
        0.06,
        0.4,
        pattern=0.06,
        unique=0.085,
        rules={"patterns": 0.05, "condition": 0.02, "not": 0.008, "dependencies": 0.008, "least": 0.01, "names": 0.006},
        overlap=0.08,
    ),
    "openapi": Style(
        {"string": 45, "integer": 12, "number": 4, "boolean": 10, "array": 10, "object": 4, "ref": 15, "tagged": 2},
        0.4,
        0.03,
        format=0.2,
        lengths=0.06,
        unique=0.015,
        rules={"base": 0.12, "nullable": 0.2},
    ),
    "kubernetes": Style(
        {"string": 38, "integer": 9, "boolean": 8, "array": 14, "object": 22, "map": 7, "quantity": 3},
        0.2,
        pattern=0.03,
        lengths=0.05,
        rules={"one_required": 0.01, "not": 0.004},
        num_properties=(2, 12),
        depth=4,
    ),
    "tool": Style(
        {"string": 50, "integer": 12, "number": 6, "boolean": 10, "array": 12, "object": 7, "nullable": 3},
        0.55,
        0.45,
        enum=0.2,
        pattern=0.01,
        format=0.03,
        bounds=0.25,
        unique=0.005,
        described=0.9,
        num_properties=(1, 6),
        depth=2,
    ),
    "pydantic": Style(
        {"string": 30, "integer": 13, "number": 8, "boolean": 8, "array": 11, "ref": 13, "optional": 12, "map": 4}
        | {"tagged": 2, "tuple": 2, "decimal": 1, "const": 2, "keyed": 1},
        0.6,
        0.15,
        enum=0.05,
        pattern=0.03,
        format=0.12,
        lengths=0.08,
        unique=0.04,
        described=0.3,
    ),
    "zod": Style(
        {"string": 36, "integer": 8, "number": 10, "boolean": 10, "array": 12, "object": 10, "union": 5, "nullable": 4}
        | {"const": 2, "keyed": 2, "tagged": 2, "tuple": 1},
        0.75,
        1.0,
        pattern=0.02,
        format=0.08,
        lengths=0.1,
        bounds=0.3,
        described=0.15,
    ),
    "typebox": Style(
        {"string": 36, "integer": 8, "number": 10, "boolean": 10, "array": 12, "object": 10, "union": 7, "const": 4}
        | {"keyed": 2, "tuple": 1},
        0.75,
        0.2,
        enum=0.0,
        format=0.05,
        bounds=0.2,
        unique=0.01,
        described=0.1,
        rules={"base": 0.04, "unevaluated": 0.01, "not": 0.004},
    ),
}


class SchemaGenerator:
    """Schemas from a seed: each call of `schema` returns the next style and its next schema."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)
        self._num_schemas = 0
        self._style = STYLES["manifest"]
        self._definitions: dict[str, Any] = {}
        self._open: list[str] = []  # definitions within which the next one is
        self._prefix = ""

    def schema(self) -> tuple[str, dict[str, Any]]:
        """Return the name of a style and a schema."""
        name = tuple(STYLES)[self._num_schemas % len(STYLES)]
        self._num_schemas += 1
        self._style = STYLES[name]
        self._definitions = {}
        is_new = name in ("pydantic", "tool") or self._chance.random() < 0.1
        key = "$defs" if is_new else "definitions"
        self._prefix = f"#/{key}/"
        root = self._object(0)
        if name not in ("tool", "openapi", "kubernetes", "pydantic"):
            root = {"$schema": DRAFT_2020 if is_new else DRAFT_7, **root}
        return name, {**root, key: self._definitions} if self._definitions else root

    def _is(self, share: float) -> bool:
        return self._chance.random() < share

    def _some(self, words: tuple[str, ...], least: int, most: int) -> list[str]:
        return self._chance.sample(words, self._chance.randint(least, most))

    # Objects

    def _object(self, depth: int) -> dict[str, Any]:
        style = self._style
        names = self._some(NAMES, *style.num_properties)
        schema: dict[str, Any] = {"type": "object", "properties": {name: self._property(depth + 1) for name in names}}
        if required := [name for name in names if self._is(style.required)]:
            schema["required"] = required
        if self._is(style.closed):
            schema["additionalProperties"] = False
        for rule, share in style.rules.items():
            if rule not in ("base", "nullable") and self._is(share):
                self._add_rule(rule, schema, names, depth)
        if self._is(style.rules.get("base", 0.0)):
            own = {
                "type": "object",
                "properties": {name: self._property(depth + 1) for name in self._some(NAMES, 1, 3)},
            }
            return {"allOf": [self._reference(depth), own]}
        return schema

    def _add_rule(self, rule: str, schema: dict[str, Any], names: list[str], depth: int) -> None:
        one, other = names[0], names[-1]
        match rule:
            case "patterns":
                schema["patternProperties"] = {self._chance.choice(NAME_PATTERNS): self._property(depth + 1)}
            case "condition":
                values = self._some(WORDS, 2, 4)
                schema["properties"][one] = {"type": "string", "enum": values}
                schema["if"] = {"properties": {one: {"const": values[0]}}, "required": [one]}
                schema["then"] = {"required": [other]}
            case "not":
                schema["not"] = (
                    {"required": [one, other]} if self._is(0.7) else {"required": [self._chance.choice(NAMES)]}
                )
            case "dependencies":
                schema["dependencies"] = {one: [other]}
            case "least":
                schema["minProperties"] = 1
            case "names":
                schema["propertyNames"] = {"pattern": self._chance.choice(NAME_PATTERNS)}
            case "one_required":
                schema["oneOf"] = [{"required": [one]}, {"required": [other]}]
            case "unevaluated":
                schema["unevaluatedProperties"] = False

    def _reference(self, depth: int) -> dict[str, Any]:
        known = [name for name in self._definitions if name not in self._open]
        if known and self._is(0.6):
            return {"$ref": self._prefix + self._chance.choice(known)}
        name = f"{self._chance.choice(NAMES).title()}{len(self._definitions)}"
        self._open.append(name)
        self._definitions[name] = {}  # a place for references from within
        self._definitions[name] = self._enum() if self._is(0.25) else self._object(max(depth, 1))
        self._open.pop()
        return {"$ref": self._prefix + name}

    # Properties

    def _property(self, depth: int) -> dict[str, Any]:
        kinds = self._style.kinds
        if depth >= self._style.depth:
            kinds = {
                kind: weight for kind, weight in kinds.items() if kind in ("string", "integer", "number", "boolean")
            }
        kind = self._chance.choices(list(kinds), list(kinds.values()))[0]
        schema: dict[str, Any] = getattr(self, f"_{kind}")(depth)
        if self._is(self._style.rules.get("nullable", 0.0)) and "type" in schema:
            schema["nullable"] = True
        if self._is(self._style.described):
            schema["description"] = f"The {self._chance.choice(NAMES)}."
        return schema

    def _string(self, _: int) -> dict[str, Any]:
        style = self._style
        if self._is(style.enum):
            return self._enum()
        schema: dict[str, Any] = {"type": "string"}
        if self._is(style.pattern):
            schema["pattern"] = self._chance.choice(PATTERNS)
        elif self._is(style.format):
            schema["format"] = self._chance.choice(FORMATS)
        elif self._is(style.lengths):
            schema["minLength"] = 1
            if self._is(0.5):
                schema["maxLength"] = self._chance.choice((10, 50, 63, 255))
        return schema

    def _enum(self) -> dict[str, Any]:
        values: list[Any] = list(self._some(WORDS, 2, 8))
        if self._is(0.04):
            values.append(self._chance.choice((None, True, False, 0, 1)))
            return {"enum": values}
        return {"type": "string", "enum": values} if self._is(0.8) else {"enum": values}

    def _const(self, _: int) -> dict[str, Any]:
        value = self._chance.choice((*WORDS[:6], 1, True))
        return {"const": value} if self._is(0.3) or not isinstance(value, str) else {"type": "string", "const": value}

    def _integer(self, _: int) -> dict[str, Any]:
        schema: dict[str, Any] = {"type": "integer"}
        if self._is(self._style.bounds):
            schema["minimum"] = self._chance.choice((0, 0, 1, 1, -1))
            if self._is(0.4):
                schema["maximum"] = self._chance.choice((10, 100, 65535))
        return schema

    def _number(self, _: int) -> dict[str, Any]:
        schema: dict[str, Any] = {"type": "number"}
        if self._is(self._style.bounds):
            schema[self._chance.choice(("minimum", "minimum", "exclusiveMinimum"))] = 0
            if self._is(0.4):
                schema["maximum"] = self._chance.choice((1, 2, 100))
        return schema

    def _boolean(self, _: int) -> dict[str, Any]:
        return {"type": "boolean", "default": self._is(0.5)} if self._is(0.3) else {"type": "boolean"}

    def _array(self, depth: int) -> dict[str, Any]:
        is_tree = self._open and self._is(0.08)
        items = {"$ref": self._prefix + self._open[-1]} if is_tree else self._property(depth + 1)
        schema: dict[str, Any] = {"type": "array", "items": items}
        if self._is(self._style.min_items):
            schema["minItems"] = 1
        if self._is(0.04):
            schema["maxItems"] = self._chance.choice((2, 5, 10))
        if self._is(self._style.unique):
            schema["uniqueItems"] = True
        return schema

    def _ref(self, depth: int) -> dict[str, Any]:
        return self._reference(depth)

    def _map(self, depth: int) -> dict[str, Any]:
        return {"type": "object", "additionalProperties": self._property(depth + 1)}

    def _keyed(self, depth: int) -> dict[str, Any]:
        """Return a record whose names follow a schema, as zod, TypeBox and Pydantic write it."""
        value = self._property(depth + 1)
        if self._style is STYLES["typebox"]:
            return {"type": "object", "patternProperties": {"^(.*)$": value}}
        names = self._enum() if self._is(0.6) else {"pattern": self._chance.choice(NAME_PATTERNS)}
        return {"type": "object", "propertyNames": names, "additionalProperties": value}

    def _tuple(self, depth: int) -> dict[str, Any]:
        items = [self._property(depth + 1) for _ in range(2)]
        if self._style is STYLES["pydantic"]:
            return {"type": "array", "prefixItems": items, "minItems": 2, "maxItems": 2}
        return {"type": "array", "items": items, "additionalItems": False, "minItems": 2, "maxItems": 2}

    def _nullable(self, _: int) -> dict[str, Any]:
        return {"type": [self._chance.choice(("string", "integer", "number", "boolean")), "null"]}

    def _optional(self, depth: int) -> dict[str, Any]:
        return {"anyOf": [self._property(depth + 1), {"type": "null"}], "default": None}

    def _decimal(self, _: int) -> dict[str, Any]:
        return {"anyOf": [{"type": "number"}, {"type": "string", "pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"}]}

    def _quantity(self, _: int) -> dict[str, Any]:
        plain = [{"type": "integer"}, {"type": "string"}]
        return {"anyOf": plain, "x-kubernetes-int-or-string": True} | (
            {"pattern": PATTERNS[10]} if self._is(0.5) else {}
        )

    def _union(self, depth: int) -> dict[str, Any]:
        """Return a choice: a value or a list of these, kinds of values, or constants."""
        one = self._property(depth + 1)
        key = "oneOf" if self._is(0.34) else "anyOf"
        if self._is(self._style.overlap):
            return {
                "oneOf": [{"type": "string"}, self._string(depth)] if self._is(0.5) else [one, self._object(depth + 1)]
            }
        if self._is(0.2):
            return {"anyOf": [{"type": "string", "const": word} for word in self._some(WORDS, 2, 5)]}
        kinds = [{"type": "boolean"}, {"type": "string"}, self._object(depth + 1)]
        return {key: self._chance.sample(kinds, 2) if self._is(0.5) else [one, {"type": "array", "items": one}]}

    def _tagged(self, depth: int) -> dict[str, Any]:
        """Return a choice between objects that a constant distinguishes."""
        options = []
        for word in self._some(WORDS, 2, 4):
            option = self._object(depth + 1)
            if "properties" not in option:
                continue
            others = {name: each for name, each in option["properties"].items() if name != "kind"}
            option["properties"] = {"kind": {"type": "string", "const": word}, **others}
            option["required"] = ["kind", *(name for name in option.get("required", []) if name != "kind")]
            options.append(option)
        union: dict[str, Any] = {"anyOf" if self._style is STYLES["zod"] else "oneOf": options or [{"type": "null"}]}
        return union if self._style is STYLES["zod"] else {**union, "discriminator": {"propertyName": "kind"}}
