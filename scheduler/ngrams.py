"""Prompt lookup: where the last few tokens of a text occurred before in it, what followed them is the guess.

Text that quotes its prompt (code, summaries, tables) is guessed well, other text not at all, so each text's luck is
watched. It must not know requests, costs or steps: tokens in, guesses out.
"""

from __future__ import annotations

from collections.abc import Sequence

LONGEST, SHORTEST = 4, 2  # tokens of a run that is looked up
FIRST_LUCK = 0.5  # the chance that a guess is right, before anything is known
LUCK_MEMORY = 0.8  # per verified guess
RECOVERY = 0.01  # of the way back to FIRST_LUCK, each time that guesses did not pay: luck changes with the text


class NGramIndex:
    """Where each short run of tokens was last seen. Grows with its request: O(1) per token."""

    def __init__(self) -> None:
        self._ends: tuple[dict[tuple[int, ...], int], ...] = tuple({} for _ in range(SHORTEST, LONGEST + 1))
        self._num_indexed = 0
        self.luck = FIRST_LUCK

    def extend(self, tokens: Sequence[int]) -> None:
        """Index `tokens`, which continue what was indexed before, all but the last: nothing follows that yet."""
        for end in range(max(self._num_indexed, 1), len(tokens)):
            for size, ends in enumerate(self._ends, SHORTEST):
                if end >= size:
                    ends[tuple(tokens[end - size : end])] = end
        self._num_indexed = max(self._num_indexed, len(tokens))

    def guess(self, tokens: Sequence[int], most: int) -> list[int]:
        """Up to `most` tokens that followed the longest known run that `tokens` ends with."""
        for size in range(LONGEST, SHORTEST - 1, -1):
            end = self._ends[size - SHORTEST].get(tuple(tokens[-size:])) if len(tokens) >= size else None
            if end is not None:
                return list(tokens[end : end + most])
        return []

    def note(self, guessed: int, right: int) -> None:
        """Of so many verified guesses, so many were right: all up to the first wrong one."""
        for is_right in [1.0] * right + [0.0] * (right < guessed):
            self.luck = LUCK_MEMORY * self.luck + (1 - LUCK_MEMORY) * is_right

    def recover(self) -> None:
        self.luck += RECOVERY * (FIRST_LUCK - self.luck)
