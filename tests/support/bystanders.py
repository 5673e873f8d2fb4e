"""For tests of bad clients: a bystander whose stream must not change, and the answers to bad requests."""

from __future__ import annotations

import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from quire.runtime.client import AsyncClient
from quire.runtime.common.types import SamplingParams

LONG = SamplingParams(max_tokens=200, temperature=0.8, seed=4, ignore_eos=True)


@asynccontextmanager
async def others_unharmed(real: Any) -> AsyncIterator[None]:
    """Check that a long stream on another connection, which runs during the block, keeps its bytes."""
    async with AsyncClient(real.address) as client:
        wanted = await client.complete("This module provides", LONG)
        stream = client.generate("This module provides", LONG)
        chunks = [await anext(stream)]
        yield
        chunks += [chunk async for chunk in stream]
    assert "".join(chunk.text for chunk in chunks) == wanted.text
    assert tuple(token for chunk in chunks for token in chunk.token_ids) == wanted.token_ids


async def refusals(peer: Any, requests: list[tuple[Any, dict[str, Any]]]) -> list[list[Any]]:
    """Return the only answer to each request, in the order of the requests."""
    answers = {}
    for request_id, (prompt, params) in enumerate(requests):
        peer.send("GENERATE", request_id, prompt, params)
    for _ in requests:
        frame = await peer.receive()
        assert frame, "the connection was closed"
        answers[frame[1]] = frame
    return [answers[request_id] for request_id in range(len(requests))]


def all_errors(answers: list[list[Any]], cases: list[Any], code: str) -> None:
    wrong = [(case, answer) for case, answer in zip(cases, answers, strict=True) if answer[::2][:2] != ["ERROR", code]]
    assert wrong == []
    assert all(answer[3] and answer[4:] in ([], [False]) for answer in answers), "a message, and not retryable"


def framed(payload: bytes) -> bytes:
    return struct.pack(">I", len(payload)) + payload
