"""Speculative decoding: draft tokens are added to a step where verifying them saves time.

Must not import the planner or the scheduler. Draft tokens never change what a request generates, only the number of
steps it takes.

Where the last few tokens of a text occurred earlier in it, the tokens that followed them are the draft. Drafts are good
for text that quotes its prompt (code, summaries, tables) and useless for other text, so the share of accepted tokens is
tracked for each request. A draft token is verified only while its expected time per accepted token is below the current
time per token. In a wide batch a row costs as much as a token, so no draft is made.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from .cost import CostModel, StepLoad
from .plan import SampledToken, ScheduledSequence
from .request import Ending, Request, State

MARGIN = 1.25  # the expected gain of draft tokens that may be wrong must exceed their cost by this factor
FORCED_MARGIN = 1.0  # the same for tokens that a grammar forces
LONGEST = 4  # most tokens of a run that is looked up
SHORTEST = 2  # fewest tokens of such a run
INITIAL_ACCEPTANCE = 0.5  # acceptance rate before any measurement
ACCEPTANCE_MEMORY = 0.8  # weight of the earlier acceptance rate, per verified draft token
PAUSE_MEMORY = 0.9  # weight of the earlier average of the time between two steps, per step
FORCED_ACCEPTANCE = 0.9  # acceptance rate of forced tokens: the model may tokenize the same text differently
RECOVERY = 0.01  # step back towards INITIAL_ACCEPTANCE each time that no draft token pays: the text may change


class Speculator:
    """Adds draft tokens to a step that only decodes: tokens that a grammar forces, or else tokens of earlier text.

    `num_tokens` limits the draft of one sequence, `max_rows` the step.
    """

    def __init__(self, cost: CostModel, page_size: int, num_tokens: int, max_rows: int) -> None:
        self.num_draft_tokens = 0  # verified since the start
        self.num_accepted_tokens = 0
        self._cost = cost
        self._page_size = page_size
        self._num_tokens = num_tokens
        self._max_rows = max_rows
        self._indexes: dict[int, NGramIndex] = {}  # request id -> index, from the first draft to the request's end
        self._pause_s = 0.0  # average pause between two steps, which a saved step saves as well
        self._known: set[int] = set()  # ids of live requests that have had echoed or forced tokens

    def draft(self, requests: Collection[Request], load: StepLoad) -> dict[int, list[int]]:
        """Grow the tables of decoding requests by draft tokens and return these by request id.

        `load` is the load of the step without drafts.
        """
        drafts: dict[int, list[int]] = {}
        if not (self._num_tokens or self._known) or load.decode_rows >= self._max_rows:
            return drafts
        looks_up = self._tokens_that_pay(1.0, 1, load, min(MARGIN, FORCED_MARGIN)) > 0
        rows = load.decode_rows
        for request in requests:
            echoed = request.spec.echoed
            if not echoed and not (looks_up and (self._num_tokens or request.forced)):
                continue
            if request.state is State.DECODE and not request.in_search and request.table is not None:
                limit = min(self._max_rows - rows, request.table.max_append())
                limit = min(limit, request.spec.max_tokens - request.num_output_tokens - 1)
                if request.num_output_tokens < len(echoed):  # the client's tokens are always accepted
                    tokens = list(echoed[request.num_output_tokens :][: max(limit, 0)])
                else:
                    limit = min(limit, len(request.forced) or self._num_tokens)
                    tokens = self._draft_for(request, limit, load) if looks_up and limit > 0 else []
                if tokens:
                    request.table.append(len(tokens))
                    drafts[request.request_id] = tokens
                    rows += len(tokens)
        return drafts

    def resolve(
        self,
        request: Request,
        samples: Sequence[SampledToken],
        accepted: Sequence[SampledToken],
        computed: int,
        now: float,
    ) -> int:
        """Record which draft tokens were accepted and roll back the rows of the others.

        `computed` is the number of computed tokens if no sample failed. Returns the actual number.
        """
        self._note(request, len(samples) - 1, max(0, len(accepted) - 1))
        table = request.table
        assert table is not None, "a request in a step is running"
        is_failed = any(sample.error is not None for sample in samples[len(accepted) :])
        if is_failed:
            # A rejected draft left a NaN in the last page, and 0 * NaN is NaN: compute that page again.
            computed = min(computed, len(request.token_ids) - 1)  # the last token too, since it got no sample
            computed -= computed % self._page_size
        fits = table.can_roll_back(computed)
        if is_failed or not fits:
            request.enter(State.PREFILL, now)
        if not fits:  # pages that the next row sees have left a window, or the state is too far ahead
            table.release()
            return 0
        table.rollback(computed)
        return computed

    def expect(self, request: Request, forced: tuple[int, ...] = ()) -> None:
        """Note that a request has echoed tokens, or that its grammar allows only `forced` after its last token."""
        request.forced = forced
        self._known.add(request.request_id)

    def max_forced(self, load: StepLoad) -> int:
        """Return how many grammar-forced tokens per sequence are worth drafting in a decoding step."""
        return self._tokens_that_pay(FORCED_ACCEPTANCE, self._max_rows - load.decode_rows, load, FORCED_MARGIN)

    def note_pause(self, pause_s: float, step_s: float) -> None:
        """Learn the seconds between two consecutive steps, counted up to `step_s` of the second."""
        pause_s = min(max(pause_s, 0.0), step_s)
        self._pause_s = PAUSE_MEMORY * self._pause_s + (1 - PAUSE_MEMORY) * pause_s

    def forget(self, request: Request) -> None:
        """Drop the data of a request that has ended."""
        self._indexes.pop(request.request_id, None)
        self._known.discard(request.request_id)

    def _note(self, request: Request, drafted: int, accepted: int) -> None:
        request.accepted_draft_tokens += accepted
        self.num_draft_tokens += drafted
        self.num_accepted_tokens += accepted
        index = self._indexes.get(request.request_id)
        if index is not None and not request.forced:
            index.note(drafted, accepted)

    def _draft_for(self, request: Request, limit: int, load: StepLoad) -> list[int]:
        if request.forced:
            return list(request.forced[: self._tokens_that_pay(FORCED_ACCEPTANCE, limit, load, FORCED_MARGIN)])
        index = self._indexes.get(request.request_id)
        if index is None:
            index = self._indexes[request.request_id] = NGramIndex()
        count = self._tokens_that_pay(index.acceptance_rate, limit, load, MARGIN)
        if not count:
            index.recover()
            return []
        index.extend(request.token_ids)
        return index.draft(request.token_ids, count)

    def _tokens_that_pay(self, acceptance_rate: float, limit: int, load: StepLoad, margin: float) -> int:
        """Return how many draft tokens one sequence of a decoding step should verify.

        The j-th draft token is used with probability acceptance_rate^j, and adds a row. The step yields a token per
        sequence: a draft token is verified only while its expected time per accepted token is below the current time
        per token.
        """
        if not load.decode_rows:
            return 0
        seconds_per_token = (self._cost.predict(load) + self._pause_s) / load.decode_rows
        seconds_per_draft = margin * self._cost.coefficients.decode_row
        count = 0
        probability = acceptance_rate
        while count < limit and probability * seconds_per_token > seconds_per_draft:
            count = count + 1
            probability = probability * acceptance_rate
        return count


class NGramIndex:
    """The last position of each short run of tokens in one text. Extending the index costs O(1) per token."""

    def __init__(self) -> None:
        self._ends: tuple[dict[tuple[int, ...], int], ...] = tuple({} for _ in range(SHORTEST, LONGEST + 1))
        self._num_indexed = 0
        self.acceptance_rate = INITIAL_ACCEPTANCE

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

    def note(self, drafted: int, accepted: int) -> None:
        """Update the acceptance rate: of `drafted` verified tokens the first `accepted` were accepted."""
        for outcome in [1.0] * accepted + [0.0] * (accepted < drafted):
            self.acceptance_rate = ACCEPTANCE_MEMORY * self.acceptance_rate + (1 - ACCEPTANCE_MEMORY) * outcome

    def recover(self) -> None:
        """Move the acceptance rate a little towards its initial value."""
        self.acceptance_rate += RECOVERY * (INITIAL_ACCEPTANCE - self.acceptance_rate)


def accept_samples(
    request: Request, row: ScheduledSequence, samples: Sequence[SampledToken], now: float
) -> tuple[Sequence[SampledToken], Ending | None]:
    """Append the samples to the request up to the first one after a wrong draft token.

    Returns the accepted samples, and the request's end if one of them ends it. Without draft tokens a failed sample is
    the end. With draft tokens, the failure may come from the key and value of a wrong draft, which every row of the
    step reads, masked (0 * NaN is NaN): that row must be computed again without drafts. So must the row of a deferred
    sample.
    """
    last = len(samples) - 1
    for index, sample in enumerate(samples):
        if sample.is_deferred:
            return samples[:index], None
        if sample.error is not None:
            return samples[:index], None if last else Ending(error=sample.error)
        request.append(sample.token_id, now)
        reason = request.natural_end()
        if reason is not None:
            return samples[: index + 1], Ending(reason)
        if index < last and sample.token_id != row.token_ids[index - last]:
            return samples[: index + 1], None
    return samples, None
