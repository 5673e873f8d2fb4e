"""Structured output through a server: what matches, what is refused, and what survives a crash."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from quire import AsyncClient, SamplingParams, StructuredOutputs
from quire.runtime.common.errors import InvalidRequest
from quire.runtime.common.types import OutputChunk
from quire.runtime.engine.structured.grammars import Grammars
from quire.runtime.model import BUNDLED_MODEL

from tests.support.bits import asked, bits, chunks_of, one_by_one, prompt, running, together
from tests.system.test_survival import engine_pool

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "maximum": 999, "minimum": 0}, "b": {"enum": ["x", "y"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


def params(max_tokens: int = 60, **structure: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, structured_outputs=StructuredOutputs(**structure))


async def test_every_kind_of_grammar_through_a_socket(serving: Any) -> None:
    async with serving() as real, AsyncClient(real.address) as client:

        async def text(**structure: Any) -> str:
            output = await client.complete("The", params(**structure))
            assert output.finish_reason == "stop"
            return output.text

        for schema in (SCHEMA, json.dumps(SCHEMA)):
            parsed = json.loads(await text(json=schema))
            assert isinstance(parsed["a"], int)
            assert parsed["b"] in ("x", "y")
        assert re.fullmatch("[ab]{2}-7", await text(regex="[ab]{2}-7"))
        assert await text(choice=("naïve “choice”", "other")) in ("naïve “choice”", "other")
        assert re.fullmatch("x[0-9]{1,3}y", await text(lark='start: "x" /[0-9]{1,3}/ "y"'))
        assert re.fullmatch(r"<[a-c]{2}>", await text(gbnf='root ::= "<" [a-c] [a-c] ">"'))
        assert json.loads(await text(json={"type": "array", "items": {"type": "boolean"}, "maxItems": 2})) is not None


async def test_a_schema_may_nest_deeper_than_a_frame(serving: Any) -> None:
    schema: dict[str, Any] = {"const": 7}
    for _ in range(20):
        schema = {"type": "array", "items": schema, "minItems": 1, "maxItems": 1}
    async with serving() as real, AsyncClient(real.address) as client:
        value = json.loads((await client.complete("The", params(400, json=schema))).text)
    assert str(value) == "[" * 20 + "7" + "]" * 20


@pytest.mark.parametrize("schema", [{"enum": [float("nan")]}, {"const": {1, 2}}, {"items": None}], ids=str)
def test_a_schema_that_is_not_json_is_refused(schema: Any) -> None:
    if "items" in schema:
        schema["items"] = schema
    with pytest.raises(InvalidRequest, match="the schema is not JSON"):
        StructuredOutputs(json=schema)


@pytest.mark.parametrize(
    ("structure", "message"),
    [
        ({"json": {"not": {"multipleOf": 2}}}, 'keywords of a JSON schema cannot be enforced: "not"'),
        ({"json": "{"}, "structured_outputs: "),
        ({"json": "[]"}, "a JSON schema is an object, true or false, not list"),
        ({"regex": "(a"}, "unclosed group"),
        ({"lark": "start: missing"}, 'unknown name: "missing"'),
        ({"gbnf": "root ::= ("}, "structured_outputs: "),
        ({"regex": "a" * 300_000}, "at most 262144 are allowed"),
        ({"json": {"enum": [f"value {i}" for i in range(8000)], "minLength": 3}}, "schema too large"),
        ({"json": {"enum": [f"value {i}" for i in range(8000)]}}, None),
    ],
    ids=lambda value: str(value)[:40],
)
async def test_a_grammar_that_cannot_be_used_is_refused(serving: Any, structure: Any, message: str | None) -> None:
    async with serving() as real, AsyncClient(real.address) as client:
        if message is None:
            assert (await client.complete("The", params(**structure))).text
        else:
            with pytest.raises(InvalidRequest, match=re.escape(message)):
                await client.complete("The", params(**structure))
        assert (await client.complete("The", SamplingParams(max_tokens=3))).text, "the server goes on"


async def test_a_limit_that_trips_ends_the_request_with_an_error(serving: Any) -> None:
    """Never with another continuation: llguidance itself would allow the end of the output only."""
    async with serving() as real, AsyncClient(real.address) as client:
        with pytest.raises(InvalidRequest, match=r"^structured_outputs: .*"):
            await client.complete("The", params(300, regex="((a{1,999}){1,999}){1,999}"))
        assert (await client.complete("The", SamplingParams(max_tokens=3))).text, "the server goes on"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "exactly one of json, json_object, regex, choice, lark, gbnf, not none"),
        ({"regex": "a", "choice": ("b",)}, "not regex and choice"),
        ({"regex": ""}, "regex must not be empty"),
        ({"choice": ()}, "choice must not be empty"),
    ],
)
def test_exactly_one_field_is_given(fields: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        StructuredOutputs(**fields)


@pytest.mark.parametrize("other", [{"min_tokens": 3}, {"ignore_eos": True}])
async def test_what_contradicts_a_grammar_is_refused(serving: Any, other: Any) -> None:
    async with serving() as real, AsyncClient(real.address) as client:
        with pytest.raises(InvalidRequest, match=f"{next(iter(other))}.*structured_outputs"):
            await client.complete("The", SamplingParams(structured_outputs=StructuredOutputs(regex="a"), **other))


def write_padded_model(folder: Path, num_rows: int) -> Path:
    """Write the bundled model with more rows of embeddings, which are its output layer too, than it has tokens.

    The additional rows have eight times the values of other rows, so that their logits are often the largest.
    """
    for file in BUNDLED_MODEL.glob("*.*"):
        (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_bytes())
    config["vocab_size"] += num_rows
    (folder / "config.json").write_text(json.dumps(config))
    data = (folder / "model.safetensors").read_bytes()
    start = 8 + struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:start])
    parts = []
    size = 0
    for name, tensor in header.items():
        if name == "__metadata__":
            continue
        begin, end = tensor["data_offsets"]
        part = data[start + begin : start + end]
        if name == "model.embed_tokens.weight":
            rows = np.frombuffer(part, np.uint16).reshape(tensor["shape"])  # bf16
            part += (rows[100 : 100 + num_rows] + (3 << 7)).tobytes()  # three more in the exponent
            tensor["shape"][0] += num_rows
        tensor["data_offsets"] = [size, size + len(part)]
        parts.append(part)
        size += len(part)
    encoded = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(encoded)) + encoded + b"".join(parts))
    return folder


async def test_a_model_with_more_rows_of_embeddings_than_tokens_generates_its_tokens_only(tmp_path: Path) -> None:
    requests = [
        asked(
            "The",
            ignore_eos=False,
            max_tokens=80,
            logprobs=None,
            structured_outputs=StructuredOutputs(**structure),
            **sampling,
        )
        for structure in ({"json": SCHEMA}, {"regex": "[ab]{2}-7"}, {"regex": "(.|\\n){9}"})
        for sampling in ({}, {"temperature": 1.0, "seed": 1})
    ]
    async with running() as engine:
        expected = await one_by_one(engine, requests)
    async with running(model=str(write_padded_model(tmp_path, 100))) as engine:
        without = await engine.submit(asked("The", max_tokens=8))
        assert max([token_id async for chunk in without for token_id in chunk.token_ids]) >= 4096
        assert await together(engine, requests) == expected
    assert re.fullmatch(r'\s*\{\s*"a"\s*:\s*\d+\s*,\s*"b"\s*:\s*"[xy]"\s*\}', json.loads(expected[0][0])["text"])


@pytest.mark.parametrize(
    "structure",
    [
        StructuredOutputs(regex=r"\[([a-z]{3,9},){60}\]"),
        StructuredOutputs(json={"type": "string", "maxLength": 600, "pattern": r"^(?:\S+\s+){0,60}\S+$"}),
    ],
    ids=["letters", "limit of words"],
)
async def test_a_killed_process_is_replaced_and_the_output_goes_on(
    slow_engine: None, forked_engines: None, structure: StructuredOutputs
) -> None:
    request = asked(
        prompt(20),
        ignore_eos=False,
        max_tokens=300,
        temperature=1.0,
        seed=3,
        structured_outputs=structure,
    )
    async with engine_pool() as engine:
        alone = bits(await chunks_of(engine, request))
        chunks: list[OutputChunk] = []
        kills: list[int] = []
        async for chunk in await engine.submit(request):
            chunks.append(chunk)
            pid = engine.core.members[0].pid
            if len(kills) < 2 and len(chunks) >= 5 and pid not in (None, *kills):
                os.kill(pid, signal.SIGKILL)
                kills.append(pid)
        assert bits(chunks) == alone
        assert len(kills) == 2


async def test_a_grammar_that_takes_long_to_compile_delays_nobody(
    serving: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While one request's grammar is compiled, other streams continue."""
    go = asyncio.Event()
    loop = asyncio.get_running_loop()
    compile_it = Grammars._compile

    def slow(self: Grammars, running: Any) -> Any:
        asyncio.run_coroutine_threadsafe(go.wait(), loop).result()
        return compile_it(self, running)

    monkeypatch.setattr(Grammars, "_compile", slow)
    async with serving() as real, AsyncClient(real.address) as client:
        constrained = asyncio.create_task(client.complete("The", params(regex="[ab]{3}")))
        assert len((await client.complete("The", SamplingParams(max_tokens=50, ignore_eos=True))).token_ids) == 50
        assert not constrained.done()
        go.set()
        assert re.fullmatch("[ab]{3}", (await constrained).text)
