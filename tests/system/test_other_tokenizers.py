"""Models with other tokenizers than the bundled one: text continues the prompt; a panic ends its request only."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest
from quire import AsyncClient, GenerationFailed, SamplingParams

from tests.support.changed_tokenizers import CHANGES, model_with
from tests.support.http_client import HTTPClient

Serving = Callable[..., AbstractAsyncContextManager[Any]]
COMPLETIONS = "/v1/completions"
YES = "352"  # the id of "▁yes"
BODY = {"prompt": "yes", "temperature": 0, "max_tokens": 3, "logit_bias": {YES: 100}}


@pytest.fixture
async def real(serving: Serving, tmp_path: Path) -> AsyncIterator[Any]:
    async with serving(model=model_with(CHANGES["Llama 2"], tmp_path, weights=True)) as real:
        yield real


async def ask(system: Any, path: str, body: object, **headers: str) -> Any:
    client = await HTTPClient.open(system.server.openai_address)
    try:
        return (await client.ask("POST", path, body, headers)).json
    finally:
        client.writer.transport.abort()


async def test_text_goes_on_after_the_prompt(real: Any) -> None:
    assert (await ask(real, "/tokenize", {"prompt": "yes"}))["tokens"] == [int(YES)]
    for fields, expected in (
        ({}, [" yes yes yes"]),
        ({"echo": True}, ["yes yes yes yes"]),
        ({"echo": True, "max_tokens": 0, "prompt": "yes yes"}, ["yes yes"]),
        ({"stop": " yes"}, [""]),
        ({"stop": " yes", "include_stop_str_in_output": True}, [" yes"]),
        ({"n": 2, "best_of": 3}, [" yes yes yes"] * 2),
        ({"prompt": [1 + ord("y")]}, [" yes yes yes"]),
        ({"prompt": [0]}, ["yes yes yes"]),  # a special token has no text
    ):
        found = await ask(real, COMPLETIONS, {**BODY, **fields})
        assert [each["text"] for each in found["choices"]] == expected, fields
    for prompt in ("yes", [0]):
        chosen = {"prompt": prompt, "max_tokens": 9, "structured_outputs": {"choice": [" yes"]}}
        assert (await ask(real, COMPLETIONS, chosen))["choices"][0]["text"] == " yes"


async def test_special_tokens_are_shown_on_request(real: Any) -> None:
    for fields, expected in (
        ({}, "yes yes"),
        ({"skip_special_tokens": True}, "yes yes"),
        ({"skip_special_tokens": False}, "<|endoftext|> yes yes<|endoftext|>"),
    ):
        assert (await ask(real, "/detokenize", {"tokens": [0, int(YES), int(YES), 0], **fields}))["prompt"] == expected
    refused = await ask(real, "/detokenize", {"tokens": [0], "skip_special_tokens": "no"})
    assert refused["error"]["param"] == "skip_special_tokens"


async def test_offsets_are_those_of_the_text(real: Any) -> None:
    for fields, text, offsets in (
        ({"logprobs": 0}, " yes yes yes", [0, 4, 8]),
        ({"logprobs": 0, "prompt": [0]}, "yes yes yes", [0, 3, 7]),
        ({"logprobs": 0, "echo": True, "prompt": [int(YES)]}, "yes yes yes yes", [0, 3, 7, 11]),
        ({"logprobs": 0, "echo": True, "prompt": [0, int(YES)]}, "yes yes yes yes", [0, 0, 3, 7, 11]),
    ):
        (choice,) = (await ask(real, COMPLETIONS, {**BODY, **fields}))["choices"]
        assert (choice["text"], choice["logprobs"]["text_offset"]) == (text, offsets), fields


async def test_offsets_of_a_kept_completion_are_those_of_its_text(real: Any) -> None:
    for prompt, text, offsets in ("yes", " yes yes yes", [0, 4, 8]), ([0], "yes yes yes", [0, 3, 7]):
        for _ in range(2):  # the answer, and its replay
            body = {**BODY, "logprobs": 0, "prompt": prompt}
            (choice,) = (await ask(real, COMPLETIONS, body, Idempotency_Key=f"offsets {prompt}"))["choices"]
            assert (choice["text"], choice["logprobs"]["text_offset"]) == (text, offsets)


async def test_the_prompt_and_its_logprobs_take_no_text_from_the_output(real: Any) -> None:
    for prompt, expected in (([int(YES), int(YES)], " yes yes yes"), ([0, int(YES)], " yes yes yes")):
        (choice,) = (await ask(real, COMPLETIONS, {**BODY, "prompt": prompt, "prompt_logprobs": 0}))["choices"]
        assert choice["text"] == expected
        assert len(choice["prompt_logprobs"]) == 2


async def test_a_schema_is_followed(real: Any) -> None:
    answer = {"type": "object", "properties": {"yes": {"enum": ["no"]}}, "required": ["yes"]}
    schema = {"name": "a", "schema": answer | {"additionalProperties": False}}
    body = {"messages": [{"role": "user", "content": "yes"}], "max_tokens": 200, "seed": 1, "temperature": 1}
    form = {"type": "json_schema", "json_schema": schema}
    found = await ask(real, "/v1/chat/completions", {**body, "response_format": form})
    text = found["choices"][0]["message"]["content"]
    assert re.match(r'\s*\{\s*("yes"\s*(:\s*("no"\s*\}?)?)?)?', text), text


def endless(content: dict[str, Any]) -> None:
    """Split texts by an expression that tries more ways than the library allows: it panics."""
    split = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    content["pre_tokenizer"]["use_regex"] = False
    content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, content["pre_tokenizer"]]}


async def test_a_panic_of_the_tokenizer_ends_its_request_only(serving: Serving, tmp_path: Path) -> None:
    async with serving(model=model_with(endless, tmp_path, weights=True)) as real:
        bad = "a" * 40 + "!"
        message = "the text could not be tokenized: Onig: Regex search error: retry-limit-in-match over"
        assert (await ask(real, COMPLETIONS, {"prompt": bad}))["error"]["message"] == message
        async with AsyncClient(real.server.address) as client:
            with pytest.raises(GenerationFailed, match="could not be tokenized: Onig"):
                await anext(aiter(client.generate(bad, SamplingParams(max_tokens=2))))
            assert [chunk async for chunk in client.generate("return", SamplingParams(max_tokens=2))]
