"""Prompts of drawn token ids: random ones, ones that share prefixes, and those that stand for a recorded trace.

It must not read a file. One invariant: each draw has a name and depends on nothing but that and the seed, so the same
seed gives the same prompts, however many are taken.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from itertools import chain, count, islice

import numpy as np

from ..traffic import Arrival
from .request import Request

SHARED, LENGTHS, OWN, WARMUP = range(4)  # kinds of draws


class RandomTokens:
    """Token ids below `vocab_size`, uniformly drawn."""

    def __init__(self, vocab_size: int, seed: int) -> None:
        self._seed = seed
        self._ids = tuple(range(vocab_size))  # prompts share these: long ones would hold an object per token

    def generator(self, *name: int) -> np.random.Generator:
        return np.random.default_rng((self._seed, *name))

    def draw(self, num_tokens: int, *name: int) -> tuple[int, ...]:
        drawn = self.generator(*name).integers(len(self._ids), size=num_tokens)
        return tuple(map(self._ids.__getitem__, drawn.tolist()))


def length_bounds(length: int, ratio: float, least: int) -> tuple[int, int]:
    """Both inclusive, as vLLM has them."""
    return max(least, math.floor(length * (1 - ratio))), max(least, math.ceil(length * (1 + ratio)))


def random_requests(
    tokens: RandomTokens, *, input_len: int, output_len: int, range_ratio: float, prefix_len: int
) -> Iterator[Request]:
    """Without end; all begin with the same `prefix_len` tokens."""
    prefix = tokens.draw(prefix_len, SHARED)
    input_bounds = length_bounds(input_len, range_ratio, 0)
    output_bounds = length_bounds(output_len, range_ratio, 1)
    for index in count():
        lengths = tokens.generator(LENGTHS, index)
        own = tokens.draw(int(lengths.integers(*input_bounds, endpoint=True)), OWN, index)
        max_tokens = int(lengths.integers(*output_bounds, endpoint=True))
        yield Request(prefix + own, len(prefix) + len(own), max_tokens)


def prefix_repetition_requests(
    tokens: RandomTokens, *, prefix_len: int, suffix_len: int, num_prefixes: int, output_len: int, shuffle: bool
) -> Iterator[Request]:
    """Without end, in rounds in which each prefix comes once."""
    prefixes = [tokens.draw(prefix_len, SHARED, index) for index in range(num_prefixes)]
    for turn in count():
        order = tokens.generator(LENGTHS, turn).permutation(num_prefixes).tolist() if shuffle else range(num_prefixes)
        for index in order:
            prompt = prefixes[index] + tokens.draw(suffix_len, OWN, turn, index)
            yield Request(prompt, len(prompt), output_len)


def trace_requests(arrivals: Iterable[Arrival], tokens: RandomTokens) -> Iterator[Request]:
    """Prompts that are equal where the trace's blocks are, and nowhere else."""
    for index, arrival in enumerate(arrivals):
        shared = chain.from_iterable(tokens.draw(arrival.block_tokens, SHARED, block) for block in arrival.blocks)
        known = tuple(islice(shared, arrival.prompt_tokens))
        prompt = known + tokens.draw(arrival.prompt_tokens - len(known), OWN, index)
        yield Request(prompt, len(prompt), arrival.output_tokens)


def warmup_requests(like: Request, number: int, tokens: RandomTokens) -> list[Request]:
    """As long as that request, of tokens that no other has: what is measured must not be in a cache before."""
    return [
        Request(tokens.draw(len(like.prompt), WARMUP, index), like.prompt_tokens, like.max_tokens)
        for index in range(number)
    ]
