"""The head of a model (MTP) does not change a request's bits, whether its proposals are right or wrong.

The heads of the goldens are random and propose wrong tokens. Where the layers of a model add nothing, the next token
depends on the last one alone, so a head that passes on the embedding proposes the right tokens.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from quire.pager import check
from quire.runtime.engine import LocalEngine
from quire.runtime.model.runner import HeadRunner
from quire.scheduler import drafters, speculative

from tests.support.bits import EVERYTHING, Preemptor, asked, one_by_one, prompt, running, together
from tests.support.heads import FAMILIES, tensor_names, with_head

SMALL_BIAS = {"logit_bias": {13: 4.0, 100: 3.5, 7: -100.0}}  # tokens that the goldens have
PARAMS = {**EVERYTHING, "bias": {**SMALL_BIAS, "temperature": 1.0, "seed": 7}}
REQUESTS = [asked(prompt(20 + 9 * index, vocabulary=150), **params) for index, params in enumerate(PARAMS.values())]
EXACT: dict[str, Any] = {"weights": "f32", "kv_cache_dtype": "f32"}


@pytest.fixture(autouse=True)
def only_the_head_proposes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Verify also drafts that are predicted to cost more time than they save."""
    monkeypatch.setattr(speculative, "MARGIN", 0.0)
    for drafter in (drafters.PromptLookup, drafters.SuffixLookup):
        monkeypatch.setattr(drafter, "propose", lambda drafter, request, limit: ())


def head_of(engine: LocalEngine) -> HeadRunner:
    decoder: Any = engine.core._decoder
    head: HeadRunner = decoder._draft
    return head


@asynccontextmanager
async def drafting(folder: Path, **settings: Any) -> AsyncIterator[LocalEngine]:
    """Run an engine whose model has a head, then check that the head's pages are conserved."""
    options = {"draft_model": "mtp", "num_speculative_tokens": 4, **settings}
    async with running(model=str(folder), **options) as engine:
        yield engine
        head = head_of(engine)
        check(head.pager, [each.table for each in head._sequences.values()])


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("heads")
    return {family: with_head(family, base / family) for family in FAMILIES}


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model whose layers add nothing, and whose head passes on the embedding."""
    folder = with_head("qwen3_5", tmp_path_factory.mktemp("right") / "model")
    edit(folder / "model-1.safetensors", lambda name, values: 0 * values if adds(name) else values)
    edit(folder / "model-2.safetensors", of_right_head)
    return folder


def adds(name: str) -> bool:
    """Return whether a tensor is of the last projection of a block, or of the final norm."""
    return name == "model.norm.weight" or name.endswith(
        ("o_proj.weight", "o_proj.bias", "out_proj.weight", "down_proj.weight")
    )


def of_right_head(name: str, values: Any) -> Any:
    if name == "mtp.fc.weight":
        return np.eye(*values.shape, dtype=np.float32)
    return 0 * values if adds(name) or "norm" in name else values


def edit(file: Path, change: Any) -> None:
    """Change the tensors of a file in bf16."""
    data = file.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    out = bytearray(data)
    for name in tensor_names(file):
        begin, stop = (end + offset for offset in header[name]["data_offsets"])
        values = (np.frombuffer(data[begin:stop], np.uint16).astype(np.uint32) << 16).view(np.float32)
        changed = np.asarray(change(name, values.reshape(header[name]["shape"])), np.float32)
        out[begin:stop] = (changed.reshape(-1).view(np.uint32) >> 16).astype(np.uint16).tobytes()
    file.write_bytes(out)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("settings", [EXACT, {"weights": "q8", "kv_cache_dtype": "int8", "chunk": 9}])
async def test_alone_together_and_after_a_prefix_hit(
    folders: dict[str, Path], family: str, settings: dict[str, Any]
) -> None:
    async with running(model=str(folders[family]), **settings) as engine:
        wanted = await one_by_one(engine, REQUESTS)
    async with drafting(folders[family], **settings) as engine:
        assert await together(engine, REQUESTS) == wanted
        assert await one_by_one(engine, REQUESTS) == wanted
        assert engine.stats().draft_tokens > 100


async def test_a_right_head_saves_most_steps(right: Path) -> None:
    requests = [asked(prompt(9 + n, vocabulary=150), max_tokens=60, temperature=n / 2, seed=n) for n in range(3)]
    async with running(model=str(right), **EXACT) as engine:
        wanted = await one_by_one(engine, requests)
    async with drafting(right, **EXACT) as engine:
        assert await together(engine, requests) == wanted
        assert await one_by_one(engine, requests) == wanted
        stats = engine.stats()
        assert stats.accepted_draft_tokens > 0.95 * stats.draft_tokens > 150


@pytest.mark.parametrize("chunk", [None, 9])
async def test_forks_searches_and_preemption(right: Path, chunk: int | None) -> None:
    requests = [
        asked(prompt(70, vocabulary=150), temperature=0.8, seed=1, max_tokens=90),
        asked(prompt(40, vocabulary=150), n=3, temperature=1.0, seed=3, max_tokens=40),
        asked(prompt(30, vocabulary=150), n=2, beam_width=3, logprobs=0, max_tokens=20),
        asked(prompt(31, vocabulary=150), max_tokens=90),
    ]
    async with running(model=str(right), **EXACT) as engine:
        wanted = await one_by_one(engine, requests)
    async with drafting(right, chunk=chunk, **EXACT) as engine:
        engine.set_observer(Preemptor(engine, after=30))
        assert await together(engine, requests) == wanted
        stats = engine.stats()
        assert stats.preemptions > 0
        assert stats.accepted_draft_tokens > 0.5 * stats.draft_tokens > 50


async def test_entries_of_ended_requests_are_released_with_the_next_step(right: Path) -> None:
    async with drafting(right, enable_prefix_caching=False, **EXACT) as engine:
        await one_by_one(engine, REQUESTS[:3])
        assert len(head_of(engine)._sequences) == 1
