"""The contract between deciding and computing: a `StepPlan` goes out, a `StepResult` comes back.

Both are immutable; nothing else crosses. What there is one of per sequence and step is a named tuple, which is cheaper
to make than a frozen dataclass. A plan knows no tensor: page ids, positions and token ids are all a kernel needs.
`sampling` is carried for the executor and never looked into here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class ScheduledSequence(NamedTuple):
    """One sequence's share of a step: run `token_ids` at `first_position …`, sample after its last `num_samples` rows.

    0 samples: its prefill goes on. 1: the next token. More: all rows but the first of them hold guesses of the tokens
    to come, to be verified. `tables` has the sequence's page table for each layer group; of the first
    `ceil((first_position + len(token_ids)) / page_size)` entries those that the group's window reaches are owned for
    the whole step. `context` is every token up to the last row, guesses included, read-only; sample j of them is drawn
    with the first `len(context) - num_samples + 1 + j` tokens of it, and its first `num_prompt_tokens` are the prompt.
    """

    request_id: int
    tables: Sequence[Sequence[int]]
    first_position: int
    token_ids: Sequence[int]
    num_samples: int
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


class SampledToken(NamedTuple):
    """The outcome of one sample: a token, or `error` when its logits could not be sampled (NaN)."""

    request_id: int
    token_id: int
    logprob: float | None = None  # natural log, raw distribution; None unless asked for
    top_logprobs: tuple[tuple[int, float], ...] = ()
    error: str | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """Sampled tokens in the plan's order, a sequence's own one after another, and the seconds the step took."""

    step_id: int
    sampled: tuple[SampledToken, ...]
    duration_s: float
