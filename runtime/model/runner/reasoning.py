"""Reasoning in a sequence of token ids: where it begins and ends, and the token that ends it at a budget.

Everything depends on the sequence's own tokens only, so the forced token is the same in any batch, after a preemption
and in another engine process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

CERTAIN = 1e30  # bias that makes a token the most likely one; logprobs do not include it


@dataclass(frozen=True, slots=True)
class ReasoningMarkers:
    """The tokens around a model's reasoning. An output may begin with `open`; its prompt may end with `open`."""

    open: tuple[int, ...]
    close: int
    space: tuple[int, ...] = ()  # tokens of white space, which may surround `open`
    repeats: bool = False  # reasoning may begin again after its end, anywhere in the output

    def begins_in(self, prompt: Sequence[int]) -> bool:
        """Return whether the prompt ends with the beginning of the reasoning."""
        end = len(prompt)
        while end and prompt[end - 1] in self.space:
            end -= 1
        return tuple(prompt[max(0, end - len(self.open)) : end]) == self.open


@dataclass(frozen=True, slots=True)
class ReasoningBudget:
    """The most tokens of reasoning in one output, its markers not counted."""

    markers: ReasoningMarkers
    num_tokens: int
    begun: bool  # the prompt ends with the beginning of the reasoning

    def bias(self, context: Sequence[int], first: int, position: int) -> dict[int, float]:
        """Return the bias of each token that is forced or forbidden after the first `position` tokens of the context.

        The output begins at `first`. A forced token has the bias `CERTAIN`.
        """
        if position - first < self.num_tokens:
            return {}
        markers = self.markers
        found = find_reasoning(markers, context, first, position, begun=self.begun)
        if found.num_tokens < self.num_tokens:
            return {}
        if found.is_open:
            return {markers.close: CERTAIN}
        # A model that may reason again would begin the next part, only for its end to be forced.
        if markers.repeats and len(markers.open) > 1 and position > first and context[position - 1] == markers.open[0]:
            return {markers.open[1]: float("-inf")}
        return {}


class FoundReasoning(NamedTuple):
    """The reasoning in the tokens of an output."""

    num_tokens: int  # tokens between the markers
    is_open: bool  # the output ends within reasoning


def find_reasoning(
    markers: ReasoningMarkers, context: Sequence[int], first: int, end: int, *, begun: bool
) -> FoundReasoning:
    """Return the reasoning in the tokens `first` to `end` of the context.

    `begun`: the prompt ends with the beginning of the reasoning.
    """
    num_tokens = 0
    start = first if begun else _begin(markers, context, first, end, is_first=True)
    while start is not None:
        close = _index(context, markers.close, start, end)
        num_tokens += (end if close is None else close) - start
        if close is None:
            return FoundReasoning(num_tokens, True)
        start = _begin(markers, context, close + 1, end) if markers.repeats else None
    return FoundReasoning(num_tokens, False)


def _begin(
    markers: ReasoningMarkers, context: Sequence[int], first: int, end: int, *, is_first: bool = False
) -> int | None:
    """Return the position after the next `open`, or None. `is_first`: only white space may come before it."""
    size = len(markers.open)
    if is_first and not markers.repeats:
        while first < end and context[first] in markers.space:
            first += 1
        is_open = first + size <= end and tuple(context[first : first + size]) == markers.open
        return first + size if is_open else None
    while (place := _index(context, markers.open[0], first, end)) is not None:
        if place + size <= end and tuple(context[place : place + size]) == markers.open:
            return place + size
        first = place + 1
    return None


def _index(context: Sequence[int], token_id: int, first: int, end: int) -> int | None:
    try:
        return context.index(token_id, first, end)
    except ValueError:
        return None
