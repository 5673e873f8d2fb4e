"""Drafters: sources of draft tokens, behind one interface.

Must not import the planner or the scheduler. A drafter may propose any tokens: only tokens that the model samples
are accepted. A drafter must not show one tenant's text in the speed of another tenant's requests.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from .request import Request
from .suffix_automaton import ROOT, SuffixAutomaton

LONGEST = 4  # most tokens of a run that prompt lookup searches
SHORTEST = 2  # fewest tokens of a run that is searched
LEAD_TOKENS = 8  # last tokens of a prompt that begin the output's text in the history
MAX_BEHIND = 256  # most tokens that are added to a history at once: the text of a request continues after a gap
HISTORY_TOKENS = 1 << 15  # most tokens of the history of one tenant; about 400 bytes each
ALL_HISTORY_TOKENS = 2 * HISTORY_TOKENS  # the same for all tenants together


class Drafter(Protocol):
    """A source of draft tokens for running requests."""

    def propose(self, request: Request, limit: int) -> Sequence[int]:
        """Return up to `limit` tokens that may follow the request's tokens, none if there is no proposal."""

    def forget(self, request: Request) -> None:
        """Drop the data of a request that has ended."""


class PromptLookup:
    """Proposes the tokens that followed the last tokens of a request where these occurred earlier in it.

    Good for text that quotes its prompt (code, summaries, tables).
    """

    def __init__(self) -> None:
        self._indexes: dict[int, NGramIndex] = {}  # request id -> index, from the first proposal to the request's end

    def propose(self, request: Request, limit: int) -> Sequence[int]:
        """See `Drafter.propose`."""
        index = self._indexes.get(request.request_id)
        if index is None:
            index = self._indexes[request.request_id] = NGramIndex()
        index.extend(request.token_ids)
        return index.draft(request.token_ids, limit)

    def forget(self, request: Request) -> None:
        """See `Drafter.forget`."""
        self._indexes.pop(request.request_id, None)


class NGramIndex:
    """The last position of each short run of tokens in one text. Extending the index costs O(1) per token."""

    def __init__(self) -> None:
        self._ends: tuple[dict[tuple[int, ...], int], ...] = tuple({} for _ in range(SHORTEST, LONGEST + 1))
        self._num_indexed = 0

    def extend(self, tokens: Sequence[int]) -> None:
        """Index `tokens`, which start with the tokens indexed before.

        The last token is left out: nothing follows it yet.
        """
        for end in range(max(self._num_indexed, 1), len(tokens)):
            for size, ends in enumerate(self._ends, SHORTEST):
                if end >= size:
                    ends[tuple(tokens[end - size : end])] = end
        self._num_indexed = max(self._num_indexed, len(tokens))

    def draft(self, tokens: Sequence[int], limit: int) -> list[int]:
        """Return up to `limit` tokens that followed the longest indexed run that `tokens` ends with."""
        for size in range(LONGEST, SHORTEST - 1, -1):
            end = self._ends[size - SHORTEST].get(tuple(tokens[-size:])) if len(tokens) >= size else None
            if end is not None:
                return list(tokens[end : end + limit])
        return []


@dataclass(slots=True)
class HistoryPlace:
    """The part of a request's text that is in its tenant's history."""

    salt: bytes
    generation: int = -1  # number of the history
    state: int = ROOT  # state of the text
    end: int = 0  # tokens of the request before the next one to add


class SuffixLookup:
    """Proposes the tokens that followed the longest run a request ends with in recent outputs of the same tenant.

    Requests share a history exactly where they may share cached pages. A history that is full starts again, and the
    history that was unused for longest is dropped first.
    """

    def __init__(self) -> None:
        self.num_tokens = 0  # tokens of all histories
        # salt -> (generation, history), the history that was unused for longest first
        self._histories: OrderedDict[bytes, tuple[int, SuffixAutomaton]] = OrderedDict()
        self._num_histories = 0  # histories that were begun
        self._places: dict[int, HistoryPlace] = {}  # request id -> place

    def propose(self, request: Request, limit: int) -> Sequence[int]:
        """See `Drafter.propose`."""
        place = self._places.get(request.request_id)
        if place is None:
            place = self._places[request.request_id] = HistoryPlace(request.spec.prefix_salt)
        return self._add(request, place).continuation(place.state, SHORTEST, limit)

    def forget(self, request: Request) -> None:
        """See `Drafter.forget`. The history keeps the text."""
        place = self._places.pop(request.request_id, None)
        if place is not None:
            self._add(request, place)

    def _add(self, request: Request, place: HistoryPlace) -> SuffixAutomaton:
        """Add the request's new tokens to its history, and return the history."""
        generation, history = self._history(place.salt)
        tokens = request.token_ids
        count = len(tokens)
        if place.generation != generation or count - place.end > MAX_BEHIND:
            place.generation = generation
            place.state = ROOT
            place.end = max(request.num_prompt_tokens - LEAD_TOKENS, count - MAX_BEHIND, 0)
        state = place.state
        for index in range(place.end, count):
            state = history.extend(state, tokens[index])
        self.num_tokens += count - place.end
        place.state = state
        place.end = count
        while self.num_tokens > ALL_HISTORY_TOKENS:
            self._drop(next(iter(self._histories)))
        return history

    def _history(self, salt: bytes) -> tuple[int, SuffixAutomaton]:
        """Return the salt's history and its generation: a new one if there is none, or if it is full."""
        found = self._histories.get(salt)
        if found is not None and found[1].num_tokens < HISTORY_TOKENS:
            self._histories.move_to_end(salt)
            return found
        if found is not None:
            self._drop(salt)
        self._num_histories += 1
        self._histories[salt] = found = (self._num_histories, SuffixAutomaton())
        return found

    def _drop(self, salt: bytes) -> None:
        _, history = self._histories.pop(salt)
        self.num_tokens -= history.num_tokens
