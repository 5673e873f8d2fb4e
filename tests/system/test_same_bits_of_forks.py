"""`n` and `best_of`: output i has the same bits as a request with seed + i, although the outputs share prompt pages."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from quire.kernels import supported_levels
from quire.runtime.engine import LocalEngine
from quire.runtime.engine.facade import SilentObserver, StepStats
from quire.runtime.model import kv_layout, read_spec
from quire.scheduler import speculative

from tests.support.bits import asked, one_by_one, outcome, prompt, running, together

LEVELS = supported_levels()
LENGTHS = (1, 31, 32, 33, 40, 64, 100)  # lengths at and around page boundaries
SAMPLING: dict[str, Any] = {"temperature": 1.0, "max_tokens": 12}
N = 4
SEED = 2**64 - 2  # seeds wrap around at 2**64


class Recorder(SilentObserver):
    """Observer that counts prefill tokens and the maximum of owned pages."""

    def __init__(self, engine: LocalEngine) -> None:
        self.engine = engine
        self.prefill_tokens = self.most_pages = 0
        engine.set_observer(self)

    def on_step(self, step: StepStats) -> None:
        self.prefill_tokens += step.prefill_tokens
        self.most_pages = max(self.most_pages, self.engine.stats().pages_owned)

    def on_tokens(self, count: int, since_last_s: float | None) -> None:
        self.most_pages = max(self.most_pages, self.engine.stats().pages_owned)


async def choices_alone(engine: LocalEngine, length: int, count: int = N, **params: Any) -> list[str]:
    """Return each output, computed as a separate request."""
    seeds = [(SEED + i) % 2**64 for i in range(count)]
    return [each[0] for each in await one_by_one(engine, [asked(prompt(length), seed=s, **params) for s in seeds])]


def forking(length: int, n: int = N, **params: Any) -> Any:
    return asked(prompt(length), seed=SEED, n=n, **params)


@pytest.mark.parametrize(
    "settings",
    [{"isa": isa, "weights": "f32", "kv_cache_dtype": "f32"} for isa in LEVELS if isa != "scalar"]
    + [
        {},
        {"weights": "q8"},
        {"weights": "q8", "kv_cache_dtype": "int8"},
        {"weights": "q4"},
        {"enable_prefix_caching": False},
    ],
    ids=str,
)
async def test_alone_together_and_after_a_prefix_hit(settings: dict[str, Any]) -> None:
    async with running(**{**settings, "enable_prefix_caching": False, "threads": 1}) as engine:
        wanted = [await choices_alone(engine, length, **SAMPLING) for length in LENGTHS]
    async with running(**settings) as engine:
        for _ in range(2):
            seen = await together(engine, [forking(length, **SAMPLING) for length in LENGTHS])
            assert [each[:-1] for each in seen] == wanted
            assert [each[-1] for each in seen] == [f"{N * 12} tokens"] * len(LENGTHS)


@pytest.mark.parametrize("caching", [True, False])
async def test_the_prompt_is_computed_and_stored_once(caching: bool) -> None:
    """Exceptions: each output computes the last prompt token and owns the page that it continues in."""
    async with running(enable_prefix_caching=caching) as engine:
        for length in LENGTHS:
            recorder = Recorder(engine)
            await outcome(engine, forking(length, **SAMPLING))
            shared = (length - 1) // 32
            assert recorder.prefill_tokens == length + N - 1
            assert recorder.most_pages <= shared + N * (-(-(length + 11) // 32) - shared)


async def test_preempted_when_pages_run_out() -> None:
    params = {"temperature": 1.0, "max_tokens": 60}
    async with running() as engine:
        wanted = [await choices_alone(engine, length, **params) for length in (40, 64, 1)]
        page_bytes = engine.core.runner.capacity.layout.page_bytes
    async with running(kv_cache_memory=7 * page_bytes) as engine:
        seen = await together(engine, [forking(length, **params) for length in (40, 64, 1)])
        assert engine.stats().preemptions > 0
    assert [each[:-1] for each in seen] == wanted


async def test_with_few_sequence_slots() -> None:
    """Outputs queue for a slot: some start only after others of the same request have ended."""
    async with running() as engine:
        wanted = [await choices_alone(engine, length, **SAMPLING) for length in LENGTHS]
        single = await outcome(engine, asked(prompt(50), max_tokens=40))
    async with running(max_num_seqs=N, max_num_batched_tokens=33) as engine:
        requests = [forking(length, **SAMPLING) for length in LENGTHS]
        seen = await together(engine, [asked(prompt(50), max_tokens=40), *requests])
    assert seen[0] == single
    assert [each[:-1] for each in seen[1:]] == wanted


async def test_with_draft_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speculative, "MARGIN", 0.0)
    params = {"temperature": 0.4, "max_tokens": 40, "frequency_penalty": -0.5}  # makes the text repeat itself
    async with running() as engine:
        wanted = [await choices_alone(engine, length, **params) for length in (1, 33, 100)]
    async with running(num_speculative_tokens=4) as engine:
        seen = await together(engine, [forking(length, **params) for length in (1, 33, 100)])
        assert 0 < engine.stats().accepted_draft_tokens < engine.stats().draft_tokens
    assert [each[:-1] for each in seen] == wanted


@pytest.mark.parametrize(("layers", "architecture"), [("s.s.ss", "Qwen2ForCausalLM"), ("ss.s.s.", "Gemma4ForCausalLM")])
async def test_with_sliding_windows(hybrid_folder: Callable[[str, str], Path], layers: str, architecture: str) -> None:
    """The first output may have left the window of the prompt when the next output starts."""
    folder = hybrid_folder(layers, architecture)
    params = {"temperature": 0.9, "max_tokens": 90}
    lengths = (30, 150, 163)
    async with running(model=str(folder)) as engine:
        wanted = [await choices_alone(engine, length, 3, **params) for length in lengths]
    layout = kv_layout(read_spec(folder), "bf16", 32)
    small = {"kv_cache_memory": 2 * layout.pages_for(253) * layout.page_bytes}
    for settings in ({}, {"max_num_seqs": 3, "enable_prefix_caching": False}, small):
        async with running(model=str(folder), **settings) as engine:
            seen = await together(engine, [forking(length, 3, **params) for length in lengths])
            assert (engine.stats().preemptions > 0) == (settings is small)
        assert [each[:-1] for each in seen] == wanted


async def test_best_of_returns_the_best_samples() -> None:
    """Preempted samples are ranked like the others."""
    params = {"temperature": 1.0, "max_tokens": 70}
    async with running() as engine:
        samples = [await choices_alone(engine, length, 5, **params) for length in (33, 40)]
        page_bytes = engine.core.runner.capacity.layout.page_bytes
    async with running(kv_cache_memory=9 * page_bytes) as engine:
        seen = await together(engine, [forking(length, 2, best_of=5, **params) for length in (33, 40)])
        assert engine.stats().preemptions > 0
    for choices, best in zip(samples, seen, strict=True):
        ranked = sorted(choices, key=lambda choice: -msgspec.json.decode(choice)["cumulative_logprob"])
        assert best == [*ranked[:2], "350 tokens"]
