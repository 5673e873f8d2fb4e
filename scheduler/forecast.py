"""When a request would get its first token, as well as can be told before any work is done.

It must not know requests, only amounts. The one invariant: it is silent until costs have been measured, rather than
guess.
"""

from __future__ import annotations

from .budget import Budget
from .cost import CostModel, StepLoad

LENGTH_MEMORY = 0.95  # per finished request


class Forecast:
    """Predicted waits, from what steps cost and how long outputs have been of late."""

    def __init__(self, cost: CostModel, budget: Budget, max_num_seqs: int) -> None:
        self._cost = cost
        self._budget = budget
        self._max_num_seqs = max_num_seqs
        self._mean_output: float | None = None

    def note_output(self, num_tokens: int) -> None:
        """A request ended after so many output tokens."""
        mean = self._mean_output
        self._mean_output = num_tokens if mean is None else LENGTH_MEMORY * mean + (1 - LENGTH_MEMORY) * num_tokens

    def wait_s(self, prefill_tokens: int, position: int, running: int, kv_tokens: int) -> float | None:
        """Seconds to the first token of a request with `position` others ahead of it in the queue.

        `prefill_tokens` are to be computed until then, its own included; `running` sequences hold `kv_tokens`.
        """
        if not self._cost.is_warm:
            return None
        step_s = self._cost.predict(StepLoad(running, 0, kv_tokens))
        per_step = self._budget.begin(min(running, self._max_num_seqs - 1), kv_tokens).prefill_tokens(0)
        prefill_s = self._cost.coefficients.prefill_token * prefill_tokens + -(-prefill_tokens // per_step) * step_s
        return prefill_s + self._place_s(position, running, step_s)

    def _place_s(self, position: int, running: int, step_s: float) -> float:
        """Until enough of those that run have ended: of n, one ends every (output length / n) steps."""
        must_end = running + position + 1 - self._max_num_seqs
        if must_end <= 0 or self._mean_output is None:
            return 0.0
        return must_end * self._mean_output * step_s / self._max_num_seqs
