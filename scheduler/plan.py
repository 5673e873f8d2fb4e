"""The contract between deciding and computing: a `StepPlan` goes out, a `StepResult` comes back.

Both are frozen; nothing else crosses. A plan knows no tensor: page ids, positions and token ids are all a kernel needs.
`sampling` is carried for the executor and never looked into here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """One sequence's share of a step: run `token_ids` at `first_position …`; if `samples`, sample from the last row.

    `page_ids` is the sequence's page table; the first `ceil((first_position + len(token_ids)) / page_size)` entries are
    valid and owned for the whole step. `context` is every token known so far (prompt + generated), read-only and
    complete up to the sampled position; penalties are computed from it, and its first `num_prompt_tokens` tokens are
    the prompt.
    """

    request_id: int
    page_ids: Sequence[int]
    first_position: int
    token_ids: Sequence[int]
    samples: bool
    sampling: object
    context: Sequence[int]
    num_prompt_tokens: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step. Decode rows come first, then prefill chunks, each in admission order. Never empty when executed."""

    step_id: int
    sequences: tuple[ScheduledSequence, ...]
    num_decode_rows: int
    num_prefill_tokens: int


@dataclass(frozen=True, slots=True)
class SampledToken:
    """The outcome for one sequence with `samples`: a token, or `error` when its logits could not be sampled (NaN)."""

    request_id: int
    token_id: int
    logprob: float | None = None  # natural log, raw distribution; None unless asked for
    top_logprobs: tuple[tuple[int, float], ...] = ()
    error: str | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """Sampled tokens in the plan's order (sequences without `samples` have none) and the seconds the step took."""

    step_id: int
    sampled: tuple[SampledToken, ...]
    duration_s: float
