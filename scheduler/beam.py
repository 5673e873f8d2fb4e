"""Beam search: selects the hypotheses that continue, collects the complete ones, and decides when the search ends.

Must not import pages or steps; the scheduler forks and releases the tables. The result depends only on the candidates.
Ties go to the earlier hypothesis, then to the lower token id.

The rules are Hugging Face's: the 2 * width likeliest continuations of each live hypothesis are candidates. Among
the best `width` candidates, a hypothesis with a stop token at its end is complete. The best `width` candidates without
a stop token continue. A hypothesis is scored by its log probability divided by length ** length_penalty.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from .plan import SampledToken


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """One complete continuation of the prompt."""

    tokens: tuple[SampledToken, ...]  # each with its logprob; ends with the stop token, if there is one
    cumulative_logprob: float
    score: float  # higher is better
    finish_reason: Literal["stop", "length"]


class Survivor(NamedTuple):
    """A hypothesis of the next step: the index of the live hypothesis it continues, and the token it adds."""

    parent: int
    token: SampledToken
    cumulative_logprob: float


class _Path(NamedTuple):
    """A live hypothesis."""

    tokens: tuple[SampledToken, ...]
    cumulative_logprob: float


class BeamSpec(NamedTuple):
    """The arguments of `BeamSearch`, as part of a request."""

    width: int
    length_penalty: float = 1.0
    num_results: int | None = None


class BeamSearch:
    """The search of one request: call `advance` with each step's samples until `is_done`, then read `results`."""

    def __init__(self, width: int, length_penalty: float = 1.0, num_results: int | None = None) -> None:
        if width < 1 or (num_results is not None and not 1 <= num_results <= width):
            raise ValueError(f"a beam search of width {width} cannot return {num_results} results")
        self.width = width
        self.length_penalty = length_penalty
        self.num_results = num_results or width
        self._live = [_Path((), 0.0)]
        self._complete: list[Hypothesis] = []
        self.is_done = False

    def advance(
        self, samples: Sequence[SampledToken], stop_token_ids: frozenset[int], min_tokens: int, max_tokens: int
    ) -> list[Survivor]:
        """Take one sample with 2 * width top logprobs per live hypothesis, in order. Return the next hypotheses."""
        length = len(self._live[0].tokens) + 1
        may_stop = length >= min_tokens
        survivors: list[Survivor] = []
        for rank, candidate in enumerate(sorted(self._candidates(samples), key=_order)):
            if not may_stop or candidate.token.token_id not in stop_token_ids:
                survivors.append(candidate)
            elif rank < self.width:
                self._finish(self._path(candidate), "stop")
        del survivors[self.width :]
        self._live = [self._path(survivor) for survivor in survivors]
        if length >= max_tokens:
            for path in self._live:
                self._finish(path, "length")
        self.is_done = length >= max_tokens or not survivors or self._cannot_improve()
        return survivors

    @property
    def results(self) -> list[Hypothesis]:
        """The best complete hypotheses, best first; among equals, the one found first."""
        return sorted(self._complete, key=lambda found: -found.score)[: self.num_results]

    def _candidates(self, samples: Sequence[SampledToken]) -> list[Survivor]:
        return [
            Survivor(parent, SampledToken(sample.request_id, token, logprob), path.cumulative_logprob + logprob)
            for parent, (path, sample) in enumerate(zip(self._live, samples, strict=True))
            for token, logprob in sample.top_logprobs[: 2 * self.width]
        ]

    def _path(self, survivor: Survivor) -> _Path:
        return _Path((*self._live[survivor.parent].tokens, survivor.token), survivor.cumulative_logprob)

    def _finish(self, path: _Path, reason: Literal["stop", "length"]) -> None:
        score = self._score(path.cumulative_logprob, len(path.tokens))
        self._complete.append(Hypothesis(path.tokens, path.cumulative_logprob, score, reason))

    def _score(self, cumulative_logprob: float, length: int) -> float:
        return cumulative_logprob / float(length**self.length_penalty)

    def _cannot_improve(self) -> bool:
        """Return whether `width` hypotheses are complete and no live hypothesis scores better now.

        This is the usual rule; it is exact for a length penalty of 0.
        """
        if len(self._complete) < self.width:
            return False
        best_live = max(self._score(path.cumulative_logprob, len(path.tokens)) for path in self._live)
        return self.results[-1].score >= best_live


def _order(survivor: Survivor) -> tuple[float, int, int]:
    return -survivor.cumulative_logprob, survivor.parent, survivor.token.token_id
