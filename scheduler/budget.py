"""The budget of a step: how many tokens it may compute, and how long new requests would wait for their first token.

Must not import requests or pages.

**A latency target** limits a step to `TARGET_SHARE` of the target, as predicted by the cost model:

1. Decoding sequences come first. A sequence that would make decoding alone exceed the limit waits.
2. Prefill gets the time that is left, and at least `LEAST_PREFILL` tokens.
3. Where decoding alone exceeds the limit (contexts grew, or the machine is too slow), prefill gets `PREFILL_SHARE` of
   the step: the target is missed without prefill too, and a prompt must not wait for the end of other outputs.
4. Where a single sequence exceeds the limit, no sequence waits: running fewer would not meet the target.
"""

from __future__ import annotations

import math
from typing import Protocol

from .cost import CostModel, StepLoad, chunk_pairs

TARGET_SHARE = 0.9  # share of the latency target to plan for; the rest is for work around a step and for errors
LEAST_PREFILL = 16  # prefill tokens in every step, whatever the target, so that a prompt finishes in bounded time
PREFILL_SHARE = 0.3  # share of a step's time that prefill gets where decoding alone exceeds the limit
OUTPUT_MEMORY = 0.95  # weight of the earlier mean output length, per finished request


class Budget(Protocol):
    """How much work a step may contain."""

    max_num_batched_tokens: int  # rows of a step; the model runner's buffers have this size

    def begin(self, decode_rows: int, kv_tokens: int) -> StepBudget:
        """Return the budget of a step with `decode_rows` decode rows that read `kv_tokens` keys and values."""

    def may_join(self, decode_rows: int, kv_tokens: int) -> bool:
        """Return whether `decode_rows` sequences with `kv_tokens` tokens together may run, the new one included."""


class TokenBudget:
    """A fixed number of rows per step, decode rows first: the highest throughput."""

    def __init__(self, max_num_batched_tokens: int) -> None:
        _check_rows(max_num_batched_tokens)
        self.max_num_batched_tokens = max_num_batched_tokens

    def begin(self, decode_rows: int, kv_tokens: int) -> StepBudget:
        return StepBudget(StepLoad(decode_rows, 0, kv_tokens), self.max_num_batched_tokens - decode_rows)

    def may_join(self, decode_rows: int, kv_tokens: int) -> bool:
        return True


class LatencyBudget:
    """Steps of at most `itl_target_s` while any sequence decodes, as predicted by `cost`; see the rules above."""

    def __init__(self, cost: CostModel, itl_target_s: float, max_num_batched_tokens: int) -> None:
        _check_rows(max_num_batched_tokens)
        if not itl_target_s > 0:
            raise ValueError(f"itl_target_s must be above 0, got {itl_target_s}")
        self.max_num_batched_tokens = max_num_batched_tokens
        self._cost = cost
        self._target_s = itl_target_s
        self._step_s = TARGET_SHARE * itl_target_s

    def begin(self, decode_rows: int, kv_tokens: int) -> StepBudget:
        load = StepLoad(decode_rows, 0, kv_tokens)
        tokens = self.max_num_batched_tokens - decode_rows
        if not decode_rows:
            return StepBudget(load, tokens)
        decode_s = self._cost.predict(load)
        left_s = self._step_s - decode_s
        if left_s < 0:
            left_s = decode_s * PREFILL_SHARE / (1 - PREFILL_SHARE)
        return StepBudget(load, tokens, left_s, self._cost, decode_s / self._target_s if self._cost.is_warm else 0.0)

    def may_join(self, decode_rows: int, kv_tokens: int) -> bool:
        predict = self._cost.predict
        if decode_rows <= 1 or predict(StepLoad(decode_rows, 0, kv_tokens)) <= self._step_s:
            return True
        return predict(StepLoad(1, 0, kv_tokens // decode_rows)) > self._step_s


class StepBudget:
    """The rest of one step: rows, and seconds if there is a latency target.

    Allows at least `LEAST_PREFILL` prefill tokens as long as rows are left, so that prefill never starves.
    """

    __slots__ = ("_cost", "_guaranteed_tokens", "_kept_seconds", "_seconds", "_tokens", "decode_over_target", "load")

    def __init__(
        self,
        load: StepLoad,
        tokens: int,
        seconds: float = math.inf,
        cost: CostModel | None = None,
        decode_over_target: float = 0.0,
    ) -> None:
        self.load = load  # load of the step so far: decode rows, then what `spend` adds
        self.decode_over_target = decode_over_target  # predicted decoding time / target; 0 until costs are measured
        self._tokens = tokens
        self._seconds = seconds
        self._kept_seconds = 0.0
        self._cost = cost
        self._guaranteed_tokens = LEAST_PREFILL

    def prefill_tokens(self, context: int) -> int:
        """Return the most prefill tokens that a sequence with `context` computed tokens may add."""
        if self._cost is None:
            return self._tokens
        fits = _chunk_in(self._seconds, context, self._cost)
        return min(self._tokens, max(fits, self._guaranteed_tokens))

    @property
    def rows_left(self) -> int:
        """Rows that are left, however long they take."""
        return self._tokens

    @property
    def seconds_left(self) -> float | None:
        """Seconds that are left under the latency target; None if it does not limit this step."""
        return None if self._cost is None else max(0.0, self._seconds) + self._kept_seconds

    def keep_half(self) -> None:
        """Keep half of the seconds for other work than prefill."""
        self._seconds /= 2
        self._kept_seconds = self._seconds if self._cost is not None else 0.0

    @property
    def limit(self) -> str:
        """The resource that the step lacks when `prefill_tokens` is 0."""
        return "tokens" if self._tokens <= 0 else "latency"

    def spend(self, num_tokens: int, context: int) -> None:
        """Take `num_tokens` prefill tokens of a sequence with `context` computed tokens from the budget."""
        pairs = chunk_pairs(context, num_tokens)
        rows, tokens, kv_tokens, earlier_pairs = self.load
        self.load = StepLoad(rows, tokens + num_tokens, kv_tokens, earlier_pairs + pairs)
        self._tokens -= num_tokens
        self._guaranteed_tokens = max(0, self._guaranteed_tokens - num_tokens)
        if self._cost is not None:
            self._seconds -= self._cost.predict(StepLoad(0, num_tokens, 0, pairs)) - self._cost.predict(StepLoad())


class WaitForecast:
    """Predicts the time to a request's first token from step costs and recent output lengths."""

    def __init__(self, cost: CostModel, budget: Budget, max_num_seqs: int) -> None:
        self._cost = cost
        self._budget = budget
        self._max_num_seqs = max_num_seqs
        self._mean_output: float | None = None

    def note_output(self, num_tokens: int) -> None:
        """Record that a request ended after `num_tokens` output tokens."""
        mean = self._mean_output
        self._mean_output = num_tokens if mean is None else OUTPUT_MEMORY * mean + (1 - OUTPUT_MEMORY) * num_tokens

    def wait_s(self, prefill_tokens: int, position: int, running: int, kv_tokens: int) -> float | None:
        """Return the seconds to the first token of a request with `position` requests ahead of it in the queue.

        `prefill_tokens` must be computed before it, its own prompt included; `running` sequences hold `kv_tokens`
        tokens. Returns None until step costs have been measured.
        """
        if not self._cost.is_warm:
            return None
        step_s = self._cost.predict(StepLoad(running, 0, kv_tokens))
        per_step = self._budget.begin(min(running, self._max_num_seqs - 1), kv_tokens).prefill_tokens(0)
        prefill_s = self._cost.coefficients.prefill_token * prefill_tokens + -(-prefill_tokens // per_step) * step_s
        return prefill_s + self._slot_s(position, running, step_s)

    def _slot_s(self, position: int, running: int, step_s: float) -> float:
        """Return the seconds until a slot is free: of n sequences, one ends every (output length / n) steps."""
        must_end = running + position + 1 - self._max_num_seqs
        if must_end <= 0 or self._mean_output is None:
            return 0.0
        return must_end * self._mean_output * step_s / self._max_num_seqs


def _check_rows(max_num_batched_tokens: int) -> None:
    if max_num_batched_tokens < 1:
        raise ValueError(f"max_num_batched_tokens must be at least 1, got {max_num_batched_tokens}")


def _chunk_in(seconds: float, context: int, cost: CostModel) -> int:
    """Return the largest chunk after `context` tokens that takes at most `seconds`: the root of a quadratic."""
    if seconds <= 0:
        return 0
    _, _, token, _, pair = cost.coefficients
    linear = token + pair * (context + 0.5)
    square = pair / 2
    if square > 0:
        return int((math.sqrt(linear * linear + 4 * square * seconds) - linear) / (2 * square))
    return int(seconds / linear) if linear > 0 else 1 << 30
