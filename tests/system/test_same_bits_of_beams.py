"""Beam search equals, to the last bit, a reference search that sends one request per prefix."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from quire.kernels import supported_levels
from quire.runtime.common.types import join_chunks
from quire.runtime.engine import GenerateRequest, LocalEngine
from quire.runtime.engine.facade import SilentObserver, StepStats
from safetensors.numpy import load_file, save_file

from tests.support.bits import asked, chunks_of, outcome, prompt, running, together

LEVELS = supported_levels()
Found = tuple[tuple[int, ...], tuple[str, ...], str, str]  # tokens, their logprobs and the sum in hex, reason


async def top_logprobs(engine: LocalEngine, ids: tuple[int, ...], count: int) -> tuple[tuple[int, float], ...]:
    (chunk,) = await chunks_of(engine, asked(ids, max_tokens=1, logprobs=count))
    assert chunk.logprobs is not None
    return chunk.logprobs[0].top


async def search(engine: LocalEngine, request: GenerateRequest) -> list[Found]:
    """Search with one request per prefix and return the hypotheses, best first."""
    start = request.prompt
    params = request.sampling_params
    assert isinstance(start, tuple)
    width = params.beam_width
    live: list[tuple[tuple[int, ...], tuple[float, ...], float]] = [((), (), 0.0)]
    complete: list[tuple[float, Found]] = []

    def score(total: float, length: int) -> float:
        return total / float(length**params.length_penalty)

    def finish(ids: tuple[int, ...], logprobs: tuple[float, ...], total: float, reason: str) -> None:
        found = (ids, tuple(value.hex() for value in logprobs), total.hex(), reason)
        complete.append((score(total, len(ids)), found))

    for length in range(1, params.max_tokens + 1):
        tops = await asyncio.gather(*(top_logprobs(engine, (*start, *ids), 2 * width) for ids, _, _ in live))
        candidates = sorted(
            (-(total + logprob), place, token, logprob)
            for place, ((_, _, total), top) in enumerate(zip(live, tops, strict=True))
            for token, logprob in top
        )
        grown = []
        for rank, (negative, place, token, logprob) in enumerate(candidates):
            ids, logprobs, _ = live[place]
            path = ((*ids, token), (*logprobs, logprob), -negative)
            if token not in params.stop_token_ids or length < params.min_tokens:
                grown.append(path)
            elif rank < width:
                finish(*path, "stop")
        live = grown[:width]
        complete.sort(key=lambda each: -each[0])
        if len(complete) >= width and complete[params.n - 1][0] >= max(score(t, length) for _, _, t in live):
            break
    else:
        for path in live:
            finish(*path, "length")
    complete.sort(key=lambda each: -each[0])
    return [found for _, found in complete[: params.n]]


async def found(engine: LocalEngine, request: GenerateRequest) -> list[Found]:
    choices = join_chunks(await chunks_of(engine, request))
    assert all(choice.logprobs is not None and choice.cumulative_logprob is not None for choice in choices)
    return [
        (
            choice.token_ids,
            tuple(entry.logprob.hex() for entry in choice.logprobs or ()),
            (choice.cumulative_logprob or 0.0).hex(),
            choice.finish_reason,
        )
        for choice in choices
    ]


def searching(length: int, width: int, n: int | None = None, **params: Any) -> GenerateRequest:
    return asked(prompt(length), **{"max_tokens": 8, "logprobs": 0, **params}, beam_width=width, n=n or width)


async def requests_with_stops(engine: LocalEngine) -> list[GenerateRequest]:
    """Return searches of several widths: some run to the full length, some meet a stop token."""
    requests = [searching(33, 1), searching(64, 3), searching(1, 4, n=2), searching(95, 2, max_tokens=6)]
    for length, width in ((33, 3), (20, 4)):
        best = (await found(engine, searching(length, width)))[0][0]
        for position, penalty, min_tokens in ((1, 1.0, 0), (2, 0.0, 0), (3, 2.0, 2), (1, -1.0, 4)):
            stops = {"stop_token_ids": tuple({best[position], best[0]}), "min_tokens": min_tokens}
            requests.append(searching(length, width, length_penalty=penalty, **stops))
    return requests


@pytest.mark.parametrize(
    "settings",
    [{"isa": isa, "weights": "f32", "kv_cache_dtype": "f32"} for isa in LEVELS if isa != "scalar"]
    + [{}, {"weights": "q8"}, {"weights": "q8", "kv_cache_dtype": "int8"}, {"weights": "q4"}],
    ids=str,
)
async def test_alone_and_together_with_others(settings: dict[str, Any]) -> None:
    async with running(**settings) as engine:
        requests = await requests_with_stops(engine)
        wanted = [await search(engine, request) for request in requests]
        assert {reason for each in wanted for _, _, _, reason in each} == {"stop", "length"}
        assert [await found(engine, request) for request in requests] == wanted
        others = together(engine, [asked(prompt(40 + i), temperature=1.0, seed=i) for i in range(5)])
        seen, _ = await asyncio.gather(asyncio.gather(*(found(engine, request) for request in requests)), others)
    assert seen == wanted


async def test_preemption_when_pages_run_out() -> None:
    """Beam searches keep their pages and other requests are preempted; a search that does not fit waits."""
    requests = [searching(length, 3, max_tokens=40) for length in (20, 40, 60)]
    greedy = [asked(prompt(n), max_tokens=60) for n in (25, 30)]
    async with running(enable_prefix_caching=False) as engine:
        wanted = [await found(engine, request) for request in requests]
        others = [await outcome(engine, request) for request in greedy]
        page_bytes = engine.core.runner.capacity.layout.page_bytes
    async with running(kv_cache_memory=18 * page_bytes, max_num_seqs=5) as engine:
        greedy_seen = together(engine, greedy)
        seen = asyncio.gather(*(found(engine, request) for request in requests))
        assert await asyncio.gather(greedy_seen, seen) == [others, wanted]


@pytest.mark.parametrize("layers", ["...", "s.s.ss"])
async def test_ties_and_windows(hybrid_folder: Callable[[str], Path], layers: str) -> None:
    """Pairs of tokens have equal logits: the earlier hypothesis ranks first, then the lower token id."""
    folder = hybrid_folder(layers)
    tensors = load_file(folder / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name][1:306:2] = tensors[name][0:306:2]
    save_file(tensors, folder / "model.safetensors")
    requests = [searching(length, width, max_tokens=9) for length, width in ((60, 4), (96, 3), (158, 5), (190, 2))]
    async with running(model=str(folder)) as engine:
        wanted = [await search(engine, request) for request in requests]
        assert all(len({total for _, _, total, _ in each}) < len(each) for each in wanted), "no ties"
        assert [await found(engine, request) for request in requests] == wanted
        assert await asyncio.gather(*(found(engine, request) for request in requests)) == wanted


class Canceller(SilentObserver):
    """Observer that cancels a stream after `steps` steps."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.stream = None

    def on_step(self, step: StepStats) -> None:
        self.steps -= 1
        if self.steps == 0:
            self.stream.cancel()  # type: ignore[attr-defined]


@pytest.mark.parametrize("steps", [1, 2, 3, 9])
async def test_cancelled_while_it_runs(steps: int) -> None:
    """The pages of all hypotheses return to the pool, and the other request keeps its bits."""
    other = asked(prompt(50), temperature=1.0, seed=1, max_tokens=30)
    async with running() as engine:
        wanted = await outcome(engine, other)
    async with running(max_num_batched_tokens=64) as engine:
        canceller = Canceller(steps)
        engine.set_observer(canceller)
        canceller.stream = await engine.submit(searching(100, 4, max_tokens=500))  # type: ignore[assignment]
        seen = await outcome(engine, other)
        choices = join_chunks([chunk async for chunk in canceller.stream])  # type: ignore[attr-defined]
    assert seen == wanted
    assert [choice.finish_reason for choice in choices] == ["cancelled"] * 4
