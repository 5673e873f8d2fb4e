"""A draft model does not change a request's bits, whether its proposals are right or wrong, and keeps no pages.

The model as its own draft model proposes the tokens that it samples; the first of its layers proposes other ones.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from quire.pager import check
from quire.runtime.common.errors import ConfigError
from quire.runtime.engine import LocalEngine
from quire.runtime.model.files import BUNDLED_MODEL
from quire.runtime.model.runner import DraftRunner
from quire.scheduler import drafters, speculative

from tests.support.bits import EVERYTHING, asked, one_by_one, prompt, running, together

GOLDENS = Path(__file__).parents[1] / "goldens"
ITSELF = str(BUNDLED_MODEL)
SMALLER = "the first of its four layers"
REQUESTS = [asked(prompt(20 + 9 * i), **params) for i, params in enumerate(EVERYTHING.values())]


@pytest.fixture(autouse=True)
def only_the_draft_model_proposes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Verify also drafts that are predicted to cost more time than they save."""
    monkeypatch.setattr(speculative, "MARGIN", 0.0)
    for drafter in (drafters.PromptLookup, drafters.SuffixLookup):
        monkeypatch.setattr(drafter, "propose", lambda drafter, request, limit: ())


@pytest.fixture(scope="module")
def smaller(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a folder with the bundled model's first layer."""
    folder = tmp_path_factory.mktemp("smaller")
    config = json.loads((BUNDLED_MODEL / "config.json").read_text())
    config |= {"num_hidden_layers": 1, "layer_types": config["layer_types"][:1]}
    (folder / "config.json").write_text(json.dumps(config))
    shutil.copy(BUNDLED_MODEL / "model.safetensors", folder)
    return str(folder)


def draft_of(engine: LocalEngine) -> DraftRunner:
    decoder: Any = engine.core._decoder
    draft: DraftRunner = decoder._draft
    return draft


@asynccontextmanager
async def drafting(draft_model: str, **settings: Any) -> AsyncIterator[LocalEngine]:
    """Run an engine with a draft model, then check that its pages are conserved."""
    async with running(draft_model=draft_model, **{"num_speculative_tokens": 4, **settings}) as engine:
        yield engine
        draft = draft_of(engine)
        check(draft.pager, [each.table for each in draft._sequences.values()])


@pytest.mark.parametrize("draft_model", [ITSELF, SMALLER])
@pytest.mark.parametrize("settings", [{}, {"weights": "q8", "kv_cache_dtype": "int8"}])
async def test_alone_together_and_after_a_prefix_hit(smaller: str, draft_model: str, settings: dict[str, Any]) -> None:
    async with running(**settings) as engine:
        wanted = await one_by_one(engine, REQUESTS)
    async with drafting(smaller if draft_model == SMALLER else draft_model, **settings) as engine:
        assert await together(engine, REQUESTS) == wanted
        assert await one_by_one(engine, REQUESTS) == wanted
        stats = engine.stats()
        assert stats.draft_tokens > 100
        assert (stats.accepted_draft_tokens > 0.9 * stats.draft_tokens) == (draft_model == ITSELF)
        assert (draft_of(engine).pager.prefix_hit_tokens > 0) >= (draft_model == ITSELF)


@pytest.mark.parametrize("draft_model", [ITSELF, SMALLER])
@pytest.mark.parametrize("chunk", [None, 9])
async def test_forks_stop_strings_and_preemption(smaller: str, draft_model: str, chunk: int | None) -> None:
    requests = [
        asked(prompt(40), n=3, temperature=1.0, seed=3, max_tokens=40),
        asked("x = x + 1\nx =", stop=("x + 1\n",), max_tokens=60),
        asked(prompt(70), temperature=0.8, seed=1, max_tokens=90),
        asked(prompt(31), max_tokens=90),
    ]
    async with running() as engine:
        wanted = await one_by_one(engine, requests)
        page_bytes = engine.core.runner.capacity.layout.page_bytes
    memory = page_bytes * (22 if draft_model == ITSELF else 14)  # the draft model's pages included
    async with drafting(
        smaller if draft_model == SMALLER else draft_model, chunk=chunk, kv_cache_memory=memory
    ) as engine:
        assert await together(engine, requests) == wanted
        assert engine.stats().preemptions > 0


@pytest.mark.parametrize("family", ["lfm2", "qwen3_5", "deepseek_v2", "gemma3"])
async def test_with_states_latents_and_windows(family: str) -> None:
    """The draft model has none of them; tokens beyond its vocabulary are not proposed for."""
    requests = [asked(prompt(n, vocabulary=150), max_tokens=40, **params) for n, params in ((9, {}), (50, {"seed": 1}))]
    settings: dict[str, Any] = {"model": str(GOLDENS / family), "weights": "f32"}
    async with running(**settings) as engine:
        wanted = await one_by_one(engine, requests)
    async with drafting(str(GOLDENS / "llama"), **settings) as engine:
        assert await together(engine, requests) == wanted
        assert engine.stats().draft_tokens > 0


async def test_a_draft_model_with_windows_computes_again_what_its_windows_released(
    hybrid_folder: Callable[[str], Path],
) -> None:
    folder = str(hybrid_folder("s.s"))
    requests = [asked(prompt(n), max_tokens=120, temperature=1.0, seed=n) for n in (5, 60)]
    async with running(model=folder) as engine:
        wanted = await one_by_one(engine, requests)
    async with drafting(folder, model=folder) as engine:
        assert await together(engine, requests) == wanted
        stats = engine.stats()
        assert stats.accepted_draft_tokens > 0.9 * stats.draft_tokens > 100


async def test_pages_of_ended_requests_are_released_with_the_next_proposals() -> None:
    async with drafting(ITSELF, enable_prefix_caching=False) as engine:
        await one_by_one(engine, REQUESTS[:3])
        assert len(draft_of(engine)._sequences) == 1


async def test_a_draft_model_without_free_pages_proposes_for_some_sequences() -> None:
    requests = [asked(prompt(100 + n), max_tokens=30) for n in range(4)]
    async with running() as engine:
        wanted = await one_by_one(engine, requests)
    async with drafting(ITSELF, kv_cache_memory=4 << 20) as engine:
        pool = draft_of(engine).pager.pool
        pool.reserve(pool.num_available - 9)
        assert await together(engine, requests) == wanted
        assert engine.stats().accepted_draft_tokens > 0
        pool.reserve(-pool.num_reserved)


async def test_a_draft_model_with_another_vocabulary_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "draft"
    shutil.copytree(BUNDLED_MODEL, folder)
    text = (folder / "tokenizer.json").read_text()
    tokenizer = json.loads(text)
    vocabulary = tokenizer["model"]["vocab"]
    first, second = [token for token, token_id in sorted(vocabulary.items(), key=lambda item: item[1])][500:502]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    message = re.escape(f"draft has another vocabulary: token 500 is {second!r}, not {first!r}")
    with pytest.raises(ConfigError, match=message):
        async with drafting(str(folder)):
            pass
