"""Measure the gain of a KV cache: generate tokens with the cache, and by recomputing the whole sequence for each.

Both runs use the same kernels and pages; the uncached one starts from position 0 every time. The tokens must be equal;
without the cache the time per token grows with the sequence.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from ....pager.layout import TILE
from ...common.errors import ConfigError
from ...model.runner import ModelRunner

SEED = 1

Tables = Sequence[Sequence[int]]  # page ids, for each layer group


@dataclass(frozen=True, slots=True)
class TimedGeneration:
    """The tokens of one generation, and the seconds of each forward pass: the prompt's, then one per further token."""

    token_ids: tuple[int, ...]
    forward_s: tuple[float, ...]

    @property
    def time_to_first_token_s(self) -> float:
        return self.forward_s[0]

    @property
    def decode_tokens_per_s(self) -> float:
        return (len(self.forward_s) - 1) / sum(self.forward_s[1:])

    def describe(self) -> str:
        rest = [seconds * 1000 for seconds in self.forward_s[1:]]
        return (
            f"TTFT {self.time_to_first_token_s * 1000:8.2f} ms   decode {self.decode_tokens_per_s:8.1f} tok/s   "
            f"per forward min {min(rest):7.2f}  mean {statistics.mean(rest):7.2f}  max {max(rest):7.2f} ms"
        )


@dataclass(frozen=True, slots=True)
class CacheComparison:
    """The same generation with and without the cache."""

    prompt_tokens: int
    cached: TimedGeneration
    uncached: TimedGeneration

    @property
    def same_tokens(self) -> bool:
        return self.cached.token_ids == self.uncached.token_ids


def compare_cache(runner: ModelRunner, prompt_tokens: int, new_tokens: int) -> CacheComparison:
    """Generate `new_tokens` (at least 2) greedily after a random prompt, twice. The runner must be idle.

    Raises ConfigError where the pool is too small.
    """
    vocab = runner.spec.vocab_size
    generator = random.Random(SEED)
    prompt = [generator.randrange(vocab) for _ in range(prompt_tokens)]
    tables = page_tables(runner, prompt_tokens + new_tokens)
    _generate(runner, prompt, tables, 2, cached=True)  # warm up: touch the memory
    cached = _generate(runner, prompt, tables, new_tokens, cached=True)
    return CacheComparison(prompt_tokens, cached, _generate(runner, prompt, tables, new_tokens, cached=False))


def page_tables(runner: ModelRunner, num_tokens: int) -> Tables:
    """Return a page table for each layer group, reusing pages that left the group's window. Raises ConfigError."""
    size = runner.capacity.layout.page_size
    tables = []
    num_pages = 0
    for window in runner.capacity.layout.group_windows:
        held = window + TILE - 1 + runner.max_rows if window else num_tokens
        pages = -(-min(held, num_tokens) // size)
        tables.append([num_pages + page % pages for page in range(-(-num_tokens // size))])
        num_pages += pages
    if num_pages > runner.capacity.num_pages:
        raise ConfigError(f"{num_tokens} tokens need {num_pages} pages, there are {runner.capacity.num_pages}")
    return tables


def _generate(
    runner: ModelRunner, prompt: Sequence[int], tables: Tables, new_tokens: int, *, cached: bool
) -> TimedGeneration:
    tokens = list(prompt)
    forward_s = []
    for index in range(new_tokens):
        first = len(tokens) - 1 if cached and index else 0
        start = time.perf_counter()
        tokens.append(_next_token(runner, tokens, first, tables))
        forward_s.append(time.perf_counter() - start)
    return TimedGeneration(tuple(tokens[len(prompt) :]), tuple(forward_s))


def _next_token(runner: ModelRunner, tokens: Sequence[int], first: int, tables: Tables) -> int:
    """Return the most likely token after `tokens`, computing from position `first` on, in as few passes as possible."""
    while len(tokens) - first > runner.max_rows:
        runner.score(tokens[first : first + runner.max_rows], first, tables, 0)
        first += runner.max_rows
    return int(runner.score(tokens[first:], first, tables, 1)[0].argmax())
