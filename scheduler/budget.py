"""How much prefill joins the decode rows of a step.

It must not know requests or pages, only amounts. The one invariant: as long as a sequence is not decoding, at least one
prefill token is allowed, so prefill never starves.
"""

from __future__ import annotations

from typing import Protocol


class Budget(Protocol):
    def prefill_tokens(self, num_decode_rows: int) -> int:
        """The most prefill tokens that may run beside `num_decode_rows` decode rows."""


class TokenBudget:
    """A fixed number of rows per step, decode rows first; the executor's buffers have this many rows."""

    def __init__(self, max_num_batched_tokens: int) -> None:
        if max_num_batched_tokens < 1:
            raise ValueError(f"max_num_batched_tokens must be at least 1, got {max_num_batched_tokens}")
        self.max_num_batched_tokens = max_num_batched_tokens

    def prefill_tokens(self, num_decode_rows: int) -> int:
        return self.max_num_batched_tokens - num_decode_rows
