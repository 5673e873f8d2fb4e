"""Reasoning in a sequence of token ids: where it begins and ends, and the token that ends it at a budget.

Everything depends on the sequence's own tokens only, so the forced token is the same in any batch, after a preemption
and in another engine process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
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


@dataclass(frozen=True)
class ReasoningBudget:
    """The most tokens of reasoning in one output, its markers not counted.

    Each output has a budget of its own, which remembers the reasoning that it has read: a step reads new tokens only.
    """

    markers: ReasoningMarkers
    num_tokens: int
    begun: bool  # the prompt ends with the beginning of the reasoning

    def bias(self, context: Sequence[int], first: int, position: int, settled: int) -> dict[int, float]:
        """Return the bias of each token that is forced or forbidden after the first `position` tokens of the context.

        The output begins at `first`. The first `settled` tokens of the context never change; draft tokens follow. A
        forced token has the bias `CERTAIN`.
        """
        if position - first < self.num_tokens:
            return {}
        markers = self.markers
        found = read_reasoning(markers, context, position, self._read_settled(context, first, settled))
        if found.num_tokens < self.num_tokens:
            return {}
        if found.is_open:
            return {markers.close: CERTAIN}
        # A model that may reason again would begin the next part, only for its end to be forced.
        if markers.repeats and len(markers.open) > 1 and position > first and context[position - 1] == markers.open[0]:
            return {markers.open[1]: float("-inf")}
        return {}

    @cached_property
    def _settled(self) -> list[FoundReasoning]:
        """The last result of `_read_settled`; not a field, so it is neither compared nor sent."""
        return []

    def _read_settled(self, context: Sequence[int], first: int, settled: int) -> FoundReasoning:
        """Return the reasoning in the output's settled tokens."""
        last = self._settled[0] if self._settled else FoundReasoning(first, is_open=self.begun)
        self._settled[:] = [read_reasoning(self.markers, context, settled, last)]
        return self._settled[0]


class FoundReasoning(NamedTuple):
    """The reasoning in an output up to a position of its context."""

    position: int  # position of the first token that is not read
    num_tokens: int = 0  # tokens between the markers
    is_open: bool = False  # the position is within reasoning
    is_over: bool = False  # no reasoning can begin any more


def find_reasoning(
    markers: ReasoningMarkers, context: Sequence[int], first: int, end: int, *, begun: bool
) -> FoundReasoning:
    """Return the reasoning in the tokens `first` to `end` of the context.

    `begun`: the prompt ends with the beginning of the reasoning.
    """
    return read_reasoning(markers, context, end, FoundReasoning(first, is_open=begun))


def read_reasoning(markers: ReasoningMarkers, context: Sequence[int], end: int, last: FoundReasoning) -> FoundReasoning:
    """Return the reasoning in the tokens up to `end` of the context, where `last` is known."""
    position, num_tokens, is_open, is_over = last
    while position < end and not is_over:
        if is_open:
            close = _index(context, markers.close, position, end)
            until = end if close is None else close
            num_tokens += until - position
            is_open = close is None
            is_over = not (is_open or markers.repeats)
            position = until if is_open else until + 1
            continue
        place = _place_of_open(markers, context, position, end)
        after = place + len(markers.open)
        if after > end:
            return FoundReasoning(place, num_tokens)
        is_open = tuple(context[place:after]) == markers.open
        is_over = not (is_open or markers.repeats)
        position = after if is_open else place + 1
    return FoundReasoning(position, num_tokens, is_open, is_over)


def _place_of_open(markers: ReasoningMarkers, context: Sequence[int], position: int, end: int) -> int:
    """Return the next position at which `open` may begin, or `end`. Only white space may come before a single part."""
    if markers.repeats:
        place = _index(context, markers.open[0], position, end)
        return end if place is None else place
    while position < end and context[position] in markers.space:
        position += 1
    return position


def _index(context: Sequence[int], token_id: int, first: int, end: int) -> int | None:
    try:
        return context.index(token_id, first, end)
    except ValueError:
        return None
