"""Committing a step: samples become output tokens, slots become computed tokens, and complete requests end.

Must not import budgets or the scheduler. If the step skipped a row, or a row must be sampled again, its slots are
rolled back, and a later step computes them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..pager import Pager
from .plan import SampledToken, ScheduledSequence, StepPlan, StepResult
from .queue import RequestQueue
from .request import Ending, Request, RequestUpdate, State
from .running_batch import RunningBatch, table_of
from .speculative import Speculator, accept_samples

End = Callable[[Request, Ending, Sequence[SampledToken]], RequestUpdate]


class Committer:
    """Takes the result of one step at a time."""

    def __init__(
        self, batch: RunningBatch, queue: RequestQueue, pager: Pager, speculator: Speculator, end: End
    ) -> None:
        """`end` ends a request with its last tokens: its pages are free before the next row is committed."""
        self.recomputed_tokens = 0  # total over all requests
        self._batch = batch
        self._queue = queue
        self._policy = queue.policy
        self._pager = pager
        self._speculator = speculator
        self._end = end

    def commit(
        self, plan: StepPlan, result: StepResult, endings: dict[int, Ending], now: float
    ) -> list[RequestUpdate | None]:
        """Take the result of `plan`, which has been checked against it. Return the updates, None for a row without one.

        `endings` belong to requests for which `finish` was called during the step; they end now.
        """
        sampled = result.sampled
        start = 0
        updates: list[RequestUpdate | None] = []
        searches: dict[Request, list[SampledToken]] = {}  # searching request -> samples of all its beams
        for row in plan.sequences:
            samples = sampled[start : start + row.num_samples]
            start += row.num_samples
            request = self._batch.requests[row.request_id]
            if row.request_id in result.deferred:
                updates.append(self._defer_row(request, row, endings))
            elif samples and request.in_search:
                searches.setdefault(request.beam_parent or request, []).extend(samples)
            else:
                updates.append(self._commit_row(request, row, samples, endings, now))
        for search, samples_of_beams in searches.items():
            updates.append(self._commit_beams(search, samples_of_beams, endings, now))
        return updates

    def _commit_row(
        self,
        request: Request,
        row: ScheduledSequence,
        samples: Sequence[SampledToken],
        endings: dict[int, Ending],
        now: float,
    ) -> RequestUpdate | None:
        tokens: Sequence[SampledToken] = ()
        was_decoding = request.state is State.DECODE
        ending = endings.pop(row.request_id, None) if endings else None
        if ending is None:
            tokens, ending = accept_samples(request, row, samples, now)
        if was_decoding:
            self._policy.served(request, 0, len(tokens))
        else:
            self._policy.served(request, len(row.token_ids), 0)
        refused = samples[len(tokens)] if len(tokens) < len(samples) else None
        if refused is not None and refused.error is not None and ending is not None:
            return self._end(request, ending, tokens)  # the pages may hold NaN: do not put them in the prefix cache
        table = table_of(request)
        computed = min(table.num_tokens, len(request.token_ids) - bool(tokens))
        is_deferred = refused is not None and refused.is_deferred
        if is_deferred:
            computed = len(request.token_ids) - 1  # recompute the last token: its row has no sample yet
        if is_deferred or len(samples) > 1:
            computed = self._speculator.resolve(request, samples, tokens, computed, now)
        if tokens and (tokens[-1].forced or request.forced):
            self._speculator.expect(request, tokens[-1].forced)
        self.recomputed_tokens += request.note_computed(computed)
        self._pager.commit(table, request.token_ids)
        if ending is not None:
            return self._end(request, ending, tokens)
        if self._batch.is_protected(request):
            self._batch.secure(request)
        if tokens and not was_decoding:
            request.enter(State.DECODE, now)
            self._queue.release_forks(request)
        return RequestUpdate(request.request_id, tuple(tokens)) if tokens else None

    def _defer_row(self, request: Request, row: ScheduledSequence, endings: dict[int, Ending]) -> RequestUpdate | None:
        """Take back the slots of tokens that were not computed; a later step computes them."""
        table_of(request).withdraw(row.first_position)
        ending = endings.pop(row.request_id, None)
        if ending is not None:
            return self._end(request, ending, ())
        if self._batch.is_protected(request):
            self._batch.secure(request)
        return None

    def _commit_beams(
        self, parent: Request, samples: Sequence[SampledToken], endings: dict[int, Ending], now: float
    ) -> RequestUpdate | None:
        """Advance a search by one step of all its beams: fork the surviving beams, release the pages of the others."""
        search = parent.beam
        beams = self._batch.beams_of(parent)
        assert search is not None, "only a search has beams"
        error = next((sample.error for sample in samples if sample.error is not None), None)
        ending = endings.pop(parent.request_id, None) or (None if error is None else Ending(error=error))
        if ending is not None:
            return self._end(parent, ending, ())
        is_deferred = any(sample.is_deferred for sample in samples)
        for beam in beams:
            if is_deferred:  # all beams compute their last token again: the search continues with the samples of all
                table_of(beam).rollback(len(beam.token_ids) - 1)
            self._note_computed(beam, table_of(beam).num_tokens)
        self._policy.served(parent, 0, len(beams))
        if is_deferred:
            self._batch.secure(parent)
            return None
        spec = parent.spec
        survivors = search.advance(samples, spec.stop_token_ids, spec.min_tokens, spec.max_tokens)
        if parent.state is State.PREFILL:
            parent.first_token_time = now
            parent.enter(State.DECODE, now)
        if search.is_done:
            parent.hypotheses = search.results
            return self._end(parent, Ending(parent.hypotheses[0].finish_reason), ())
        self._batch.fork_beams(parent, survivors, now)
        return None

    def _note_computed(self, request: Request, num_tokens: int) -> None:
        """Record that the first `num_tokens` tokens are computed, and put the pages that are full in the cache."""
        self.recomputed_tokens += request.note_computed(num_tokens)
        self._pager.commit(table_of(request), request.token_ids)
