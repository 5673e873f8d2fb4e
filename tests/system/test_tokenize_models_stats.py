"""TOKENIZE, MODELS and STATS: one answer each, under a request id."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from quire.runtime.client import AsyncClient
from quire.runtime.common.errors import InvalidRequest

Serve = Callable[..., Awaitable[Any]]
Eventually = Callable[[Callable[[], bool]], Awaitable[None]]


@pytest.fixture
async def client(serve: Serve) -> Any:
    return await (await serve(served_model_name="demo")).raw()


async def test_tokenize(client: Any) -> None:
    client.send("TOKENIZE", 1, "hé")
    assert await client.receive() == ["TOKENIZED", 1, [0, 104, 195, 169]]
    client.send("TOKENIZE", 1, "h", False)
    assert await client.receive() == ["TOKENIZED", 1, [104]]


async def test_a_text_that_cannot_be_tokenized_is_an_error(client: Any) -> None:
    client.send("TOKENIZE", 1, "")
    assert await client.receive() == ["ERROR", 1, "INVALID_ARGUMENT", "the text is empty"]


async def test_models(client: Any) -> None:
    client.send("MODELS", 2)
    model = {
        "name": "demo",
        "max_model_len": 100,
        "vocab_size": 256,
        "has_tokenizer": True,
        "has_chat_template": True,
    }
    assert await client.receive() == ["MODELS", 2, [model]]


async def test_stats_are_numbers_of_the_engine(client: Any) -> None:
    client.send("STATS", 3)
    kind, request_id, stats = await client.receive()
    assert (kind, request_id) == ("STATS", 3)
    assert (stats["pages_total"], stats["prefix_hits_tokens"], stats["running"]) == (10, 30, 0)
    assert all(type(value) is int for value in stats.values())


@pytest.mark.parametrize("question", [["TOKENIZE", 1, "x"], ["MODELS", 1], ["STATS", 1]], ids=lambda frame: frame[0])
async def test_a_live_id_is_refused(system: Any, question: list[Any]) -> None:
    client = await system.raw()
    client.send("GENERATE", 1, "hold", {"max_tokens": 9})
    await client.until("TOKENS")
    client.send(*question)
    assert (await client.receive())[:3] == ["ERROR", 1, "ALREADY_EXISTS"]
    client.send("CANCEL", 1)
    assert (await client.receive())[:3] == ["DONE", 1, "cancelled"]


async def test_a_text_counts_as_a_live_request_while_it_is_tokenized(serve: Serve, eventually: Eventually) -> None:
    system = await serve(max_requests_per_connection=1)
    system.engine.submitting.clear()
    client = await system.raw()
    client.send("TOKENIZE", 1, "x")
    client.send("TOKENIZE", 2, "x")
    assert (await client.receive())[:3] == ["ERROR", 2, "RESOURCE_EXHAUSTED"]
    client.send("CANCEL", 1)
    client.send("CREDIT", 1, 5)
    system.engine.submitting.set()
    assert await client.receive() == ["TOKENIZED", 1, [0, 120]]


async def test_the_client_sends_all_three(serving: Callable[..., Any]) -> None:
    async with serving() as real, AsyncClient(real.address) as client:
        ids = await client.tokenize("This module provides")
        assert (await client.complete(ids)).token_ids == (await client.complete("This module provides")).token_ids
        with pytest.raises(InvalidRequest):
            await client.tokenize("x" * 1_000_000)
        (model,) = await client.models()
        assert (model.name, model.vocab_size, model.has_tokenizer) == ("quire", 4096, True)
        assert (await client.stats())["pages_total"] == real.engine.stats().pages_total
