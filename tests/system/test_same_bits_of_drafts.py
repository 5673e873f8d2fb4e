"""Draft tokens do not change a request's bits, whether they are accepted or rejected and however many there are.

Prompt lookup drafts only in text that repeats itself. `OracleDrafter` replays recorded outputs and so drafts for every
text: every sampling parameter is verified on rows with draft tokens.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from quire.kernels import supported_levels
from quire.runtime.common.types import join_chunks
from quire.runtime.engine import GenerateRequest, LocalEngine
from quire.runtime.model import kv_layout, read_spec
from quire.runtime.model.weights import packing
from quire.scheduler import speculative
from quire.scheduler.drafters import NGramIndex
from safetensors.numpy import load_file, save_file

from tests.support.bits import EVERYTHING, asked, bits, chunks_of, one_by_one, prompt, running, together

LEVELS = supported_levels()
DTYPES = [("f32", "f32"), ("bf16", "bf16"), ("q8", "bf16"), ("q8", "int8"), ("q4", "int8")]
COMBINATIONS = [(isa, DTYPES[0]) for isa in LEVELS[1:-1]] + [(LEVELS[-1], dtypes) for dtypes in DTYPES]
NAMES = ("greedy", "sampled", "repetition", "presence", "frequency", "bias", "min_p")
REPEATING = "x = x + 1\nx = x + 1\nx ="
REQUESTS = [asked(prompt(20 + 9 * i), **params) for i, params in enumerate(EVERYTHING.values())]
STOPS: list[dict[str, Any]] = [
    {"stop": ("x + 1\n",)},
    {"stop": ("1\nx =", "never"), "include_stop_str_in_output": True},
    {"stop": ("= x",), "min_tokens": 7},
    {"stop": (" ",), "temperature": 0.7, "seed": 2},
]


class OracleDrafter:
    """Drafter that replays recorded outputs, with a wrong token at `error_rate`."""

    def __init__(self, error_rate: float) -> None:
        self.recorded: list[tuple[int, ...]] = []
        self._chance = random.Random(1)
        self._error_rate = error_rate

    def draft(self, tokens: Sequence[int], most: int) -> list[int]:
        known = tuple(tokens)
        for recorded in self.recorded:
            if recorded[: len(known)] == known:
                coming = [*recorded[len(known) :], *known][:most]  # known tokens and tokens past the end
                return [max(t, 1) - 1 if self._chance.random() < self._error_rate else t for t in coming]
        return list(known[-most:])

    async def record(self, engine: LocalEngine, requests: Sequence[GenerateRequest]) -> list[list[str]]:
        """Run each request alone without draft tokens, record its outputs and return the outcomes."""
        outcomes = []
        for request in requests:
            assert isinstance(request.prompt, tuple)
            chunks = await chunks_of(engine, request)
            outcomes.append(bits(chunks))
            self.recorded += [(*request.prompt, *choice.token_ids) for choice in join_chunks(chunks)]
        return outcomes


@pytest.fixture(autouse=True)
def every_draft_is_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    """Verify also drafts that are predicted to cost more time than they save."""
    monkeypatch.setattr(speculative, "MARGIN", 0.0)


@pytest.fixture
def drafter(monkeypatch: pytest.MonkeyPatch) -> OracleDrafter:
    drafter = OracleDrafter(error_rate=0.15)
    monkeypatch.setattr(NGramIndex, "draft", lambda index, tokens, most: drafter.draft(tokens, most))
    return drafter


def check_acceptance(engine: LocalEngine, least: int) -> None:
    """Check that at least `least` draft tokens were accepted and at least one was rejected."""
    stats = engine.stats()
    assert least <= stats.accepted_draft_tokens < stats.draft_tokens


@pytest.mark.parametrize(("isa", "dtypes"), COMBINATIONS)
async def test_alone_together_and_after_a_prefix_hit(drafter: OracleDrafter, isa: str, dtypes: tuple[str, str]) -> None:
    weights, kv = dtypes
    settings: dict[str, Any] = {"weights": weights, "kv_cache_dtype": kv, "isa": isa}
    async with running(**settings, enable_prefix_caching=False, threads=1) as engine:
        wanted = await drafter.record(engine, REQUESTS)
    async with running(**settings, num_speculative_tokens=5) as engine:
        assert await together(engine, REQUESTS) == wanted
        check_acceptance(engine, least=40)
        hits = engine.stats().prefix_hits_tokens
        assert await one_by_one(engine, REQUESTS) == wanted
        assert engine.stats().prefix_hits_tokens > hits


@pytest.mark.parametrize("count", [1, 16])
async def test_any_number_of_draft_tokens(drafter: OracleDrafter, count: int) -> None:
    async with running() as engine:
        wanted = await drafter.record(engine, REQUESTS)
    async with running(num_speculative_tokens=count, max_num_seqs=8, max_num_batched_tokens=16) as engine:
        assert await together(engine, REQUESTS) == wanted
        check_acceptance(engine, least=10)


async def test_draft_tokens_do_not_exceed_max_tokens(drafter: OracleDrafter) -> None:
    def requests(max_tokens: int) -> list[GenerateRequest]:
        sampling: tuple[dict[str, Any], ...] = ({}, {"temperature": 1.0, "seed": 1})
        return [asked(prompt(30), max_tokens=max_tokens, **params) for params in sampling]

    short = [request for max_tokens in range(1, 9) for request in requests(max_tokens)]
    async with running() as engine:
        await drafter.record(engine, requests(12))
        wanted = await one_by_one(engine, short)
    async with running(num_speculative_tokens=4) as engine:
        assert await one_by_one(engine, short) == wanted
        check_acceptance(engine, least=10)


async def test_repeating_text_with_stop_strings() -> None:
    """Prompt lookup drafts: stop strings begin or end among the tokens of one step."""
    requests = [asked(REPEATING, **params) for params in (*map(EVERYTHING.__getitem__, NAMES), *STOPS)]
    async with running() as engine:
        wanted = await one_by_one(engine, requests)
        ids = join_chunks(await chunks_of(engine, requests[0]))[0].token_ids
        stopping = [asked(REPEATING, stop_token_ids=(token,), min_tokens=4) for token in set(ids)]
        wanted += await one_by_one(engine, stopping)
    assert sum('"stop"' in each[0] for each in wanted) >= 5
    async with running(num_speculative_tokens=6) as engine:
        assert await one_by_one(engine, [*requests, *stopping]) == wanted
        check_acceptance(engine, least=30)
        assert await together(engine, [*requests, *stopping]) == wanted


async def test_preempted_when_pages_run_out(drafter: OracleDrafter) -> None:
    requests = [asked(prompt(n), **{**EVERYTHING[name], "max_tokens": 80}) for n, name in enumerate(NAMES, 28)]
    async with running() as engine:
        wanted = await drafter.record(engine, requests)
        page_bytes = engine.core.runner.capacity.layout.page_bytes
    async with running(num_speculative_tokens=4, kv_cache_memory=9 * page_bytes) as engine:
        assert await together(engine, requests) == wanted
        assert engine.stats().preemptions > 0
        check_acceptance(engine, least=20)


@pytest.mark.parametrize(("layers", "architecture"), [("s.s.ss", "Qwen2ForCausalLM"), ("ss.s.s.", "Gemma4ForCausalLM")])
async def test_with_sliding_windows(
    drafter: OracleDrafter, hybrid_folder: Callable[[str, str], Path], layers: str, architecture: str
) -> None:
    folder = hybrid_folder(layers, architecture)
    requests = [asked(prompt(n), **{**EVERYTHING[name], "max_tokens": 110}) for n, name in enumerate(NAMES, 60)]
    async with running(model=str(folder)) as engine:
        wanted = await drafter.record(engine, requests)
    layout = kv_layout(read_spec(folder), "bf16", 32)
    small = 2 * layout.pages_for(200) * layout.page_bytes
    for memory in (16 << 20, small):
        async with running(model=str(folder), num_speculative_tokens=6, kv_cache_memory=memory) as engine:
            assert await together(engine, requests) == wanted
            assert (engine.stats().preemptions > 0) == (memory == small)
            check_acceptance(engine, least=20)


@pytest.mark.parametrize("layers", ["...", "s.s.ss"])
async def test_a_rejected_draft_token_with_nan_logits(
    drafter: OracleDrafter, hybrid_folder: Callable[[str], Path], layers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Draft a token with a NaN embedding, which the model itself never samples. Loading would refuse it."""
    monkeypatch.setattr(packing, "check_numbers", lambda *_: None)
    folder = hybrid_folder(layers)
    broken = 305
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"][broken] = np.nan
    save_file(tensors, folder / "model.safetensors")
    requests = [
        asked(prompt(n), max_tokens=140, logit_bias={broken: -100.0, broken + 1: -100.0}, **params)
        for n, params in ((64, {}), (90, {"temperature": 1.0, "seed": 1}), (1, {"temperature": 1.0, "seed": 2}))
    ]
    async with running(model=str(folder)) as engine:
        wanted = await drafter.record(engine, requests)
    draft_sound = drafter.draft

    def poisoned(tokens: Sequence[int], most: int) -> list[int]:
        drafted = draft_sound(tokens, most)
        return [*drafted[: len(tokens) % 5], broken][:most] if len(tokens) % 3 == 0 else drafted

    drafter.draft = poisoned  # type: ignore[method-assign]
    async with running(model=str(folder), num_speculative_tokens=5) as engine:
        assert await one_by_one(engine, requests) == wanted
        check_acceptance(engine, least=20)
        assert await together(engine, requests) == wanted
