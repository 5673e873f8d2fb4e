"""How many draft tokens pay: acceptance rates as they are measured, and the draft length that they make fastest.

Must not import requests. A step with draft tokens takes longer and yields more tokens. The best length has the most
expected tokens per second.
"""

from __future__ import annotations

INITIAL_ACCEPTANCE = 0.5  # acceptance rate before any measurement
REQUEST_MEMORY = 0.8  # weight of a request's earlier acceptance rate, per verified draft token
DRAFTER_MEMORY = 0.98  # the same for all requests of a drafter, where new requests start
RECOVERY = 0.005  # step back towards INITIAL_ACCEPTANCE each time that no draft token pays: the text may change


class AcceptanceRate:
    """The share of draft tokens that are accepted where the earlier ones of their draft are, as an average in time."""

    __slots__ = ("_memory", "value")

    def __init__(self, value: float = INITIAL_ACCEPTANCE, memory: float = REQUEST_MEMORY) -> None:
        self.value = value
        self._memory = memory

    def note(self, drafted: int, accepted: int) -> None:
        """Note that of `drafted` verified tokens the first `accepted` were accepted."""
        memory = self._memory
        value = self.value
        for _ in range(accepted):
            value = memory * value + (1 - memory)
        self.value = memory * value if accepted < drafted else value

    def recover(self) -> None:
        """Move the rate a little towards its initial value."""
        self.value += RECOVERY * (INITIAL_ACCEPTANCE - self.value)


class DraftLengths:
    """The best draft lengths for the sequences of one step, by acceptance rate.

    `seconds` is the time of the step without drafts, for `rows` sequences with a token each; a draft token adds
    `seconds_per_draft`. All sequences are taken to have the acceptance rate of the sequence in question.
    """

    __slots__ = ("_seconds", "_seconds_per_draft")

    def __init__(self, seconds: float, rows: int, seconds_per_draft: float) -> None:
        self._seconds = seconds / rows if rows else 0.0
        self._seconds_per_draft = seconds_per_draft

    def best(self, acceptance_rate: float, limit: int) -> int:
        """Return how many draft tokens a sequence should have, at most `limit`.

        Draft token j is accepted with probability acceptance_rate^j. It pays while its tokens per second are above the
        tokens per second with the draft tokens before it.
        """
        seconds = self._seconds
        cost = self._seconds_per_draft
        tokens = 1.0
        probability = acceptance_rate
        count = 0
        while count < limit and probability * seconds > cost * tokens:
            count += 1
            tokens += probability
            seconds += cost
            probability *= acceptance_rate
        return count

    def saving(self, acceptance_rate: float, length: int) -> float:
        """Return the expected seconds per token that drafts of this length save."""
        tokens = sum([acceptance_rate**j for j in range(length + 1)])
        return self._seconds - (self._seconds + length * self._seconds_per_draft) / tokens
