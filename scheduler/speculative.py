"""Speculative decoding: draft tokens are added to a step where verifying them saves time.

Must not import the planner or the scheduler. Draft tokens never change what a request generates, only the number of
steps it takes.

Each request has an acceptance rate for each drafter. The drafter with the highest rate that proposes tokens is used,
for as many tokens as are expected to give the most tokens per second. In a wide batch a row costs as much as a token,
so no draft is made. Tokens that a grammar forces are drafts, too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from .acceptance import DRAFTER_MEMORY, INITIAL_ACCEPTANCE, AcceptanceRate, DraftLengths
from .cost import CostModel, StepLoad
from .draft_model import DraftModel
from .drafters import Drafter, PromptLookup, SuffixLookup
from .plan import DraftResult, DraftTask, SampledToken, ScheduledSequence, verified_samples
from .request import Ending, Request, State

MARGIN = 1.25  # factor of the cost of draft tokens that may be wrong
FORCED_MARGIN = 1.0  # the same for tokens that a grammar forces
PAUSE_MEMORY = 0.9  # weight of the earlier average of the time between two steps, per step
FORCED_ACCEPTANCE = 0.9  # acceptance rate of forced tokens: the model may tokenize the same text differently
NO_DRAFTER = -1  # drafter of tokens that a grammar or the client forces


class DraftRecord:
    """The acceptance rates of one request, by drafter, and the drafter of its draft in the step."""

    __slots__ = ("drafter", "rates")

    def __init__(self, rates: Sequence[AcceptanceRate]) -> None:
        self.rates = [AcceptanceRate(rate.value) for rate in rates]
        self.drafter = NO_DRAFTER


class Speculator:
    """Adds draft tokens to a step that only decodes: tokens that a grammar forces, or else proposals of drafters.

    `num_tokens` limits the draft of one sequence, `max_rows` the step.
    """

    def __init__(
        self,
        cost: CostModel,
        page_size: int,
        num_tokens: int,
        max_rows: int,
        draft_cost: float | None = None,
        *,
        draft_reads_steps: bool = False,
    ) -> None:
        """See `SchedulerConfig` for `draft_cost` and `draft_reads_steps`."""
        self.num_draft_tokens = 0  # verified since the start
        self.num_accepted_tokens = 0
        self.drafted: Counter[str] = Counter()  # the same by the source of the draft
        self.accepted: Counter[str] = Counter()
        self.accepted_at: Counter[int] = Counter()  # accepted tokens of drafters by their position in the draft
        self._cost = cost
        self._page_size = page_size
        self._num_tokens = num_tokens
        self._max_rows = max_rows
        self._drafters: tuple[Drafter, ...] = (PromptLookup(), SuffixLookup())
        self._model = None if draft_cost is None else DraftModel(cost, draft_cost, draft_reads_steps)
        sources = ["prompt", "suffix"]
        if self._model is not None:
            self._drafters = (*self._drafters, self._model)
            sources.append("head" if draft_reads_steps else "model")
        self._sources = (*sources, "forced")  # names of the drafters, then of NO_DRAFTER
        self._rates = tuple(AcceptanceRate(memory=DRAFTER_MEMORY) for _ in self._drafters)  # averages over all requests
        self._records: dict[int, DraftRecord] = {}  # request id -> record, from the first draft to the request's end
        self._pause_s = 0.0  # average pause between two steps, which a saved step saves as well
        self._known: set[int] = set()  # ids of live requests that have had echoed or forced tokens

    def draft(
        self, requests: Collection[Request], load: StepLoad, seconds_left: float | None = None
    ) -> dict[int, list[int]]:
        """Grow the tables of decoding requests by draft tokens and return these by request id.

        `load` is the load of the step without drafts, `seconds_left` the time that it leaves under a latency target.
        """
        drafts: dict[int, list[int]] = {}
        if not (self._num_tokens or self._known) or load.decode_rows >= self._max_rows:
            return drafts
        lengths = self._lengths(load, MARGIN)
        forced_lengths = self._lengths(load, FORCED_MARGIN)
        looks_up = lengths.best(1.0, 1) > 0 or forced_lengths.best(1.0, 1) > 0
        if seconds_left is not None and self._model is not None:
            seconds_left -= self._model.spent_s
        max_rows = self._rows_within(seconds_left, load)
        rows = load.decode_rows
        tokens: Sequence[int]
        for request in requests:
            echoed = request.spec.echoed
            if not echoed and not (looks_up and (self._num_tokens or request.forced)):
                continue
            if request.state is State.DECODE and not request.in_search and request.table is not None:
                limit = min(self._max_rows - rows, request.table.max_append())
                limit = min(limit, request.spec.max_tokens - request.num_output_tokens - 1)
                if request.num_output_tokens < len(echoed):  # the client's tokens are always accepted
                    tokens = echoed[request.num_output_tokens :][: max(limit, 0)]
                elif not looks_up or (limit := min(limit, max_rows - rows)) <= 0:
                    continue
                elif request.forced:
                    tokens = request.forced[: forced_lengths.best(FORCED_ACCEPTANCE, limit)]
                else:
                    tokens = self._propose(request, min(limit, self._num_tokens), lengths)
                if tokens:
                    request.table.append(len(tokens))
                    drafts[request.request_id] = list(tokens)
                    rows += len(tokens)
        return drafts

    def ask(self, requests: Collection[Request], load: StepLoad, seconds_left: float | None) -> DraftTask | None:
        """Return what the draft model should do after this step, whose load without drafts is `load`.

        No proposal is asked for where another drafter is as good.
        """
        model = self._model
        if model is None:
            return None
        lengths = model.lengths(load, self._pause_s, MARGIN)
        rows_left = self._max_rows - load.decode_rows
        if rows_left < 1 or not lengths.best(1.0, 1):
            return None
        index = len(self._drafters) - 1
        for request in requests:
            limit = min(self._num_tokens, rows_left, request.spec.max_tokens - request.num_output_tokens - 2)
            if limit < 1 or request.state is not State.DECODE or request.in_search or request.forced:
                continue
            record = self._record(request)
            rate = record.rates[index]
            if record.drafter not in (NO_DRAFTER, index) and record.rates[record.drafter].value >= rate.value:
                model.read(request)
                continue
            length = lengths.best(rate.value, limit)
            if not length:
                rate.recover()
            elif model.ask(request, length, lengths, rate.value):
                rows_left -= length
        return model.task(load, seconds_left)

    def read(self, requests: Collection[Request], load: StepLoad) -> DraftTask | None:
        """Return the task of a head in a step with prefill: to read the rows of requests that will have drafts."""
        model = self._model
        if model is None or not model.reads_steps or not requests:
            return None
        decoding = StepLoad(decode_rows=len(requests), kv_tokens=load.kv_tokens)
        rate = max(INITIAL_ACCEPTANCE, self._rates[-1].value)
        if not model.lengths(decoding, self._pause_s, MARGIN).best(rate, 1):
            return None
        for request in requests:
            if not request.in_search:
                model.read(request)
        return model.task(load, None)

    def note_proposals(self, result: DraftResult, requests: Mapping[int, Request]) -> None:
        """Take the proposals of the draft model after a step. `requests` are live, by id."""
        if self._model is not None:
            self._model.note(result, requests)

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
        return self._lengths(load, FORCED_MARGIN).best(FORCED_ACCEPTANCE, self._max_rows - load.decode_rows)

    def note_pause(self, pause_s: float, step_s: float) -> None:
        """Learn the seconds between two consecutive steps, counted up to `step_s` of the second."""
        pause_s = min(max(pause_s, 0.0), step_s)
        self._pause_s = PAUSE_MEMORY * self._pause_s + (1 - PAUSE_MEMORY) * pause_s

    def forget(self, request: Request) -> None:
        """Drop the data of a request that has ended."""
        self._known.discard(request.request_id)
        if self._records.pop(request.request_id, None) is not None:
            for drafter in self._drafters:
                drafter.forget(request)

    def _note(self, request: Request, drafted: int, accepted: int) -> None:
        request.accepted_draft_tokens += accepted
        self.num_draft_tokens += drafted
        self.num_accepted_tokens += accepted
        record = self._records.get(request.request_id)
        if drafted:
            source = self._sources[NO_DRAFTER if record is None else record.drafter]
            self.drafted[source] += drafted
            self.accepted[source] += accepted
        if record is not None and record.drafter != NO_DRAFTER:
            self.accepted_at.update(range(accepted))
            record.rates[record.drafter].note(drafted, accepted)
            self._rates[record.drafter].note(drafted, accepted)
            record.drafter = NO_DRAFTER

    def _record(self, request: Request) -> DraftRecord:
        record = self._records.get(request.request_id)
        if record is None:
            record = self._records[request.request_id] = DraftRecord(self._rates)
        return record

    def _propose(self, request: Request, limit: int, lengths: DraftLengths) -> Sequence[int]:
        """Return the tokens of the drafter with the highest acceptance rate that has a proposal which pays."""
        record = self._record(request)
        rates = record.rates
        record.drafter = NO_DRAFTER
        for index in sorted(range(len(rates)), key=lambda index: -rates[index].value):
            count = lengths.best(rates[index].value, limit)
            if not count:
                rates[index].recover()
                continue
            tokens = self._drafters[index].propose(request, count)
            if tokens:
                record.drafter = index
                return tokens
        return ()

    def _lengths(self, load: StepLoad, margin: float) -> DraftLengths:
        """Return the draft lengths of a decoding step with this load without drafts."""
        seconds = self._cost.predict(load) + self._pause_s
        return DraftLengths(seconds, load.decode_rows, margin * self._cost.coefficients.decode_row)

    def _rows_within(self, seconds_left: float | None, load: StepLoad) -> int:
        """Return the most rows of a step, draft tokens included, of which drafts take at most `seconds_left`."""
        seconds_per_row = self._cost.coefficients.decode_row
        if seconds_left is None or not seconds_per_row:
            return self._max_rows
        return min(self._max_rows, load.decode_rows + int(max(0.0, seconds_left) / seconds_per_row))


def accept_samples(
    request: Request, row: ScheduledSequence, samples: Sequence[SampledToken], now: float
) -> tuple[Sequence[SampledToken], Ending | None]:
    """Append the verified samples to the request, up to its end.

    Returns the accepted samples, and the request's end if one of them ends it. Without draft tokens a failed sample is
    the end. With draft tokens, the failure may come from the key and value of a wrong draft, which every row of the
    step reads, masked (0 * NaN is NaN): that row must be computed again without drafts. So must the row of a deferred
    sample.
    """
    verified = verified_samples(row, samples)
    for index, sample in enumerate(verified):
        request.append(sample.token_id, now)
        reason = request.natural_end()
        if reason is not None:
            return verified[: index + 1], Ending(reason)
    if not verified and len(samples) == 1 and not samples[0].is_deferred:
        return verified, Ending(error=samples[0].error)
    return verified, None
