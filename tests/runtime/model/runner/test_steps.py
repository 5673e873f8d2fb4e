"""Steps of a model runner: layer groups with separate page tables, and several samples of one sequence."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from quire.pager import Pager, PageTable
from quire.runtime.common.config import EngineConfig
from quire.runtime.common.errors import ConfigError
from quire.runtime.common.types import SamplingParams
from quire.runtime.model.runner import ModelRunner, SamplingSpec, load_model
from quire.scheduler import ScheduledSequence, StepPlan

LENGTH = 480
TOKENS = np.random.default_rng(1).integers(0, 307, LENGTH).tolist()
LAYERS = ["s.s.ss", "ssss", "...."]

Load = Callable[..., ModelRunner]


@pytest.fixture
def load(hybrid_folder: Callable[[str], Path]) -> Iterator[Load]:
    runners: list[ModelRunner] = []
    folders: dict[str, Path] = {}

    def make(layers: str, kv_memory: int = 16 << 20, **settings: Any) -> ModelRunner:
        if layers not in folders:
            folders[layers] = hybrid_folder(layers)
        settings = {"max_num_batched_tokens": 160, "threads": 2, **settings}
        runners.append(load_model(EngineConfig(model=str(folders[layers]), kv_cache_memory=kv_memory, **settings)))
        return runners[-1]

    yield make
    for runner in runners:
        runner.close()


def last_logits(runner: ModelRunner, pager: Pager, table: PageTable, chunk: int) -> list[bytes]:
    """Return the logits at the end of the prompt and after each later token; the pager commits after each step."""
    logits = []
    prompt = LENGTH - 4
    while table.num_tokens < LENGTH:
        first = table.num_tokens
        count = min(chunk, prompt - first) if first < prompt else 1
        table.append(count)
        logits.append(runner.score(TOKENS[first : first + count], first, table.pages, 1)[0].tobytes())
        pager.commit(table, TOKENS)
    return logits[-5:]


def logits_of_kept_pages(runner: ModelRunner, chunk: int) -> list[bytes]:
    """Return the same logits with page tables that never release a page."""
    pages = -(-LENGTH // runner.capacity.layout.page_size)
    logits = []
    prompt = LENGTH - 4
    tables = [range(g * pages, (g + 1) * pages) for g in range(len(runner.capacity.layout.groups))]
    for first in [*range(0, prompt, chunk), *range(prompt, LENGTH)]:
        end = min(first + chunk, prompt) if first < prompt else first + 1
        logits.append(runner.score(TOKENS[first:end], first, tables, 1)[0].tobytes())
    return logits[-5:]


@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize(("kv_dtype", "page_size"), [("bf16", 32), ("int8", 16), ("f32", 64)])
def test_releasing_pages_changes_no_bit(load: Load, layers: str, kv_dtype: str, page_size: int) -> None:
    runner = load(layers, kv_cache_dtype=kv_dtype, page_size=page_size)
    pager = runner.open_pager(enable_prefix_caching=False)
    want = logits_of_kept_pages(runner, 160)
    for chunk in (160, 37, 1):
        runner.arena.memory[:] = 0xFF  # pages that were not written are NaN
        table = pager.open(())
        assert last_logits(runner, pager, table, chunk) == want
        assert pager.pool.num_owned < pager.pages_for(LENGTH) + 1
        table.release()


@pytest.mark.parametrize("layers", LAYERS)
def test_a_cached_prefix_changes_no_bit(load: Load, layers: str) -> None:
    runner = load(layers)
    pager = runner.open_pager(enable_prefix_caching=True)
    first = pager.open(TOKENS)
    cached = first.num_tokens
    assert cached == 0
    want = last_logits(runner, pager, first, 32)
    again = pager.open(TOKENS)
    cached = again.num_tokens
    assert cached == LENGTH - runner.capacity.layout.page_size
    assert last_logits(runner, pager, again, 32)[-4:] == want[-4:]


def test_a_sliding_model_serves_sequences_longer_than_its_pool(load: Load) -> None:
    roomy = load("ssss")
    page_bytes = roomy.capacity.layout.page_bytes
    pages = roomy.capacity.layout.pages_for(LENGTH)
    small = load("ssss", pages * page_bytes)
    assert small.capacity.num_pages * small.capacity.layout.page_size < LENGTH < small.capacity.max_model_len == 4096
    pager = small.open_pager(enable_prefix_caching=False)
    assert last_logits(small, pager, pager.open(()), 1) == logits_of_kept_pages(roomy, 160)
    smaller = load("ssss", (pages - 1) * page_bytes)
    assert smaller.capacity.max_model_len == (pages - 1) * small.capacity.layout.page_size


def test_a_pool_too_small_for_any_sequence_is_refused(load: Load) -> None:
    page_bytes = load("s.s.ss").capacity.layout.page_bytes
    with pytest.raises(ConfigError, match=f"holds 2 of the 3 pages that a sequence .* takes {page_bytes} bytes"):
        load("s.s.ss", 3 * page_bytes - 1)


# Several samples of one sequence


def sampling(**params: Any) -> SamplingSpec:
    return SamplingSpec(SamplingParams(max_tokens=50, **params), seed=11, stop_token_ids=frozenset({3}))


def scheduled(
    tables: Sequence[Sequence[int]], context: Sequence[int], rows: int, samples: int, spec: SamplingSpec
) -> ScheduledSequence:
    first = len(context) - rows
    return ScheduledSequence(7, tables, first, context[first:], samples, spec, context, 20)


@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.0, "logprobs": 3},
        {"temperature": 1.0, "top_p": 0.9, "logprobs": 1},
        {"temperature": 0.8, "repetition_penalty": 1.3, "frequency_penalty": 0.4, "min_tokens": 24, "logprobs": 0},
    ],
)
def test_verified_draft_tokens_give_the_results_of_single_steps(
    load: Load, layers: str, params: dict[str, Any]
) -> None:
    """Right draft tokens in one step between two other sequences, and wrong ones up to the first difference."""
    runner = load(layers, max_num_seqs=8)
    spec = sampling(**params)
    pages = range(-(-140 // 32))
    tables, others = (
        [[first + g * 20 + page for page in pages] for g in range(len(runner.capacity.layout.groups))]
        for first in (0, 10)
    )

    def step(*sequences: ScheduledSequence) -> list[Any]:
        plan = StepPlan(1, sequences, 1, 0)
        return list(runner.execute(plan).sampled)

    step(scheduled(tables, TOKENS[:119], 119, 0, spec))
    tokens = TOKENS[:120]
    one_by_one = []
    for _ in range(4):
        one_by_one += step(scheduled(tables, tokens, 1, 1, spec))
        tokens = [*tokens, one_by_one[-1].token_id]
    neighbor = scheduled(others, TOKENS[:40], 40, 1, sampling())
    alone = step(neighbor)

    together = step(neighbor, scheduled(tables, tokens[:-1], 4, 4, spec), neighbor)
    assert together == [*alone, *one_by_one, *alone]

    wrong = [*tokens[:121], (tokens[121] + 1) % 307, *tokens[122:-1]]
    assert step(scheduled(tables, wrong, 4, 4, spec))[:2] == one_by_one[:2]
