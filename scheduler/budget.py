"""How much prefill joins the decode rows of a step, and whether one more sequence may run at all.

It must not know requests or pages, only amounts. The one invariant: as long as a sequence is not decoding, at least one
prefill token is allowed in every step, so prefill never starves.
"""

from __future__ import annotations

import math
from typing import Protocol

from .cost import CostModel, StepLoad, chunk_pairs

AIM = 0.9  # of the target: the rest is for what surrounds a step, and for being wrong
LEAST_PREFILL = 16  # tokens of prefill in every step, whatever the target: bounds how long a prompt takes


class StepBudget:
    """What is left of one step: tokens, and seconds where they are limited."""

    __slots__ = ("_cost", "_least", "_seconds", "_tokens", "load")

    def __init__(self, load: StepLoad, tokens: int, seconds: float = math.inf, cost: CostModel | None = None) -> None:
        self.load = load  # of the step so far: decode rows, then what `spend` adds
        self._tokens = tokens
        self._seconds = seconds
        self._cost = cost
        self._least = LEAST_PREFILL

    def prefill_tokens(self, context: int) -> int:
        """The most prefill tokens that a sequence with `context` computed tokens may add."""
        if self._cost is None:
            return self._tokens
        fits = _chunk_in(self._seconds, context, self._cost)
        return min(self._tokens, max(fits, self._least))

    def spend(self, num_tokens: int, context: int) -> None:
        """A sequence with `context` computed tokens adds `num_tokens`."""
        pairs = chunk_pairs(context, num_tokens)
        rows, tokens, kv_tokens, before = self.load
        self.load = StepLoad(rows, tokens + num_tokens, kv_tokens, before + pairs)
        self._tokens -= num_tokens
        self._least = max(0, self._least - num_tokens)
        if self._cost is not None:
            self._seconds -= self._cost.predict(StepLoad(0, num_tokens, 0, pairs)) - self._cost.predict(StepLoad())


class Budget(Protocol):
    max_num_batched_tokens: int  # rows of a step; the executor's buffers have so many

    def begin(self, decode_rows: int, kv_tokens: int) -> StepBudget:
        """For a step with so many decode rows, which read `kv_tokens` keys and values."""

    def may_join(self, decode_rows: int, kv_tokens: int) -> bool:
        """Whether another sequence may run, where all would then decode so many rows over so many keys and values."""


class TokenBudget:
    """A fixed number of rows per step, decode rows first: the most throughput."""

    def __init__(self, max_num_batched_tokens: int) -> None:
        _check_rows(max_num_batched_tokens)
        self.max_num_batched_tokens = max_num_batched_tokens

    def begin(self, decode_rows: int, kv_tokens: int) -> StepBudget:
        return StepBudget(StepLoad(decode_rows, 0, kv_tokens), self.max_num_batched_tokens - decode_rows)

    def may_join(self, decode_rows: int, kv_tokens: int) -> bool:
        return True


class LatencyBudget:
    """As much prefill as keeps a step within `itl_target_s` while somebody decodes, by what `cost` has learned.

    Sequences that would make steps too long even without prefill wait; alone, one always runs.
    """

    def __init__(self, cost: CostModel, itl_target_s: float, max_num_batched_tokens: int) -> None:
        _check_rows(max_num_batched_tokens)
        if not itl_target_s > 0:
            raise ValueError(f"itl_target_s must be above 0, got {itl_target_s}")
        self.max_num_batched_tokens = max_num_batched_tokens
        self._cost = cost
        self._aim_s = AIM * itl_target_s

    def begin(self, decode_rows: int, kv_tokens: int) -> StepBudget:
        load = StepLoad(decode_rows, 0, kv_tokens)
        tokens = self.max_num_batched_tokens - decode_rows
        if not decode_rows:
            return StepBudget(load, tokens)
        return StepBudget(load, tokens, self._aim_s - self._cost.predict(load), self._cost)

    def may_join(self, decode_rows: int, kv_tokens: int) -> bool:
        return decode_rows <= 1 or self._cost.predict(StepLoad(decode_rows, 0, kv_tokens)) <= self._aim_s


def _check_rows(max_num_batched_tokens: int) -> None:
    if max_num_batched_tokens < 1:
        raise ValueError(f"max_num_batched_tokens must be at least 1, got {max_num_batched_tokens}")


def _chunk_in(seconds: float, context: int, cost: CostModel) -> int:
    """The largest chunk after `context` tokens that adds at most `seconds`: the root of a quadratic."""
    if seconds <= 0:
        return 0
    _, _, token, _, pair = cost.coefficients
    linear, square = token + pair * (context + 0.5), pair / 2
    if square > 0:
        return int((math.sqrt(linear * linear + 4 * square * seconds) - linear) / (2 * square))
    return int(seconds / linear) if linear > 0 else 1 << 30
