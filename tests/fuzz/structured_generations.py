"""Generate under every schema of the suite with random weights, and check each output with another library.

usage: structured_generations.py [--count 10000] [--tokens 120] [--seed 1]

Half as many outputs again are chats that require calls of tools, whose parameters are the schemas of objects.

The model is tiny, with the tokenizer of the bundled one. Some requests have n = 3, some a beam search, and all have
draft tokens. An output that ended with "stop" must be valid JSON that its schema allows, according to jsonschema. One
that ended with "length" must be the beginning of one. Exit status 1 otherwise.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path
from typing import Any

import jsonschema
from llguidance import LLMatcher
from quire import LLM, CompletionOutput, InvalidRequest, SamplingParams, StructuredOutputs, ToolChoice
from quire.runtime.engine.structured.grammars import Grammars, check_structure, grammar_of
from quire.runtime.model import BUNDLED_MODEL, read_spec
from quire.runtime.model.weights.tensors import expected_tensors
from quire.runtime.tools.bench.checkpoint import write_safetensors

ROOT = Path(__file__).parents[2]

SCHEMAS: list[list[Any]] = json.loads((ROOT / "tests" / "data" / "json_schemas.json").read_text())
BATCH = 200  # prompts of one call
MAX_TOOL_CHARACTERS = 1500  # characters of a schema: the model's context is short
SHAPE = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2}
SHAPE |= {"num_key_value_heads": 1, "head_dim": 32}


def make_model(folder: Path) -> None:
    """Write a model with random weights, and the bundled model's tokenizer."""
    for name in (
        "config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "generation_config.json",
        "chat_template.jinja",
    ):
        shutil.copy(BUNDLED_MODEL / name, folder / name)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | SHAPE))
    with (folder / "model.safetensors").open("wb") as file:
        write_safetensors(file, list(expected_tensors(read_spec(folder))))


def fault(schema: Any, output: CompletionOutput, begins: bool) -> str | None:
    """Return the fault of an output; `begins` is whether the grammar accepts its tokens."""
    if not begins:
        return "the grammar does not accept its tokens"
    return None if output.finish_reason == "length" else json_fault(schema, output.text)


def json_fault(schema: Any, text: str) -> str | None:
    """Return why a text is not JSON that the schema allows, None if it is.

    Numbers are compared exactly: 19.13 is a multiple of 0.01, and the floats nearest to both are not.
    """
    schema = json.loads(json.dumps(schema), parse_float=_exact)
    try:
        validator = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
        validator(schema, format_checker=validator.FORMAT_CHECKER).validate(json.loads(text, parse_float=_exact))
    except ValueError as error:
        return str(error)
    except jsonschema.ValidationError as error:
        is_year_0 = error.validator == "format" and str(error.instance).startswith("0000-")
        return None if is_year_0 else error.message  # Python has no year 0, RFC 3339 has
    return None


def _exact(text: str) -> int | float | Fraction:
    """Return a number as jsonschema compares it exactly, but one with a long exponent as a float."""
    if not 1e-300 < abs(float(text)) < 1e300:
        return float(text)
    number = Fraction(text)
    return int(number) if number.denominator == 1 else number


def required_calls(folder: Path, count: int, num_tokens: int, chance: random.Random) -> tuple[Counter[str], list[str]]:
    """Generate chats that require a call of a tool; return their ends and their faults."""
    objects = [(name, schema) for name, schema, *_ in SCHEMAS if _is_of_objects(schema)]
    outcomes = Counter[str]()
    faults: list[str] = []

    def ask(_: int) -> None:
        offered = {f"tool_{i}": schema for i, (_, schema) in enumerate(chance.sample(objects, 2))}
        tools = [
            {"type": "function", "function": {"name": n, "parameters": offered[n], "strict": True}} for n in offered
        ]
        choice = ToolChoice(needed="required", parallel=chance.random() < 0.5)
        params = SamplingParams(max_tokens=num_tokens, temperature=1.0, seed=chance.getrandbits(32))
        messages = [{"role": "user", "content": str(chance.getrandbits(64))}]
        output = llm.chat(messages, params, tools=tools, tool_choice=choice).outputs[0]
        wrong = None
        if output.finish_reason == "stop":
            wrong = "no call" if not output.tool_calls else "text beside the calls" if output.text else None
            wrong = "several calls" if len(output.tool_calls) > 1 and not choice.parallel else wrong
            for call in output.tool_calls:
                wrong = wrong or json_fault(offered[call.name], call.arguments)
        elif "<tool_call>" in output.text:
            wrong = "markup in the text"
        outcomes["wrong" if wrong else str(output.finish_reason)] += 1
        if wrong:
            faults.append(f"tools: {wrong}: {output.tool_calls!r:.300}")

    with LLM(folder, max_num_seqs=48, tool_call_parser="hermes") as llm, ThreadPoolExecutor(48) as pool:
        list(pool.map(ask, range(count)))
    return outcomes, faults


def _is_of_objects(schema: Any) -> bool:
    if (
        not isinstance(schema, dict)
        or len(json.dumps(schema)) > MAX_TOOL_CHARACTERS
        or schema.get("type", "object") != "object"
    ):
        return False
    try:
        check_structure(StructuredOutputs(json={"type": "object", **schema}))
    except InvalidRequest:
        return False
    return True


def main() -> int:
    """Generate, check and report; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--tokens", type=int, default=120)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    chance = random.Random(args.seed)
    outcomes = Counter[str]()
    faults: list[str] = []
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder))
        grammars = Grammars(Path(folder))
        matchers = {
            name: LLMatcher(grammars.tables.get(), grammar_of(StructuredOutputs(json=schema)), log_level=0)
            for name, schema, *_ in SCHEMAS
        }
        with LLM(folder, max_num_seqs=48, num_speculative_tokens=3) as llm:
            while sum(outcomes.values()) < args.count:
                chosen = [chance.choice(SCHEMAS) for _ in range(BATCH)]
                choices = [{}, {"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.9}, {"temperature": 1.0, "n": 3}]
                choices.append({"beam_width": 3, "n": 3})
                params = [
                    SamplingParams(
                        max_tokens=args.tokens,
                        structured_outputs=StructuredOutputs(json=schema),
                        seed=chance.getrandbits(32),
                        **chance.choice(choices),
                    )
                    for _, schema, *_ in chosen
                ]
                prompts = [tuple(chance.randrange(300) for _ in range(chance.randrange(1, 40))) for _ in chosen]
                for (name, schema, *_), result in zip(chosen, llm.generate(prompts, params), strict=True):
                    for output in result.outputs:
                        tokens = list(output.token_ids)
                        if output.finish_reason == "stop":
                            del tokens[-1]  # the token that ends the output
                        begins = matchers[name].deep_copy().try_consume_tokens(tokens) == len(tokens)
                        wrong = fault(schema, output, begins)
                        outcomes["wrong" if wrong else str(output.finish_reason)] += 1
                        if wrong:
                            faults.append(f"{name}: {wrong}: {output.text[:200]!r}")
                print(dict(outcomes), f"{time.monotonic() - started:.0f} s", flush=True)
        grammars.close()
        called, wrong_calls = required_calls(Path(folder), args.count // 2, args.tokens, chance)
        print("required calls", dict(called), f"{time.monotonic() - started:.0f} s", flush=True)
        faults += wrong_calls
    for text in faults[:40]:
        print(text)
    return 1 if faults else 0


if __name__ == "__main__":
    raise SystemExit(main())
