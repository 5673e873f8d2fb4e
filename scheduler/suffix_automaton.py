"""A suffix automaton of several texts: the longest end of a text that occurs elsewhere, and the tokens that followed.

The automaton grows by a token of any of its texts at a time (Blumer et al., 1985, for several texts). A state stands
for the runs of tokens that end at the same places; its link leads to the longest shorter run that ends at more places.
"""

from __future__ import annotations

ROOT = 0  # the state of the empty run, where every text begins


class SuffixAutomaton:
    """All runs of tokens of some texts. A text is known by the state of all its tokens so far, at first `ROOT`.

    A token takes constant time on average, and at most two states.
    """

    __slots__ = ("_lengths", "_links", "_next", "num_tokens")

    def __init__(self) -> None:
        self.num_tokens = 0  # tokens of all texts
        self._next: list[dict[int, int]] = [{}]  # per state: token -> state, the newest last
        self._links = [-1]
        self._lengths = [0]  # tokens of the longest run of each state

    def extend(self, text: int, token: int) -> int:
        """Return the state of `text` followed by `token`."""
        self.num_tokens += 1
        edges, links, lengths = self._next, self._links, self._lengths
        known = edges[text].get(token)
        if known is not None:
            return known if lengths[known] == lengths[text] + 1 else self._split(text, token, known)
        longer = self._add(lengths[text] + 1, {}, ROOT)
        state = text
        while state >= 0 and token not in edges[state]:
            edges[state][token] = longer
            state = links[state]
        if state >= 0:
            known = edges[state][token]
            links[longer] = known if lengths[known] == lengths[state] + 1 else self._split(state, token, known)
        return longer

    def continuation(self, text: int, shortest: int, limit: int) -> list[int]:
        """Return up to `limit` tokens that followed the longest end of `text` which occurs before another token.

        Ends of fewer than `shortest` tokens do not count. The newest of several tokens is taken.
        """
        tokens: list[int] = []
        edges, links, lengths = self._next, self._links, self._lengths
        state = text
        while len(tokens) < limit:
            while not edges[state] and state:
                state = links[state]
            if lengths[state] < shortest:
                break
            token = next(reversed(edges[state]))
            tokens.append(token)
            state = edges[state][token]
        return tokens

    def _add(self, length: int, edges: dict[int, int], link: int) -> int:
        self._next.append(edges)
        self._links.append(link)
        self._lengths.append(length)
        return len(self._links) - 1

    def _split(self, state: int, token: int, known: int) -> int:
        """Return a new state for the runs of `known` that are no longer than those of `state` and `token`."""
        edges, links = self._next, self._links
        shorter = self._add(self._lengths[state] + 1, edges[known].copy(), links[known])
        links[known] = shorter
        while state >= 0 and edges[state].get(token) == known:
            edges[state][token] = shorter
            state = links[state]
        return shorter
