"""Beam search within a grammar: the results of a reference search, and the same bits under any load."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from llguidance import LLMatcher
from quire.runtime.common.types import StructuredOutputs, join_chunks
from quire.runtime.engine import GenerateRequest, LocalEngine
from quire.runtime.engine.structured import grammars
from quire.runtime.engine.structured.grammars import grammar_of

from tests.support.bits import asked, chunks_of, one_by_one, prompt, running, together

GRAMMARS = {
    "regex": StructuredOutputs(regex="[ab]{1,3}(c|dd)"),
    "choice": StructuredOutputs(choice=("positive", "negative", "neutral", "none")),
    "json": StructuredOutputs(json={"type": "array", "items": {"enum": [1, 22, "x"]}, "minItems": 1, "maxItems": 2}),
}


def search_for(grammar: str, width: int, **params: Any) -> GenerateRequest:
    structure = GRAMMARS[grammar]
    params = {"max_tokens": 12, "ignore_eos": False, "logprobs": 0, "n": width, "beam_width": width, **params}
    return asked(prompt(20), structured_outputs=structure, **params)


async def reference(engine: LocalEngine, request: GenerateRequest) -> list[tuple[list[int], float]]:
    """Search with whole contexts and a new matcher for each. Return (tokens, cumulative logprob), best first."""
    start = request.prompt
    params = request.sampling_params
    assert isinstance(start, tuple)
    assert params.structured_outputs is not None
    width = params.beam_width
    ends = engine.info.eos_token_ids
    grammar = grammar_of(params.structured_outputs)
    live: list[tuple[list[int], float]] = [([], 0.0)]
    complete: list[tuple[float, list[int], float]] = []
    for length in range(1, params.max_tokens + 1):
        candidates = []
        for place, (tokens, total) in enumerate(live):
            matcher = LLMatcher(engine.core.grammars.tables.get(), grammar, log_level=0)
            matcher.consume_tokens(tokens)
            bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
            logits = (await engine.logits((*start, *tokens)))[-1].astype(np.float64)
            logprobs = logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
            allowed = sorted(np.flatnonzero(bits).tolist(), key=lambda token: -logprobs[token])[: 2 * width]
            candidates += [(-(total + logprobs[token]), place, token) for token in allowed]
        grown = []
        for rank, (cost, place, token) in enumerate(sorted(candidates)):
            path = [*live[place][0], token]
            if token not in ends:
                grown.append((path, -cost))
            elif rank < width:
                complete.append((-cost / length, path, -cost))
        live = grown[:width]
        complete.sort(key=lambda each: -each[0])
        if not live or (len(complete) >= width and complete[width - 1][0] >= max(t / length for _, t in live)):
            break
    else:
        complete += [(total / params.max_tokens, tokens, total) for tokens, total in live]
        complete.sort(key=lambda each: -each[0])
    return [(tokens, total) for _, tokens, total in complete[: params.n]]


@pytest.mark.parametrize("grammar", GRAMMARS)
@pytest.mark.parametrize("width", [1, 3])
async def test_the_results_are_those_of_a_reference_search(grammar: str, width: int) -> None:
    request = search_for(grammar, width)
    async with running() as engine:
        expected = await reference(engine, request)
        choices = join_chunks(await chunks_of(engine, request))
    found = [(list(choice.token_ids), choice.cumulative_logprob) for choice in choices]
    assert found == [(tokens, pytest.approx(total, rel=1e-4)) for tokens, total in expected]


async def test_the_same_bits_alone_in_a_batch_and_with_late_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    searches = [search_for(grammar, width) for grammar in GRAMMARS for width in (2, 4)]
    others = [asked(prompt(9 + i), structured_outputs=GRAMMARS["regex"], ignore_eos=False, seed=i) for i in range(6)]
    async with running(enable_prefix_caching=False, threads=1) as engine:
        alone = await one_by_one(engine, [*searches, *others])
    async with running() as engine:
        assert await together(engine, [*searches, *others]) == alone
    monkeypatch.setattr(grammars, "WAIT_S", 0.0)
    monkeypatch.setattr(grammars, "WAIT_ALONE_S", 0.0)
    async with running() as engine:
        assert await together(engine, [*searches, *others]) == alone
