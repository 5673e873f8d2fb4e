"""The arguments of the kernels' sampler for the sequences of a step.

A row depends on the request's parameters, its seed and its own tokens only, never on the step it is computed in.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from ....kernels.sample import ADJUSTMENT, ROW
from ....scheduler.plan import ScheduledSequence
from ...common.types import SamplingParams

Row = tuple[float, ...]  # in the order of ROW
PARAMETERS = tuple(ROW.fields or ())[2:-3]  # after seed and position, before logprobs and the range of the adjustments
_parameters = attrgetter(*PARAMETERS)
Adjustment = tuple[int, int, int, float]


@dataclass(frozen=True, slots=True)
class SamplingSpec:
    """The sampling parameters of one request. The scheduler passes it on without reading it."""

    params: SamplingParams
    seed: int  # of the client, or chosen by the engine
    stop_token_ids: frozenset[int]  # forbidden before min_tokens


def sampling_rows(sequences: Sequence[ScheduledSequence]) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Return the sampler's (rows, adjustments) for all samples in order, each after its own part of the context."""
    rows: list[Row] = []
    adjustments: list[Adjustment] = []
    for sequence in sequences:
        length = len(sequence.context)
        for position in range(length - sequence.num_samples + 1, length + 1):
            rows.append(_row(sequence, position, adjustments))
    return np.array(rows, ROW), np.array(adjustments, ADJUSTMENT)


def _row(sequence: ScheduledSequence, position: int, adjustments: list[Adjustment]) -> Row:
    """Return the row for the token after the first `position` tokens of the context, and append its adjustments."""
    spec, first = sequence.sampling, len(adjustments)
    assert isinstance(spec, SamplingSpec)
    adjustments.extend(_adjustments(spec, sequence.context, position, sequence.num_prompt_tokens))
    logprobs = -1 if spec.params.logprobs is None else spec.params.logprobs
    return (spec.seed, position, *_parameters(spec.params), logprobs, first, len(adjustments) - first)


def _adjustments(
    spec: SamplingSpec, context: Sequence[int], position: int, num_prompt_tokens: int
) -> Iterator[Adjustment]:
    """Yield (token id, count in the output, occurs at all, bias) of each logit that the request changes here."""
    p = spec.params
    bias = dict(p.logit_bias or {})
    if position - num_prompt_tokens < p.min_tokens:
        bias.update(dict.fromkeys(spec.stop_token_ids, float("-inf")))
    if p.repetition_penalty == 1 and p.presence_penalty == 0 and p.frequency_penalty == 0:
        yield from ((token, 0, 0, value) for token, value in bias.items())
        return
    counts = Counter(context[num_prompt_tokens:position])
    seen = set(context[:position]) if p.repetition_penalty != 1 else set(counts)
    for token in sorted(seen | bias.keys()):
        yield token, counts[token], int(token in seen), bias.get(token, 0.0)
