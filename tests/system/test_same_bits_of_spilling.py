"""A request has the same bits whether its pages are restored from the spill file or computed again."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from quire.pager import SpillFile, spill
from quire.runtime.engine import LocalEngine
from quire.runtime.engine.facade import SilentObserver, StepStats
from quire.runtime.model import kv_layout, read_spec
from quire.scheduler import CostModel, speculative

from tests.support.bits import EVERYTHING, asked, one_by_one, outcome, prompt, running, together
from tests.support.forced_preemption import preempt

NAMES = ("greedy", "sampled", "repetition", "presence", "frequency", "bias", "min_p")
REQUESTS = [asked(prompt(n), **{**EVERYTHING[name], "max_tokens": 80}) for n, name in enumerate(NAMES, 28)]
REQUESTS.append(asked(prompt(40), temperature=1.0, seed=4, n=3, max_tokens=70))
PAGES = 9  # pages in the pool; each request needs four


@pytest.fixture(autouse=True)
def spilling_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make spilling always cheaper than recomputing, and retry at once after a failed write."""
    monkeypatch.setattr(CostModel, "predict_prefill", lambda self, num_tokens: 1e9)
    monkeypatch.setattr(spill, "PAUSE_S", 0.0)


_alone: dict[tuple[str, str], tuple[list[list[str]], int]] = {}


async def alone(weights: str = "bf16", kv: str = "bf16") -> tuple[list[list[str]], int]:
    """Return the outcomes of requests run alone and the bytes of a page; computed once."""
    if (weights, kv) not in _alone:
        async with running(enable_prefix_caching=False, weights=weights, kv_cache_dtype=kv) as engine:
            _alone[weights, kv] = await one_by_one(engine, REQUESTS), engine.core.runner.capacity.layout.page_bytes
    return _alone[weights, kv]


@pytest.mark.parametrize(
    ("weights", "kv", "caching"),
    [("bf16", "bf16", True), ("bf16", "bf16", False), ("q8", "int8", True), ("q4", "int8", True)],
)
async def test_spilled_pages_are_not_computed_again(weights: str, kv: str, caching: bool, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"weights": weights, "kv_cache_dtype": kv, "enable_prefix_caching": caching}
    wanted, page_bytes = await alone(weights, kv)
    spilling = {"kv_spill_size": 64 << 20, "kv_spill_dir": str(tmp_path), "kv_cache_memory": PAGES * page_bytes}
    async with running(**settings, **spilling) as engine:
        assert await together(engine, REQUESTS) == wanted
        stats = engine.stats()
        assert stats.preemptions == stats.preemptions_spilled > 0
        assert stats.recomputed_tokens == 0
        assert not os.listdir(tmp_path), "the spill file must be unlinked"


async def test_with_draft_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speculative, "MARGIN", 0.0)
    wanted, page_bytes = await alone()
    spilling = {"kv_spill_size": 64 << 20, "kv_cache_memory": PAGES * page_bytes, "num_speculative_tokens": 5}
    async with running(**spilling) as engine:
        assert await together(engine, REQUESTS) == wanted
        assert engine.stats().preemptions_spilled > 0
        assert engine.stats().recomputed_tokens == 0


@pytest.mark.parametrize(("layers", "architecture"), [("s.s.ss", "Qwen2ForCausalLM"), ("ss.s.s.", "Gemma4ForCausalLM")])
async def test_with_sliding_windows(hybrid_folder: Callable[[str, str], Path], layers: str, architecture: str) -> None:
    folder = hybrid_folder(layers, architecture)
    requests = [asked(prompt(n), max_tokens=140, temperature=1.0, seed=n) for n in (1, 40, 90, 130, 170)]
    async with running(model=str(folder), enable_prefix_caching=False) as engine:
        wanted = await one_by_one(engine, requests)
    layout = kv_layout(read_spec(folder), "bf16", 32)
    small = {"kv_cache_memory": (layout.pages_for(310) + 6) * layout.page_bytes, "max_model_len": 310}
    async with running(model=str(folder), kv_spill_size=64 << 20, **small) as engine:
        assert await together(engine, requests) == wanted
        stats = engine.stats()
        assert stats.preemptions == stats.preemptions_spilled > 0
        assert stats.recomputed_tokens == 0


@pytest.mark.parametrize("size", [1, 5])
async def test_a_small_spill_file(size: int) -> None:
    wanted, page_bytes = await alone()
    spilling = {"kv_spill_size": size * page_bytes, "kv_cache_memory": PAGES * page_bytes}
    async with running(**spilling) as engine:
        assert await together(engine, REQUESTS) == wanted
        stats = engine.stats()
        assert stats.preemptions > stats.preemptions_spilled
        assert (stats.preemptions_spilled > 0) == (size > 1)


@pytest.mark.parametrize("damaged_pages", [1, 3])
async def test_damaged_pages_are_computed_again(monkeypatch: pytest.MonkeyPatch, damaged_pages: int) -> None:
    """One bit flips in every `damaged_pages`-th page that is written."""
    wanted, page_bytes = await alone()
    write = SpillFile._write
    written = []

    def write_and_flip(file: SpillFile, slot: int, page: int) -> None:
        write(file, slot, page)
        written.append(slot)
        if len(written) % damaged_pages == 0:
            at = slot * page_bytes + 77 * len(written) % page_bytes
            (byte,) = os.pread(file._file, 1, at)
            os.pwrite(file._file, bytes([byte ^ 16]), at)

    monkeypatch.setattr(SpillFile, "_write", write_and_flip)
    async with running(kv_spill_size=64 << 20, kv_cache_memory=PAGES * page_bytes) as engine:
        assert await together(engine, REQUESTS) == wanted
        assert engine.stats().recomputed_tokens > 0
        assert engine.stats().preemptions_spilled > 0


@pytest.mark.parametrize("fits", [3])
async def test_a_full_disk(monkeypatch: pytest.MonkeyPatch, fits: int) -> None:
    wanted, page_bytes = await alone()
    write = SpillFile._write
    slots = set()

    def write_or_fail(file: SpillFile, slot: int, page: int) -> None:
        if slot not in slots and len(slots) >= fits:
            raise OSError(errno.ENOSPC, "no space left on device")
        slots.add(slot)
        write(file, slot, page)

    monkeypatch.setattr(SpillFile, "_write", write_or_fail)
    async with running(kv_spill_size=64 << 20, kv_cache_memory=PAGES * page_bytes) as engine:
        assert await together(engine, REQUESTS) == wanted
        assert engine.stats().preemptions > engine.stats().preemptions_spilled


class Preemptor(SilentObserver):
    """Observer that preempts request 0 between two steps, once it decodes, and cancels its stream."""

    def __init__(self, engine: LocalEngine) -> None:
        self.engine = engine
        self.spilled = 0
        self.stream = None

    def on_step(self, step: StepStats) -> None:
        if step.decode_tokens and not self.spilled:
            assert preempt(self.engine.core.scheduler, 0)
            self.spilled = self.engine.stats().pages_spilled
            self.stream.cancel()  # type: ignore[attr-defined]


async def test_cancelled_while_its_pages_are_spilled() -> None:
    wanted, _ = await alone()
    async with running(kv_spill_size=64 << 20) as engine:
        preemptor = Preemptor(engine)
        engine.set_observer(preemptor)
        preemptor.stream = await engine.submit(REQUESTS[1])  # type: ignore[assignment]
        chunks = [chunk async for chunk in preemptor.stream]  # type: ignore[attr-defined]
        assert chunks[-1].finish_reason == "cancelled"
        assert preemptor.spilled > engine.stats().pages_spilled == 0
        assert await outcome(engine, REQUESTS[1]) == wanted[1]
