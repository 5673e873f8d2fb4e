"""Who runs next: requests in, an immutable StepPlan out; a StepResult in, what happened to each request out.

Synchronous and pure: clock and pager are injected, there is no I/O; it must not know tensors, kernels or sockets.
The one invariant: between steps every running request's table holds exactly its computed tokens, and every owned page
belongs to a running request; so whatever ends a request returns its pages before the next step.

A step is planned by growing page tables: whatever a table holds beyond the computed tokens is what the step computes.
Decode rows grow first, then prefills from the oldest on, then newly admitted requests, within the budget.

The oldest running request is never preempted and can always make room for itself, so it progresses in every step and
ends; then the next one is the oldest. That is why nobody starves.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..pager import OutOfPages, Pager, PageTable, check
from .budget import Budget
from .errors import DuplicateRequest, QueueFull, StepMismatch, TooLong
from .plan import SampledToken, ScheduledSequence, StepPlan, StepResult
from .policy import FirstComeFirstServed, Policy
from .request import FinishReason, Request, RequestUpdate, State


@dataclass(frozen=True, slots=True)
class Admission:
    """What was known when a request was accepted."""

    position: int  # requests ahead of it in the queue
    pages_needed: int  # at its longest
    pages_free: int  # that could be allocated now, cached ones included


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """A snapshot. `pages_free + pages_cached + pages_owned == pages_total`."""

    step: int  # finished steps
    running: int
    waiting: int
    pages_total: int
    pages_owned: int
    pages_cached: int
    pages_free: int
    prefix_queries_tokens: int
    prefix_hits_tokens: int
    preemptions: int


class Scheduler:
    """Continuous batching over one pager. `schedule` and `commit` alternate; the rest may be called at any time.

    `max_prefill_chunk` limits one sequence's prefill tokens per step. `debug` audits the pager twice per step; by
    default it is on when QUIRE_DEBUG=1. Raises ValueError if the budget cannot hold `max_num_seqs` sequences.
    """

    def __init__(
        self,
        pager: Pager,
        *,
        budget: Budget,
        max_num_seqs: int,
        max_num_waiting: int = 1024,
        policy: Policy | None = None,
        clock: Callable[[], float] = time.monotonic,
        max_prefill_chunk: int | None = None,
        debug: bool | None = None,
    ) -> None:
        if max_num_seqs < 1 or max_num_waiting < 1 or (max_prefill_chunk is not None and max_prefill_chunk < 1):
            raise ValueError("max_num_seqs, max_num_waiting and max_prefill_chunk must be at least 1")
        if budget.prefill_tokens(max_num_seqs - 1) < 1:
            raise ValueError(f"the budget of a step must hold max_num_seqs={max_num_seqs} sequences: raise it to that")
        self._pager = pager
        self._budget = budget
        self._max_num_seqs = max_num_seqs
        self._max_num_waiting = max_num_waiting
        self._waiting: Policy = policy if policy is not None else FirstComeFirstServed()
        self._clock = clock
        self._max_prefill_chunk = max_prefill_chunk
        self._debug = os.environ.get("QUIRE_DEBUG") == "1" if debug is None else debug

        self._requests: dict[int, Request] = {}  # all that are alive
        self._running: dict[int, Request] = {}  # in admission order
        self._in_flight: StepPlan | None = None
        self._endings: dict[int, tuple[FinishReason | None, str | None]] = {}  # asked for while in flight
        self._num_arrived = 0
        self._num_planned_steps = 0
        self._num_finished_steps = 0
        self._num_preemptions = 0

    def add(self, request: Request) -> Admission:
        """Queue a request. Raises DuplicateRequest, TooLong or QueueFull before anything has changed."""
        if request.request_id in self._requests:
            raise DuplicateRequest(request.request_id)
        num_tokens = request.num_prompt_tokens + request.max_tokens
        pages_needed = self._pager.pages_for(num_tokens)
        if pages_needed > self._pager.num_pages:
            raise TooLong(num_tokens, pages_needed, self._pager.num_pages)
        if len(self._waiting) >= self._max_num_waiting:
            raise QueueFull(self._max_num_waiting)
        admission = Admission(len(self._waiting), pages_needed, self._pager.num_available)
        request.arrive(self._num_arrived, self._clock())
        self._num_arrived += 1
        self._requests[request.request_id] = request
        self._waiting.push(request)
        return admission

    def schedule(self) -> StepPlan | None:
        """The next step, or None when there is nothing to run. Its pages stay untouched until `commit` or `abandon`."""
        if self._in_flight is not None:
            raise StepMismatch(f"step {self._in_flight.step_id} is still in flight")
        preemptions_before = self._num_preemptions
        num_decode_rows = self._grow_decodes()
        budget = self._budget.prefill_tokens(num_decode_rows)
        budget -= self._grow_prefills(budget)
        if self._num_preemptions == preemptions_before:
            self._admit(budget)
        self._in_flight = self._assemble()
        self._audit()
        return self._in_flight

    def commit(self, result: StepResult) -> list[RequestUpdate]:
        """Take in what the step in flight computed. Requests that neither gained a token nor ended are not mentioned.

        Raises StepMismatch, changing nothing, if the result is not the step's.
        """
        plan = self._match(result)
        now = self._clock()
        sampled = iter(result.sampled)
        updates = []
        for row in plan.sequences:
            update = self._commit_row(row, next(sampled) if row.num_samples else None, now)
            if update is not None:
                updates.append(update)
        self._finish_step()
        return updates

    def abandon(self, error: str) -> list[RequestUpdate]:
        """The step in flight failed as a whole: each of its requests ends with `error`, or as was asked meanwhile."""
        if self._in_flight is None:
            raise StepMismatch("no step is in flight")
        updates = []
        for row in self._in_flight.sequences:
            reason, own_error = self._endings.pop(row.request_id, (None, error))
            updates.append(self._end(self._running[row.request_id], reason, own_error))
        self._finish_step()
        return updates

    def end_all(self, error: str) -> list[RequestUpdate]:
        """End every request that is alive with `error`. Nothing may be computing any more."""
        self._in_flight = None
        return [
            self._end(request, *self._endings.pop(request.request_id, (None, error)))
            for request in tuple(self._requests.values())
        ]

    def finish(
        self, request_id: int, reason: FinishReason | None = None, error: str | None = None
    ) -> RequestUpdate | None:
        """End a request in any state, for a reason or with an error. Idempotent; an unknown id is ignored.

        Returns its last update; None if it is part of the step in flight, then `commit` reports it without that step's
        token, and the first ending asked for counts.
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

    def preempt(self, request_id: int) -> bool:
        """Force a running request back to the head of the queue. False if it is not running or a step is in flight."""
        request = self._running.get(request_id)
        if request is None or self._in_flight is not None:
            return False
        self._preempt(request)
        return True

    @property
    def has_work(self) -> bool:
        """Whether any request is alive."""
        return bool(self._requests)

    @property
    def num_steps(self) -> int:
        """Finished steps, failed ones included: while there is work and the engine is alive, it advances."""
        return self._num_finished_steps

    def stats(self) -> SchedulerStats:
        pager = self._pager
        return SchedulerStats(
            step=self.num_steps,
            running=len(self._running),
            waiting=len(self._waiting),
            pages_total=pager.num_pages,
            pages_owned=pager.num_owned,
            pages_cached=pager.num_cached,
            pages_free=pager.num_free,
            prefix_queries_tokens=pager.prefix_queried_tokens,
            prefix_hits_tokens=pager.prefix_hit_tokens,
            preemptions=self._num_preemptions,
        )

    # Planning: each phase grows tables.

    def _grow_decodes(self) -> int:
        """One more token for every decoding request; those that find no page preempt. Returns how many decode."""
        grow = self._pager.grow
        for request in tuple(self._running.values()):
            if request.state is State.DECODE:
                try:
                    grow(table_of(request), 1)
                except OutOfPages:
                    self._make_room(request)
        return sum(1 for request in self._running.values() if request.state is State.DECODE)

    def _grow_prefills(self, budget: int) -> int:
        """The next chunk of every prefilling request, the oldest first. Returns the tokens taken."""
        left = budget
        prefilling = [request for request in self._running.values() if request.state is State.PREFILL]
        for request in sorted(prefilling, key=arrival_rank):
            if request.state is State.PREFILL:  # not preempted by the one before it
                left -= self._grow_prefill(request, left)
        return budget - left

    def _grow_prefill(self, request: Request, budget: int) -> int:
        table = table_of(request)
        num_tokens = min(budget, len(request.token_ids) - request.num_computed_tokens)
        if self._max_prefill_chunk is not None:
            num_tokens = min(num_tokens, self._max_prefill_chunk)
        if num_tokens and table.would_overflow(1) and request is self._oldest():
            self._make_room(request)
            return 1
        num_tokens = min(num_tokens, table.room())
        self._pager.grow(table, num_tokens)
        return num_tokens

    def _admit(self, budget: int) -> None:
        """Let waiting requests in, in the policy's order, as long as tokens, sequences and pages allow."""
        promised = sum(self._pages_promised(request) for request in self._running.values())
        while budget > 0 and len(self._running) < self._max_num_seqs:
            request = self._waiting.head()
            if request is None or not self._start(request, promised):
                return
            budget -= self._grow_prefill(request, budget)
            promised += self._pages_promised(request)

    def _pages_promised(self, request: Request) -> int:
        """Pages a running request still needs for the tokens it knows, and one for those to come while it may grow.

        Newcomers leave these alone: whoever is admitted too early is preempted soon, and its work is lost.
        """
        soon = self._pager.pages_for(len(request.token_ids)) + 1
        at_most = self._pager.pages_for(request.num_prompt_tokens + request.max_tokens)
        return min(soon, at_most) - len(table_of(request).page_ids)

    def _start(self, request: Request, spare_pages: int) -> bool:
        """Admit the head of the queue if all its known tokens fit beside `spare_pages`."""
        try:
            table, cached = self._pager.open(request.token_ids, request.tenant.encode(), spare_pages)
        except OutOfPages:
            return False
        if request.state is State.WAITING:
            request.cached_tokens = request.high_water_tokens = cached
        request.table = table
        request.num_computed_tokens = cached
        request.enter(State.PREFILL, self._clock())
        self._waiting.remove(request)
        self._running[request.request_id] = request
        return True

    def _assemble(self) -> StepPlan | None:
        decodes: list[ScheduledSequence] = []
        prefills: list[ScheduledSequence] = []
        num_prefill_tokens = 0
        for request in self._running.values():
            table = table_of(request)
            first, end = request.num_computed_tokens, table.num_tokens
            if first == end:
                continue
            tokens = request.token_ids
            row = ScheduledSequence(
                request.request_id,
                (table.page_ids,),
                first,
                tokens[first:end],
                int(end == len(tokens)),
                request.sampling,
                tokens,
                request.num_prompt_tokens,
            )
            if request.state is State.DECODE:
                decodes.append(row)
            else:
                prefills.append(row)
                num_prefill_tokens += end - first
        if not decodes and not prefills:
            return None
        self._num_planned_steps += 1
        return StepPlan(self._num_planned_steps, (*decodes, *prefills), len(decodes), num_prefill_tokens)

    # Preemption.

    def _make_room(self, request: Request) -> None:
        """Grow by one token at the cost of whoever loses least; if nobody else may be preempted, it yields itself."""
        table = table_of(request)
        while table.would_overflow(1):
            victim = self._victim(request)
            self._preempt(victim)
            if victim is request:
                return
        self._pager.grow(table, 1)

    def _victim(self, request: Request) -> Request:
        """The one that loses least work, the youngest of equals; never the oldest, and `request` itself last of all."""
        protected = (request, self._oldest())
        candidates = (other for other in self._running.values() if other not in protected)
        return min(candidates, key=lambda other: (other.num_computed_tokens, -other.order), default=request)

    def _oldest(self) -> Request:
        return min(self._running.values(), key=arrival_rank)

    def _preempt(self, request: Request) -> None:
        """By recompute: its pages go, its tokens stay, and it is first in the queue."""
        self._pager.release(table_of(request))
        request.table = None
        request.num_computed_tokens = 0
        request.preemptions += 1
        request.enter(State.PREEMPTED, self._clock())
        del self._running[request.request_id]
        self._waiting.push_front(request)
        self._num_preemptions += 1

    # Committing and ending.

    def _match(self, result: StepResult) -> StepPlan:
        plan = self._in_flight
        if plan is None or result.step_id != plan.step_id:
            raise StepMismatch(f"step {result.step_id} is not in flight")
        expected = [row.request_id for row in plan.sequences if row.num_samples]
        if [token.request_id for token in result.sampled] != expected:
            raise StepMismatch(f"step {result.step_id} must sample for requests {expected}, in this order")
        return plan

    def _commit_row(self, row: ScheduledSequence, token: SampledToken | None, now: float) -> RequestUpdate | None:
        request = self._running[row.request_id]
        if token is not None and token.error is not None:
            reason, error = self._endings.pop(row.request_id, (None, token.error))
            return self._end(request, reason, error)
        table = table_of(request)
        request.note_computed(table.num_tokens)
        self._pager.publish(table, request.token_ids)
        if row.request_id in self._endings:
            return self._end(request, *self._endings.pop(row.request_id))
        if token is None:
            return None
        request.append(token.token_id, now)
        reason = request.natural_end()
        if reason is not None:
            return self._end(request, reason, None, (token,))
        if request.state is State.PREFILL:
            request.enter(State.DECODE, now)
        return RequestUpdate(request, (token,))

    def _end(
        self, request: Request, reason: FinishReason | None, error: str | None, tokens: Sequence[SampledToken] = ()
    ) -> RequestUpdate:
        if request.table is None:
            self._waiting.remove(request)
        else:
            del self._running[request.request_id]
            self._pager.release(request.table)
            request.table = None
        del self._requests[request.request_id]
        request.finish_reason = reason
        request.error = error
        request.enter(State.ENDED, self._clock())
        return RequestUpdate(request, tuple(tokens), reason, error)

    def _finish_step(self) -> None:
        self._in_flight = None
        self._num_finished_steps += 1
        self._audit()

    def _is_in_flight(self, request_id: int) -> bool:
        plan = self._in_flight
        return plan is not None and any(row.request_id == request_id for row in plan.sequences)

    def _audit(self) -> None:
        if self._debug:
            check(self._pager, [table_of(request) for request in self._running.values()])


def arrival_rank(request: Request) -> int:
    return request.order


def table_of(request: Request) -> PageTable:
    """The pages of a running request."""
    if request.table is None:
        raise ValueError(f"request {request.request_id} is {request.state.name} and has no pages")
    return request.table
