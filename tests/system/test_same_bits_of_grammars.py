"""A request with a grammar has the same bits alone, in a batch, with draft tokens, and when its masks come late."""

from __future__ import annotations

import asyncio
from functools import cache
from typing import Any

import pytest
from quire.runtime.common.types import StructuredOutputs
from quire.runtime.engine import LocalEngine
from quire.runtime.engine.facade import SilentObserver, StepStats
from quire.runtime.engine.structured import grammars
from quire.scheduler import speculative

from tests.support.bits import asked, one_by_one, outcome, prompt, running, together
from tests.support.forced_preemption import preempt

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["request", "response"]},
        "size": {"type": "integer", "minimum": 0, "maximum": 9999},
        "names": {"type": "array", "items": {"type": "string", "maxLength": 8}, "maxItems": 2},
    },
    "required": ["kind", "size", "names"],
    "additionalProperties": False,
}
GRAMMARS = {
    "json": StructuredOutputs(json=SCHEMA),
    "words": StructuredOutputs(json={"type": "string", "maxLength": 300, "pattern": r"^(?:\S+\s+){0,49}\S+$"}),
    "any object": StructuredOutputs(json_object=True),
    "regex": StructuredOutputs(regex=r"[A-Z][a-z]{2,9} [0-9]{4}-[0-9]{2}(, (yes|no)){1,3}"),
    "choice": StructuredOutputs(choice=("positive", "negative", "neither of both")),
    "lark": StructuredOutputs(lark='start: item ("," item)* "."\nitem: /[a-z]+/ "=" /[0-9]+/'),
    "gbnf": StructuredOutputs(gbnf='root ::= "(" root ")" | [a-f]+'),
}
SAMPLINGS: list[dict[str, Any]] = [{}, {"temperature": 1.0, "seed": 5}, {"temperature": 0.7, "top_p": 0.9, "seed": 6}]


def requests(**params: Any) -> list[Any]:
    return [
        asked(prompt(7 + 9 * index), ignore_eos=False, structured_outputs=grammar, **{**sampling, **params})
        for index, (grammar, sampling) in enumerate((g, s) for g in GRAMMARS.values() for s in SAMPLINGS)
    ]


@cache
def alone() -> list[list[str]]:
    """Return the outcome of each request, computed alone, without draft tokens."""

    async def run() -> list[list[str]]:
        async with running(enable_prefix_caching=False, threads=1) as engine:
            return await one_by_one(engine, requests())

    with pytest.MonkeyPatch.context() as patch:
        for name in ("MARGIN", "FORCED_MARGIN"):
            patch.setattr(speculative, name, float("inf"))
        return asyncio.run(run())


async def expected() -> list[list[str]]:
    return await asyncio.to_thread(alone)


async def test_in_a_batch_beside_plain_requests() -> None:
    plain = [asked(prompt(30 + i), temperature=1.0, seed=i) for i in range(14)]
    async with running() as engine:
        plain_alone = await one_by_one(engine, plain)
        seen = await together(engine, [*requests(), *plain])
    assert seen == [*await expected(), *plain_alone]


@pytest.mark.parametrize("num_speculative_tokens", [0, 5])
async def test_with_draft_tokens(num_speculative_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MARGIN", "FORCED_MARGIN"):
        monkeypatch.setattr(speculative, name, 0.0)
    monkeypatch.setattr(grammars, "WAIT_S", 10.0)  # busy machines: masks that come late leave out forced tokens
    async with running(num_speculative_tokens=num_speculative_tokens) as engine:
        assert await together(engine, requests()) == await expected()
        assert engine.stats().accepted_draft_tokens > 10, "forced tokens are draft tokens"


async def test_when_most_masks_come_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """A deferred sample is computed again, in prefill and in decode, while other requests continue."""
    monkeypatch.setattr(grammars, "WAIT_S", 0.0)
    monkeypatch.setattr(grammars, "WAIT_ALONE_S", 0.0)
    plain = asked(prompt(30), max_tokens=200)
    async with running() as engine:
        plain_alone = await outcome(engine, plain)
        seen = await together(engine, [*requests(), plain])
    assert seen == [*await expected(), plain_alone]


class Preemptor(SilentObserver):
    """Observer that preempts every request once, each after another number of steps, or when it runs first."""

    def __init__(self, engine: LocalEngine) -> None:
        self.engine = engine
        self.num_steps = 0
        self.preempted: set[int] = set()

    def on_step(self, step: StepStats) -> None:
        self.num_steps += 1
        due = set(range(self.num_steps // 3 + 1)) - self.preempted
        self.preempted |= {request_id for request_id in due if preempt(self.engine.core.scheduler, request_id)}


@pytest.mark.parametrize("chunk", [1, 50])
async def test_after_preemption_and_in_small_chunks(chunk: int) -> None:
    async with running(chunk) as engine:
        engine.set_observer(Preemptor(engine))
        assert await together(engine, requests()) == await expected()
        assert engine.stats().preemptions > 5


async def test_samples_of_one_request() -> None:
    grammar = GRAMMARS["json"]
    params: dict[str, Any] = {"ignore_eos": False, "structured_outputs": grammar, "temperature": 1.0, "max_tokens": 40}
    async with running() as engine:
        alone = [await outcome(engine, asked(prompt(40), seed=9 + i, **params)) for i in range(4)]
        together = await outcome(engine, asked(prompt(40), seed=9, n=4, **params))
    assert together[:-1] == [each[0] for each in alone]
