"""The scheduler: plans steps for its requests, and turns each step's result into updates of these requests.

Synchronous, without I/O; must not import tensors, kernels or sockets. A step is planned (planning.py) by growing page
tables: the step computes what a table holds beyond the computed tokens. Between steps every running request's table
holds exactly its computed tokens, so the pages of a request that ends are back before the next step is planned.

No request starves. Protected requests (running_batch.py) never lack a page, so they end. Without protected requests,
the oldest running request is never preempted and can always make room for itself, so it ends. A request is preempted at
most `MAX_PREEMPTIONS` times before it is protected.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from ..pager import Pager, check
from .admission import AdmissionEstimate, DuplicateRequest, QueueFull, SchedulerConfig, StepMismatch
from .budget import Budget, WaitForecast
from .committing import Committer
from .cost import CostModel
from .encoding import NO_ENCODER, EncoderLimits, EncoderPlanner
from .plan import SampledToken, StepPlan, StepResult
from .planning import Planner
from .policy import FirstComeFirstServed, Policy
from .queue import DeadlineHeap, RequestQueue
from .request import EncodeRequest, Ending, FinishReason, QueuedRequest, Request, RequestUpdate, State
from .running_batch import RunningBatch, table_of
from .speculative import Speculator
from .stats import SchedulerStats

DEADLINE_PASSED = "the request's deadline passed"  # the error of a request that `expire` ended
LEARNING_STRIDE = 4  # the cost model learns from every step with prefill, and from one in 4 without


class Scheduler:
    """Continuous batching over one pager. `schedule` and `commit` alternate; other methods may be called at any time.

    `cost` must be the model that `budget` uses, if it uses one. `debug` audits the pager twice per step; by default it
    is on when QUIRE_DEBUG=1. Raises ValueError if the budget is smaller than `max_num_seqs`.
    """

    def __init__(
        self,
        pager: Pager,
        budget: Budget,
        config: SchedulerConfig,
        *,
        cost: CostModel | None = None,
        policy: Policy[Request] | None = None,
        encoder: EncoderLimits = NO_ENCODER,
        encoder_policy: Policy[EncodeRequest] | None = None,
        clock: Callable[[], float] = time.monotonic,
        debug: bool | None = None,
    ) -> None:
        max_rows = budget.max_num_batched_tokens
        max_seqs = config.max_num_seqs
        if max_rows < max_seqs:
            raise ValueError(f"max_num_batched_tokens must be at least max_num_seqs={max_seqs}, got {max_rows}")
        self.num_steps = 0  # finished steps, failed ones included; in a healthy engine it grows while there is work
        self._pager = pager
        self._cost = cost or CostModel()
        self._policy: Policy[Request] = FirstComeFirstServed() if policy is None else policy  # an empty one is falsy
        self._queue = RequestQueue(self._policy, config, pager.pool.num_pages)
        self._batch = RunningBatch(pager, self._cost)
        self._forecast = WaitForecast(self._cost, budget, max_seqs)
        max_samples = min(max_rows, config.max_num_samples or max_seqs)
        self._speculator = Speculator(
            self._cost,
            pager.page_size,
            config.num_speculative_tokens,
            max_samples,
            config.draft_cost,
            draft_reads_steps=config.draft_reads_steps,
        )
        order: Policy[EncodeRequest] = FirstComeFirstServed() if encoder_policy is None else encoder_policy
        self._encoder = EncoderPlanner(encoder, order, self._cost, self._queue.count_encodings)
        self._planner = Planner(
            self._batch,
            self._queue,
            budget=budget,
            speculator=self._speculator,
            encoder=self._encoder,
            config=config,
            cost=self._cost,
            clock=clock,
        )
        self._committer = Committer(self._batch, self._queue, pager, self._speculator, self._end)
        self._clock = clock
        self._debug = os.environ.get("QUIRE_DEBUG") == "1" if debug is None else debug
        self._requests: dict[int, Request] = {}  # requests that have not ended, in order of arrival
        self._deadlines = DeadlineHeap()
        self._in_flight: StepPlan | None = None
        self._committed_at = 0.0  # time of the last commit
        self._endings: dict[int, Ending] = {}  # endings of requests in flight that `finish` was called for
        self._num_arrived = 0

    # Adding and ending requests.

    def check_room(self, tenant: str = "", count: int = 1) -> None:
        """Raise QueueFull if `add` would: a cheap check before a prompt is tokenized."""
        if (limit := self._queue.limit_reached(tenant, count)) is not None:
            raise QueueFull(f"the queue is full: {limit}", self._estimate(0, 0))

    def add(self, request: Request, *forks: Request) -> AdmissionEstimate:
        """Queue a request and its `forks`, which have the same prompt: it computes the prompt, and they fork its pages.

        Raises DuplicateRequest or a Refused error before anything has changed: all are queued, or none.
        """
        requests = (request, *forks)
        now = self._clock()
        self._prepare(requests)
        self.check_room(request.spec.tenant, len(requests))
        estimate = self._estimate(request.pages_needed, request.num_prompt_tokens)
        self._queue.check_fit(request, estimate, now)
        return estimate if self._accept(requests, now) else replace(estimate, pin_refused=True)

    def add_encoding(self, request: EncodeRequest) -> AdmissionEstimate:
        """Queue texts to encode. Raises DuplicateRequest, QueueFull or CannotMeetDeadline, changing nothing."""
        now = self._clock()
        self._check_encoding(request)
        if not request.spec.is_continuation:
            self.check_room(request.spec.tenant)
        estimate = self._encoder.check_deadline(request, now)
        self._arrive(request, now)
        self._encoder.add(request)
        return estimate

    def readmit(self, request: Request | EncodeRequest) -> None:
        """Queue a request that another scheduler with the same limits accepted; limits are not checked again.

        Raises DuplicateRequest.
        """
        if isinstance(request, EncodeRequest):
            self._check_encoding(request)
            self._arrive(request, self._clock())
            self._encoder.add(request)
            return
        self._prepare((request,))
        self._accept((request,), self._clock())

    def finish(
        self, request_id: int, reason: FinishReason | None = None, error: str | None = None
    ) -> RequestUpdate | None:
        """End a request in any state, for a reason or with an error. Unknown ids are ignored.

        Returns its last update. Returns None if the request is part of the step in flight: `commit` then reports its
        end, without that step's tokens. If this is called twice during a step, the first call decides.
        """
        if (reason is None) == (error is None):
            raise ValueError("a request ends for a reason or with an error")
        ending = Ending(reason, error)
        if (encoding := self._encoder.requests.get(request_id)) is not None:
            return self._encoder.end(encoding, ending, self._clock())  # no step in flight refers to it
        request = self._requests.get(request_id)
        if request is None:
            return None
        if self._is_in_flight(request_id):
            self._endings.setdefault(request_id, ending)
            return None
        return self._end(request, ending)

    def expire(self) -> list[RequestUpdate]:
        """End every request whose deadline has passed; requests in flight end with their step."""
        now = self._clock()
        updates = []
        while (deadline := self.next_deadline) is not None and deadline <= now:
            update = self.finish(self._deadlines.pop().request_id, error=DEADLINE_PASSED)
            if update is not None:
                updates.append(update)
        return updates

    # Stepping.

    def schedule(self) -> StepPlan | None:
        """Return the next step, or None without work. Call `commit` or `abandon` for it before the next `schedule`."""
        if self._in_flight is not None:
            raise StepMismatch(f"step {self._in_flight.step_id} is still in flight")
        self._in_flight = self._planner.plan()
        if self._debug:
            self._audit()
        return self._in_flight

    def commit(self, result: StepResult) -> list[RequestUpdate]:
        """Take the result of the step in flight. Return updates of the requests that gained a token or ended.

        Raises StepMismatch, changing nothing, if the result belongs to another step.
        """
        plan = self._match(result)
        now = self._clock()
        updates = self._committer.commit(plan, result, self._endings, now)
        if plan.sequences and not result.deferred:
            self._learn(result.duration_s)
        if not (plan.num_prefill_tokens or plan.encoder):  # pauses before other steps may be idle time
            step_s = result.duration_s + result.drafting.seconds
            self._speculator.note_pause(now - self._committed_at - step_s, result.duration_s)
        self._committed_at = now
        self._speculator.note_proposals(result.drafting, self._requests)
        updates += self._encoder.commit(result.encoder, now)
        self._finish_step()
        return [update for update in updates if update is not None]

    def abandon(self, error: str) -> list[RequestUpdate]:
        """End all requests of the failed step in flight with `error`, or as requested by a `finish` during the step."""
        if self._in_flight is None:
            raise StepMismatch("no step is in flight")
        updates = []
        for row in self._in_flight.sequences:
            request = self._requests.get(row.request_id)
            if request is not None:  # not a beam, which ends with its parent
                updates.append(self._end(request, self._endings.pop(row.request_id, Ending(error=error))))
        updates += self._encoder.abandon(error, self._clock())
        self._finish_step()
        return updates

    def end_all(self, error: str) -> list[RequestUpdate]:
        """End every request with `error`. No step may be running."""
        self._in_flight = None
        updates = [
            self._end(request, self._endings.pop(request.request_id, Ending(error=error)))
            for request in tuple(self._requests.values())
        ]
        return updates + self._encoder.end_all(error, self._clock())

    # State.

    @property
    def has_work(self) -> bool:
        """Whether any request has not ended."""
        return bool(self._requests) or self._encoder.has_work

    @property
    def num_waiting(self) -> int:
        """Requests in the queue, including encode requests."""
        return len(self._queue) + self._encoder.stats().waiting

    @property
    def predicted_wait_s(self) -> float | None:
        """Seconds until a new request would be computed; None until step costs have been measured."""
        return self._estimate(0, 0).predicted_wait_s

    @property
    def itl_overrun(self) -> float:
        """Predicted time of decoding alone in the last step, relative to the latency target; 0 if it can be met."""
        return self._planner.itl_overrun

    @property
    def next_deadline(self) -> float | None:
        """The next time at which `expire` has something to do, in seconds of the clock."""
        return self._deadlines.earliest(len(self._requests) + len(self._encoder.requests))

    def now(self) -> float:
        """Return the time of the clock that deadlines refer to, in seconds."""
        return self._clock()

    def stats(self) -> SchedulerStats:
        """Return a snapshot of gauges and counters."""
        pager = self._pager
        pool = pager.pool
        states = pager.states
        cached = pager.cached_states
        return SchedulerStats(
            step=self.num_steps,
            running=self._batch.num_requests,
            waiting=len(self._queue),
            waiting_by_reason=self._queue.waiting_by_reason(),
            pages_total=pool.num_pages,
            pages_owned=pool.num_owned,
            pages_cached=pool.num_cached,
            pages_free=pool.num_free,
            pages_reserved=pool.num_reserved,
            pages_pinned=pool.num_pinned,
            pages_spilled=pager.num_spilled,
            prefix_queries_tokens=pager.prefix_queried_tokens,
            prefix_hits_tokens=pager.prefix_hit_tokens,
            states_total=states.num_slots,
            states_cached=len(cached),
            states_free=states.num_slots - states.num_owned,
            states_kept=cached.num_kept,
            state_hits=cached.num_hits,
            state_copies=states.num_copies,
            states_spilled=pager.num_spilled_states,
            states_cached_bytes=len(cached) * states.nbytes,
            stateless_tokens=pager.stateless_tokens,
            preemptions=self._batch.num_preemptions,
            preemptions_spilled=self._batch.num_spilled,
            recomputed_tokens=self._committer.recomputed_tokens,
            draft_tokens=self._speculator.num_draft_tokens,
            accepted_draft_tokens=self._speculator.num_accepted_tokens,
            drafted_by_source=dict(self._speculator.drafted),
            accepted_by_source=dict(self._speculator.accepted),
            accepted_by_position={str(at): count for at, count in self._speculator.accepted_at.items()},
            steps_over_itl_target=self._planner.num_itl_overruns,
            encoder=self._encoder.stats(),
        )

    # Adding.

    def _check_encoding(self, request: EncodeRequest) -> None:
        """Raise DuplicateRequest, or ValueError without an encoder."""
        if not self._encoder.has_encoder:
            raise ValueError("this scheduler has no encoder")
        self._check_new(request)

    def _check_new(self, request: QueuedRequest) -> None:
        if request.request_id in self._requests or request.request_id in self._encoder.requests:
            raise DuplicateRequest(request.request_id)

    def _arrive(self, request: QueuedRequest, now: float) -> None:
        request.arrive(self._num_arrived, now)
        self._num_arrived += 1
        self._deadlines.push(request)

    def _prepare(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self._check_new(request)
            request.pages_needed = self._batch.pages_at_longest(request)

    def _estimate(self, pages_needed: int, prefill_tokens: int) -> AdmissionEstimate:
        """Return the estimate for a new request that needs these pages and prompt tokens."""
        running = self._batch.requests.values()
        unfinished = sum(len(request.token_ids) - request.num_computed_tokens for request in running)
        wait_s = self._forecast.wait_s(
            self._queue.num_tokens + unfinished + prefill_tokens,
            len(self._queue),
            self._batch.num_seqs,
            sum(request.num_computed_tokens for request in running),
        )
        return AdmissionEstimate(len(self._queue), pages_needed, self._pager.pool.num_available, wait_s)

    def _accept(self, requests: Sequence[Request], now: float) -> bool:
        """Queue the requests. Return False if their prompt was to be pinned and will not be."""
        for request in requests:
            self._arrive(request, now)
            self._requests[request.request_id] = request
            if request.spec.echoed:
                self._speculator.expect(request)
        self._queue.add(requests)
        spec = requests[0].spec
        return spec.pin_s is None or self._queue.promise_pin(
            requests, *self._pager.pages_to_pin(spec.prompt_token_ids, spec.prefix_salt, spec.images)
        )

    # Committing and ending.

    def _match(self, result: StepResult) -> StepPlan:
        plan = self._in_flight
        if plan is None or result.step_id != plan.step_id:
            raise StepMismatch(f"step {result.step_id} is not in flight")
        expected = [row.request_id for row in plan.sequences for _ in range(row.num_samples)]
        if [token.request_id for token in result.sampled] != expected:
            raise StepMismatch(f"step {result.step_id} must sample for requests {expected}, in this order")
        if len(plan.encoder) != len(result.encoder):
            raise StepMismatch(f"step {result.step_id} must have {len(plan.encoder)} results of the encoder")
        return plan

    def _learn(self, seconds: float) -> None:
        load = self._planner.load
        if seconds > 0 and (load.prefill_tokens or not self._cost.is_warm or not self.num_steps % LEARNING_STRIDE):
            self._cost.observe(load, seconds)

    def _end(self, request: Request, ending: Ending, tokens: Sequence[SampledToken] = ()) -> RequestUpdate:
        now = self._clock()
        if request.table is None:
            self._queue.remove(request)
            self._batch.discard_spilled(request)
        else:
            self._queue.note_finished(request)
            self._batch.remove(request)
            self._forecast.note_output(request.num_output_tokens)
        self._queue.release_forks(request)
        self._speculator.forget(request)
        spec = request.spec
        if spec.pin_s is not None and request.pages_to_pin is not None:
            self._pager.pin(spec.prompt_token_ids, spec.prefix_salt, now + spec.pin_s, spec.images)
            self._queue.release_pin(request)
        del self._requests[request.request_id]
        request.finish_reason, request.error = ending
        request.enter(State.ENDED, now)
        return RequestUpdate(request.request_id, tuple(tokens), *ending, request.final_counters())

    def _finish_step(self) -> None:
        self._in_flight = None
        self.num_steps += 1
        if self._debug:
            self._audit()

    def _is_in_flight(self, request_id: int) -> bool:
        plan = self._in_flight
        return plan is not None and any(row.request_id == request_id for row in plan.sequences)

    def _audit(self) -> None:
        check(self._pager, [table_of(request) for request in self._batch.requests.values()])
