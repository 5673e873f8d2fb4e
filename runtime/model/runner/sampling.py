"""The arguments of the kernels' sampler for the sequences of a step.

A row depends on the request's parameters, its seed and its own tokens only, never on the step it is computed in.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ....kernels.sample import ADJUSTMENT, ROW
from ....scheduler.plan import ScheduledSequence
from ...common.types import SamplingParams
from .reasoning import CERTAIN, ReasoningBudget

Ints = npt.NDArray[np.int32]
Row = tuple[float, ...]  # values in the order of ROW
PARAMETERS = tuple(ROW.fields or ())[2:-4]  # fields after seed and position, before logprobs, adjustments and mask
_parameters = attrgetter(*PARAMETERS)
Adjustment = tuple[int, int, int, float]
GREEDY = SamplingParams()


@dataclass(frozen=True, slots=True)
class SamplingSpec:
    """The sampling parameters of one request. The scheduler passes it on without reading it."""

    params: SamplingParams
    seed: int  # seed by the client, or chosen by the engine
    stop_token_ids: frozenset[int]  # forbidden before min_tokens
    tenant: str = ""
    has_own_grammar: bool = False  # a grammar of tool calls without a client's rules: it is never ambiguous
    reasoning: ReasoningBudget | None = None  # None: reasoning has no limit
    adapter: str = ""  # key of the adapter that changes the model; empty: none


@dataclass(frozen=True, slots=True)
class AllowedTokens:
    """The masks of a step's samples. Sequences that may generate any token have neither masks nor an entry."""

    masks: Ints | None = None  # [masks, words]: a bit per token of the vocabulary, the lowest first
    first: Mapping[int, int] = field(default_factory=dict)  # request id -> its first sample's mask; others follow
    missing: Mapping[int, str | None] = field(default_factory=dict)  # request id -> the error; None: not ready in time


class Masks(Protocol):
    """The masks of a step's samples, which are computed at the same time as the rows."""

    def wait(self) -> AllowedTokens:
        """Wait for the masks, and return them with the missing requests."""


def sampling_rows(
    sequences: Sequence[ScheduledSequence], first_masks: Mapping[int, int]
) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Return the sampler's (rows, adjustments) for all samples in order, each after its own part of the context.

    `first_masks` are the masks of each sequence's first sample, by request id.
    """
    rows: list[Row] = []
    adjustments: list[Adjustment] = []
    for sequence in sequences:
        length = len(sequence.context)
        mask = first_masks.get(sequence.request_id, -1) + 1
        for position in range(length - sequence.num_samples + 1, length + 1):
            rows.append(_row(sequence, position, mask, adjustments))
            mask += mask > 0
    return np.array(rows, ROW), np.array(adjustments, ADJUSTMENT)


def _row(sequence: ScheduledSequence, position: int, mask: int, adjustments: list[Adjustment]) -> Row:
    """Return the row for the token after the first `position` tokens of the context, and append its adjustments."""
    spec = sequence.sampling
    first = len(adjustments)
    assert isinstance(spec, SamplingSpec)
    logprobs = -1 if spec.params.logprobs is None else spec.params.logprobs
    num_given = sequence.num_prompt_tokens + len(sequence.echoed)
    if position < num_given:
        adjustments.append((sequence.echoed[position - sequence.num_prompt_tokens], 0, 0, CERTAIN))
        return (spec.seed, position, *_parameters(GREEDY), logprobs, first, 1, 0)
    budget = spec.reasoning
    settled = len(sequence.context) - sequence.num_samples + 1
    ends = {} if budget is None else budget.bias(sequence.context, num_given, position, settled)
    adjustments.extend(_adjustments(spec, sequence.context, position, num_given, ends))
    parameters = _parameters(GREEDY if CERTAIN in ends.values() else spec.params)
    return (spec.seed, position, *parameters, logprobs, first, len(adjustments) - first, mask)


def _adjustments(
    spec: SamplingSpec, context: Sequence[int], position: int, num_prompt_tokens: int, ends: Mapping[int, float]
) -> Iterator[Adjustment]:
    """Yield (token id, count in the output, occurs at all, bias) of each logit that the request changes here.

    `ends` are the biases that end reasoning; they replace the request's own.
    """
    p = spec.params
    bias = {**(p.logit_bias or {}), **ends}
    if position - num_prompt_tokens < p.min_tokens:
        bias.update(dict.fromkeys(spec.stop_token_ids, float("-inf")))
    if p.repetition_penalty == 1 and p.presence_penalty == 0 and p.frequency_penalty == 0:
        yield from ((token, 0, 0, value) for token, value in bias.items())
        return
    counts = Counter(context[num_prompt_tokens:position])
    seen = set(context[:position]) if p.repetition_penalty != 1 else set(counts)
    for token in sorted(seen | bias.keys()):
        yield token, counts[token], int(token in seen), bias.get(token, 0.0)
