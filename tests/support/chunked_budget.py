"""A budget that limits the prefill tokens of one sequence per step, so that tests can choose how prompts are split."""

from __future__ import annotations

from typing import cast

from quire.scheduler import Budget, StepBudget, StepLoad


class ChunkedBudget:
    """Another budget, with at most `max_chunk` prefill tokens per sequence and step."""

    def __init__(self, budget: Budget, max_chunk: int) -> None:
        self.max_num_batched_tokens = budget.max_num_batched_tokens
        self._budget = budget
        self._max_chunk = max_chunk

    def begin(self, decode_rows: int, kv_tokens: int) -> StepBudget:
        return cast(StepBudget, _ChunkedStep(self._budget.begin(decode_rows, kv_tokens), self._max_chunk))

    def may_join(self, decode_rows: int, kv_tokens: int) -> bool:
        return self._budget.may_join(decode_rows, kv_tokens)


class _ChunkedStep:
    def __init__(self, step: StepBudget, max_chunk: int) -> None:
        self._step = step
        self._max_chunk = max_chunk

    @property
    def load(self) -> StepLoad:
        return self._step.load

    @property
    def decode_over_target(self) -> float:
        return self._step.decode_over_target

    @property
    def limit(self) -> str:
        return self._step.limit

    @property
    def rows_left(self) -> int:
        return self._step.rows_left

    @property
    def seconds_left(self) -> float | None:
        return self._step.seconds_left

    def prefill_tokens(self, context: int) -> int:
        return min(self._step.prefill_tokens(context), self._max_chunk)

    def spend(self, num_tokens: int, context: int) -> None:
        self._step.spend(num_tokens, context)
