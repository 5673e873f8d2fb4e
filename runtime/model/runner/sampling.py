"""The arguments of the kernels' sampler for the sequences of a step.

A row depends on the request's parameters, its seed and its own tokens only, never on the step it is computed in.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ....kernels.sample import ADJUSTMENT, ROW
from ....scheduler.plan import ScheduledSequence
from ...common.types import SamplingParams

Row = tuple[float, ...]  # in the order of ROW
PARAMETERS = tuple(ROW.fields or ())[2:-4]  # after seed and position, before logprobs, adjustments and mask
_parameters = attrgetter(*PARAMETERS)
Adjustment = tuple[int, int, int, float]
GREEDY = SamplingParams()
CERTAIN = 1e30  # bias that makes a token the most likely one; logprobs are those before it


@dataclass(frozen=True, slots=True)
class SamplingSpec:
    """The sampling parameters of one request. The scheduler passes it on without reading it."""

    params: SamplingParams
    seed: int  # of the client, or chosen by the engine
    stop_token_ids: frozenset[int]  # forbidden before min_tokens
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class AllowedTokens:
    """The masks of one sequence's samples in a step. Without masks and error they are not ready."""

    masks: npt.NDArray[np.int32] | None = None  # [samples, words]: a bit per token of the vocabulary, the lowest first
    error: str | None = None


class Masks(Protocol):
    """The masks of a step's samples, which are computed while the rows are."""

    def wait(self) -> Mapping[int, AllowedTokens]:
        """Return the masks by request id; sequences that may generate any token are absent."""


def sampling_rows(sequences: Sequence[ScheduledSequence]) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Return the sampler's (rows, adjustments) for all samples in order, each after its own part of the context."""
    rows: list[Row] = []
    adjustments: list[Adjustment] = []
    for sequence in sequences:
        length = len(sequence.context)
        for position in range(length - sequence.num_samples + 1, length + 1):
            rows.append(_row(sequence, position, adjustments))
    return np.array(rows, ROW), np.array(adjustments, ADJUSTMENT)


def use_masks(
    rows: npt.NDArray[Any], owners: Sequence[int], allowed: Mapping[int, AllowedTokens]
) -> npt.NDArray[np.int32] | None:
    """Set the mask of each row whose owner has masks; return all masks [masks, words], None if there are none."""
    masks: list[npt.NDArray[np.int32]] = []
    for request_id, tokens in allowed.items():
        if tokens.masks is not None:
            first, count = owners.index(request_id), len(tokens.masks)
            rows["mask"][first : first + count] = np.arange(len(masks) + 1, len(masks) + 1 + count)
            masks.extend(tokens.masks)
    return np.stack(masks) if masks else None


def _row(sequence: ScheduledSequence, position: int, adjustments: list[Adjustment]) -> Row:
    """Return the row for the token after the first `position` tokens of the context, and append its adjustments."""
    spec, first = sequence.sampling, len(adjustments)
    assert isinstance(spec, SamplingSpec)
    logprobs = -1 if spec.params.logprobs is None else spec.params.logprobs
    num_given = sequence.num_prompt_tokens + len(sequence.echoed)
    if position < num_given:
        adjustments.append((sequence.echoed[position - sequence.num_prompt_tokens], 0, 0, CERTAIN))
        return (spec.seed, position, *_parameters(GREEDY), logprobs, first, 1, 0)
    adjustments.extend(_adjustments(spec, sequence.context, position, num_given))
    return (spec.seed, position, *_parameters(spec.params), logprobs, first, len(adjustments) - first, 0)


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
