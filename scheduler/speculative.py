"""Guesses of the next tokens, added to a step where verifying them pays.

It must not know how guesses are verified. The one invariant: guesses never change what a request generates, only how
many steps it takes; whatever is wrong here costs time, not tokens.

A guess is verified only where the step gains more tokens than the row costs time, by what steps cost and by the
request's luck so far. So a wide batch, where a row costs what a token costs, never makes any.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..pager import Pager
from .cost import CostModel, StepLoad
from .ngrams import NGramIndex
from .request import Request, State

MARGIN = 1.25  # gain over cost that is asked for


class Speculator:
    """Adds guesses to a step that only decodes. `num_tokens` is one sequence's limit, `max_rows` that of the step."""

    def __init__(self, pager: Pager, cost: CostModel, num_tokens: int, max_rows: int) -> None:
        self.guesses: dict[int, list[int]] = {}  # of the last step, by request id
        self.num_guessed = 0  # verified
        self.num_right = 0
        self._pager = pager
        self._cost = cost
        self._num_tokens = num_tokens
        self._max_rows = max_rows

    def guess(self, requests: Iterable[Request], load: StepLoad) -> None:
        """Grow the tables of decoding requests by their guesses, in a step with this load."""
        self.guesses = {}
        if not self._num_tokens or not self._guesses_that_pay(1.0, 1, load):
            return
        rows = load.decode_rows
        for request in requests:
            if request.state is State.DECODE and request.beam_parent is None and request.table is not None:
                most = min(self._num_tokens, self._max_rows - rows, request.table.max_append())
                most = min(most, request.spec.max_tokens - request.num_output_tokens - 1)
                guess = self._guess(request, most, load) if most > 0 else []
                if guess:
                    request.table.append(len(guess))
                    self.guesses[request.request_id] = guess
                    rows += len(guess)

    def note(self, request: Request, guessed: int, right: int) -> None:
        """What verifying a request's guesses has shown."""
        request.accepted_draft_tokens += right
        self.num_guessed += guessed
        self.num_right += right
        if request.ngrams is not None:
            request.ngrams.note(guessed, right)

    def _guess(self, request: Request, most: int, load: StepLoad) -> list[int]:
        ngrams = request.ngrams = request.ngrams or NGramIndex()
        count = self._guesses_that_pay(ngrams.luck, most, load)
        if not count:
            ngrams.recover()
            return []
        ngrams.extend(request.token_ids)
        return ngrams.guess(request.token_ids, count)

    def _guesses_that_pay(self, luck: float, most: int, load: StepLoad) -> int:
        """How many guesses one sequence of a decoding step should verify.

        The j-th is needed with probability luck^j, and adds a row. The step yields a token per sequence: a guess pays
        as long as its tokens come at no more than what tokens cost now.
        """
        if not load.decode_rows:
            return 0
        seconds_per_token = self._cost.predict(load) / load.decode_rows
        seconds_per_guess = MARGIN * self._cost.coefficients.decode_row
        count, chance = 0, luck
        while count < most and chance * seconds_per_token > seconds_per_guess:
            count, chance = count + 1, chance * luck
        return count
