"""Who runs next: requests in, an immutable StepPlan out; a StepResult in, what happened to each request out.

Synchronous and pure: clock and pager are injected, there is no I/O; it must not know tensors, kernels or sockets.
The one invariant: between steps every running request's table holds exactly its computed tokens; so whatever ends a
request returns its pages before the next step.

A step is planned (planner.py) by growing page tables: what a table holds beyond the computed tokens is what the step
computes. Committing takes in what it computed, and ends what has come to its end.

Protected requests (batch.py) never lack a page, so they end; where there are none, the oldest running request is
preempted by nobody, can always make room for itself, and ends too. So somebody always progresses, and nobody is
preempted more often than it takes to be protected. That is why nobody starves.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence

from ..pager import Pager, check
from .admission import AdmissionEstimate, DuplicateRequest, QueueFull, StepMismatch
from .budget import Budget
from .cost import CostModel
from .forecast import Forecast
from .plan import SampledToken, ScheduledSequence, StepPlan, StepResult
from .planning import Planner
from .policy import FirstComeFirstServed, Policy
from .queue import RequestQueue
from .request import FinishReason, Request, RequestUpdate, State
from .running_batch import RunningBatch, table_of
from .speculative import Speculator
from .stats import SchedulerStats
from .tenants import QueueLimits

DEADLINE_PASSED = "the request's deadline passed"  # the error of a request that `expire` ended
LEARNING_STRIDE = 4  # of steps that only decode, one in so many teaches the cost model

Ending = tuple[FinishReason | None, str | None]


class Scheduler:
    """Continuous batching over one pager. `schedule` and `commit` alternate; the rest may be called at any time.

    `max_num_samples` limits the rows of a step that sample (default: max_num_seqs), `max_prefill_chunk` one sequence's
    prefill tokens per step, `num_speculative_tokens` one sequence's guesses. `debug` audits the pager twice per step;
    by default it is on when QUIRE_DEBUG=1. Raises ValueError if the budget cannot hold `max_num_seqs` sequences.
    """

    def __init__(
        self,
        pager: Pager,
        *,
        budget: Budget,
        max_num_seqs: int,
        cost: CostModel | None = None,
        policy: Policy | None = None,
        limits: QueueLimits | None = None,
        max_num_samples: int | None = None,
        max_prefill_chunk: int | None = None,
        num_speculative_tokens: int = 0,
        clock: Callable[[], float] = time.monotonic,
        debug: bool | None = None,
    ) -> None:
        if max_num_seqs < 1 or (max_prefill_chunk is not None and max_prefill_chunk < 1):
            raise ValueError("max_num_seqs and max_prefill_chunk must be at least 1")
        if budget.max_num_batched_tokens < max_num_seqs:
            raise ValueError(f"the budget of a step must hold max_num_seqs={max_num_seqs} sequences: raise it to that")
        self._pager = pager
        self._cost = cost or CostModel()
        self._policy: Policy = FirstComeFirstServed() if policy is None else policy  # an empty one is falsy
        self._queue = RequestQueue(self._policy, limits or QueueLimits(), pager.pool.num_pages)
        self._batch = RunningBatch(pager, self._cost)
        self._forecast = Forecast(self._cost, budget, max_num_seqs)
        self._speculator = Speculator(
            pager,
            self._cost,
            num_speculative_tokens,
            min(budget.max_num_batched_tokens, max_num_samples or max_num_seqs),
        )
        self._planner = Planner(
            pager,
            self._batch,
            self._queue,
            budget,
            self._speculator,
            max_num_seqs=max_num_seqs,
            max_prefill_chunk=max_prefill_chunk,
            clock=clock,
        )
        self._clock = clock
        self._debug = os.environ.get("QUIRE_DEBUG") == "1" if debug is None else debug

        self._requests: dict[int, Request] = {}  # all that are alive, in order of arrival
        self._in_flight: StepPlan | None = None
        self._endings: dict[int, Ending] = {}  # asked for while in flight
        self._num_arrived = 0
        self._num_finished_steps = 0
        self._recomputed_tokens = 0

    # Coming and going.

    def check_room(self, tenant: str = "", count: int = 1) -> None:
        """Raises QueueFull where `add` would for that reason: a cheap look before a prompt is prepared."""
        limit = self._queue.limit_reached(tenant, count)
        if limit is not None:
            raise QueueFull(f"the queue is full: {limit}", self._estimate(0, 0))

    def add(self, request: Request, *forks: Request) -> AdmissionEstimate:
        """Queue a request, and `forks` of it with the same prompt: it computes the prompt, they fork its pages.

        Raises DuplicateRequest or a Refused error before anything has changed: all are queued, or none.
        """
        requests, now = (request, *forks), self._clock()
        self._prepare(requests)
        self.check_room(request.spec.tenant, len(requests))
        estimate = self._estimate(request.pages_needed, request.num_prompt_tokens)
        self._queue.check_fit(request, estimate, now)
        self._accept(requests, now)
        return estimate

    def readmit(self, request: Request) -> None:
        """Queue a request that another scheduler of the same limits had accepted: none of them refuses it again.

        Raises DuplicateRequest.
        """
        self._prepare((request,))
        self._accept((request,), self._clock())

    def _prepare(self, requests: Sequence[Request]) -> None:
        for request in requests:
            if request.request_id in self._requests:
                raise DuplicateRequest(request.request_id)
            request.pages_needed = self._batch.pages_at_longest(request)

    def _accept(self, requests: Sequence[Request], now: float) -> None:
        for request in requests:
            request.arrive(self._num_arrived, now)
            self._num_arrived += 1
            self._requests[request.request_id] = request
        self._queue.accept(requests)

    def finish(
        self, request_id: int, reason: FinishReason | None = None, error: str | None = None
    ) -> RequestUpdate | None:
        """End a request in any state, for a reason or with an error. Idempotent; an unknown id is ignored.

        Returns its last update; None if it is part of the step in flight, then `commit` reports it without that step's
        tokens, and the first ending asked for counts.
        """
        if (reason is None) == (error is None):
            raise ValueError("a request ends for a reason or with an error")
        request = self._requests.get(request_id)
        if request is None:
            return None
        if self._is_in_flight(request_id):
            self._endings.setdefault(request_id, (reason, error))
            return None
        return self._end(request, reason, error)

    def cancel(self, request_id: int) -> RequestUpdate | None:
        """`finish` because its user does not want it any more."""
        return self.finish(request_id, "cancelled")

    def expire(self) -> list[RequestUpdate]:
        """End every request whose deadline has passed; those in flight end with their step."""
        now, updates = self._clock(), []
        while (deadline := self.next_deadline) is not None and deadline <= now:
            update = self.finish(self._queue.pop_deadline().request_id, error=DEADLINE_PASSED)
            if update is not None:
                updates.append(update)
        return updates

    @property
    def next_deadline(self) -> float | None:
        """When `expire` has something to do, in seconds of the clock."""
        return self._queue.next_deadline(len(self._requests))

    def now(self) -> float:
        """Seconds of the clock that deadlines are in."""
        return self._clock()

    def preempt(self, request_id: int) -> bool:
        """Force a running request back to the head of the queue. False if it is not running, has reserved its pages or
        a step is in flight.
        """
        request = self._batch.requests.get(request_id)
        if request is None or self._in_flight is not None or self._batch.is_protected(request):
            return False
        self._planner.preempt(request)
        return True

    # Stepping.

    def schedule(self) -> StepPlan | None:
        """The next step, or None when there is nothing to run. Its pages stay untouched until `commit` or `abandon`."""
        if self._in_flight is not None:
            raise StepMismatch(f"step {self._in_flight.step_id} is still in flight")
        self._in_flight = self._planner.plan()
        self._audit()
        return self._in_flight

    def commit(self, result: StepResult) -> list[RequestUpdate]:
        """Take in what the step in flight computed. Requests that neither gained a token nor ended are not mentioned.

        Raises StepMismatch, changing nothing, if the result is not the step's.
        """
        plan = self._match(result)
        now = self._clock()
        sampled, at = result.sampled, 0
        updates: list[RequestUpdate] = []
        beams: dict[int, list[SampledToken]] = {}  # by their parent
        for row in plan.sequences:
            samples = sampled[at : at + row.num_samples]
            at += row.num_samples
            request = self._batch.requests[row.request_id]
            if request.beam_parent is not None and samples:
                beams.setdefault(request.beam_parent.request_id, []).extend(samples)
                continue
            update = self._commit_row(request, row, samples, now)
            if update is not None:
                updates.append(update)
        for parent_id, samples_of_beams in beams.items():
            update = self._commit_beams(self._requests[parent_id], samples_of_beams, now)
            if update is not None:
                updates.append(update)
        self._learn(result.duration_s)
        self._finish_step()
        return updates

    def abandon(self, error: str) -> list[RequestUpdate]:
        """The step in flight failed as a whole: each of its requests ends with `error`, or as was asked meanwhile."""
        if self._in_flight is None:
            raise StepMismatch("no step is in flight")
        updates = []
        for row in self._in_flight.sequences:
            request = self._requests.get(row.request_id)
            if request is not None:  # not a beam, which ends with its parent
                updates.append(self._end(request, *self._endings.pop(row.request_id, (None, error))))
        self._finish_step()
        return updates

    def end_all(self, error: str) -> list[RequestUpdate]:
        """End every request that is alive with `error`. Nothing may be computing any more."""
        self._in_flight = None
        return [
            self._end(request, *self._endings.pop(request.request_id, (None, error)))
            for request in tuple(self._requests.values())
        ]

    # Being watched.

    @property
    def has_work(self) -> bool:
        """Whether any request is alive."""
        return bool(self._requests)

    @property
    def num_waiting(self) -> int:
        """Requests in the queue."""
        return len(self._queue)

    @property
    def num_steps(self) -> int:
        """Finished steps, failed ones included: while there is work and the engine is alive, it advances."""
        return self._num_finished_steps

    def stats(self) -> SchedulerStats:
        pager, batch = self._pager, self._batch
        return SchedulerStats(
            step=self.num_steps,
            running=batch.num_requests,
            waiting=len(self._queue),
            waiting_by_reason=self._queue.by_reason(),
            pages_total=pager.pool.num_pages,
            pages_owned=pager.pool.num_owned,
            pages_cached=pager.pool.num_cached,
            pages_free=pager.pool.num_free,
            pages_reserved=pager.pool.num_reserved,
            pages_pinned=pager.pool.num_pinned,
            pages_spilled=pager.num_spilled,
            prefix_queries_tokens=pager.prefix_queried_tokens,
            prefix_hits_tokens=pager.prefix_hit_tokens,
            preemptions=batch.num_preemptions,
            preemptions_spilled=batch.num_spilled,
            recomputed_tokens=self._recomputed_tokens,
            draft_tokens=self._speculator.num_guessed,
            accepted_draft_tokens=self._speculator.num_right,
        )

    def _estimate(self, pages_needed: int, prefill_tokens: int) -> AdmissionEstimate:
        """How things stand for a newcomer of so many pages and tokens."""
        running = self._batch.requests.values()
        unfinished = sum(len(request.token_ids) - request.num_computed_tokens for request in running)
        wait_s = self._forecast.wait_s(
            self._queue.num_tokens + unfinished + prefill_tokens,
            len(self._queue),
            self._batch.num_seqs,
            sum(request.num_computed_tokens for request in running),
        )
        return AdmissionEstimate(len(self._queue), pages_needed, self._pager.pool.num_available, wait_s)

    # Committing and ending.

    def _match(self, result: StepResult) -> StepPlan:
        plan = self._in_flight
        if plan is None or result.step_id != plan.step_id:
            raise StepMismatch(f"step {result.step_id} is not in flight")
        expected = [row.request_id for row in plan.sequences for _ in range(row.num_samples)]
        if [token.request_id for token in result.sampled] != expected:
            raise StepMismatch(f"step {result.step_id} must sample for requests {expected}, in this order")
        return plan

    def _commit_row(
        self, request: Request, row: ScheduledSequence, samples: Sequence[SampledToken], now: float
    ) -> RequestUpdate | None:
        tokens: Sequence[SampledToken] = ()
        was_decoding = request.state is State.DECODE
        ending = self._endings.pop(row.request_id, None)
        if ending is None:
            tokens, ending = _take(request, row, samples, now)
        if len(tokens) < len(samples) and samples[len(tokens)].error is not None and ending is not None:
            return self._end(request, *ending, tokens)  # what it computed may not be numbers: nobody must find it
        table = table_of(request)
        computed = min(table.num_tokens, len(request.token_ids) - bool(tokens))
        if len(samples) > 1:
            computed = self._forget_guesses(request, samples, tokens, computed)
        self._recomputed_tokens += request.note_computed(computed)
        self._pager.commit(table, request.token_ids)
        if ending is not None:
            return self._end(request, *ending, tokens)
        if self._batch.is_protected(request):
            self._batch.secure(request)
        if was_decoding:
            self._policy.served(request, 0, len(tokens))
        else:
            self._policy.served(request, len(row.token_ids), 0)
            if tokens:
                request.enter(State.DECODE, now)
                self._queue.release_forks(request)
        return RequestUpdate(request.request_id, tuple(tokens)) if tokens else None

    def _forget_guesses(
        self, request: Request, samples: Sequence[SampledToken], tokens: Sequence[SampledToken], computed: int
    ) -> int:
        """Take back the rows of wrong guesses. How many tokens are computed then."""
        self._speculator.note(request, len(samples) - 1, max(0, len(tokens) - 1))
        table = table_of(request)
        if any(sample.error is not None for sample in samples[len(tokens) :]):
            # A wrong guess left what is not a number in the last page, and 0 * NaN is NaN: write that page anew.
            computed = min(computed, len(request.token_ids) - 1)  # with no sample to be had, the last token's too
            computed -= computed % self._pager.page_size
            request.enter(State.PREFILL, self._clock())
            if not table.can_roll_back(computed):  # what that page's rows see has left a window
                table.release()
                return 0
        table.rollback(computed)
        return computed

    def _commit_beams(self, parent: Request, samples: Sequence[SampledToken], now: float) -> RequestUpdate | None:
        """All hypotheses of a search took a step; those that live on are forked, the others give back their pages."""
        search, beams = parent.beam, self._batch.beams_of(parent)
        assert search is not None, "beams have a parent that searches"
        ending = self._endings.pop(parent.request_id, None)
        errors = [sample.error for sample in samples if sample.error is not None]
        if ending is None and errors:
            ending = None, errors[0]
        if ending is not None:
            return self._end(parent, *ending)
        for beam in beams:
            self._recomputed_tokens += beam.note_computed(table_of(beam).num_tokens)
            self._pager.commit(table_of(beam), beam.token_ids)
        self._policy.served(parent, 0, len(beams))
        survivors = search.advance(samples, parent.spec.stop_token_ids, parent.spec.min_tokens, parent.spec.max_tokens)
        if parent.state is State.PREFILL:
            parent.first_token_time = now
            parent.enter(State.DECODE, now)
        if search.is_done:
            parent.hypotheses = search.results
            return self._end(parent, parent.hypotheses[0].finish_reason, None)
        self._batch.fork_beams(parent, survivors, now)
        return None

    def _learn(self, seconds: float) -> None:
        load = self._planner.load
        if seconds > 0 and (load.prefill_tokens or not self._cost.is_warm or not self.num_steps % LEARNING_STRIDE):
            self._cost.observe(load, seconds)

    def _end(
        self, request: Request, reason: FinishReason | None, error: str | None, tokens: Sequence[SampledToken] = ()
    ) -> RequestUpdate:
        now = self._clock()
        if request.table is None:
            self._queue.remove(request)
            self._batch.forget(request)
        else:
            self._queue.note_finished(request)
            self._batch.leave(request)
            self._forecast.note_output(request.num_output_tokens)
        self._queue.release_forks(request)
        if request.spec.pin_s is not None:
            self._pager.pin(request.spec.prompt_token_ids, request.spec.tenant.encode(), now + request.spec.pin_s)
        del self._requests[request.request_id]
        request.finish_reason = reason
        request.error = error
        request.enter(State.ENDED, now)
        return RequestUpdate(request.request_id, tuple(tokens), reason, error, request.final_counters())

    def _finish_step(self) -> None:
        self._in_flight = None
        self._num_finished_steps += 1
        self._audit()

    def _is_in_flight(self, request_id: int) -> bool:
        plan = self._in_flight
        return plan is not None and any(row.request_id == request_id for row in plan.sequences)

    def _audit(self) -> None:
        if self._debug:
            check(self._pager, [table_of(request) for request in self._batch.requests.values()])


def _take(
    request: Request, row: ScheduledSequence, samples: Sequence[SampledToken], now: float
) -> tuple[Sequence[SampledToken], Ending | None]:
    """Append the samples to the request as long as the guess before each was right; its end, if one of them is that.

    Without guesses, an error is its end. With them, a wrong one's key and value may be to blame, which all rows of the
    step read, masked (0 * NaN is NaN): the row is to be computed again without.
    """
    guesses = row.token_ids[len(row.token_ids) - len(samples) + 1 :]
    for count, sample in enumerate(samples, 1):
        if sample.error is not None:
            return samples[: count - 1], (None, sample.error) if len(samples) == 1 else None
        request.append(sample.token_id, now)
        reason = request.natural_end()
        if reason is not None:
            return samples[:count], (reason, None)
        if count < len(samples) and sample.token_id != guesses[count - 1]:
            return samples[:count], None
    return samples, None
