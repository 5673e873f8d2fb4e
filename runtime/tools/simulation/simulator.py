"""Run the real scheduler and pager in virtual time, on a stream of requests and a cost of steps.

The caller's `StepCost` has the duration of a step. Every request that arrived is in exactly one outcome, and the clock
never runs backwards. Requests arrive while a step computes, as in the engine; each is added at its own time. The next
request of a conversation arrives some time after the previous answer.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from ....pager import Pager
from ....pager.spill import READ_BYTES_PER_S, WRITE_BYTES_PER_S
from ....pager.states import NO_STATE
from ....scheduler import (
    DEADLINE_PASSED,
    Request,
    RequestSpec,
    RequestUpdate,
    SampledToken,
    Scheduler,
    SchedulerError,
    StepPlan,
    StepResult,
)
from ..traffic import Arrival
from .cost import StepCost


class SimulationStalled(Exception):
    """Requests are unfinished, none can run and no event is left: they would wait forever."""


class VirtualClock:
    """Seconds since the simulation began. The scheduler reads it, the simulator sets it."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass(slots=True)
class RequestOutcome:
    """The record of one request. Times are seconds of the clock; counters are final once the request has ended."""

    arrival: Arrival
    token_times: list[float] = field(default_factory=list)  # time of each output token
    end: float | None = None
    finish_reason: str | None = None  # None: unfinished, refused or failed
    refused: str | None = None  # the name of the error, if it was refused or failed
    queue_s: float = 0.0
    cached_tokens: int = 0
    recomputed_tokens: int = 0
    preemptions: int = 0
    lost_tokens: int = 0  # tokens that were computed on hosts which were lost
    num_moves: int = 0  # moves to another host

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def ttft_s(self) -> float:
        """Time to first token. Requires a token."""
        return self.token_times[0] - self.arrival.time_s

    @property
    def e2e_s(self) -> float:
        return self.token_times[-1] - self.arrival.time_s

    @property
    def itl_s(self) -> list[float]:
        """Inter-token latencies: one fewer than there are tokens."""
        return [after - before for before, after in pairwise(self.token_times)]

    @property
    def tpot_s(self) -> float:
        """Mean time per output token after the first. Requires two tokens."""
        return (self.token_times[-1] - self.token_times[0]) / (len(self.token_times) - 1)


class SimulatedSpill:
    """A PageStore that holds slots without bytes, at the speed that a SpillFile assumes for an unmeasured disk."""

    def __init__(self, page_bytes: int, max_bytes: int, state_bytes: int = 0) -> None:
        self._free = list(range(max_bytes // page_bytes))
        self._state_slots = -(-state_bytes // page_bytes)
        self._write_s = page_bytes / WRITE_BYTES_PER_S  # per slot
        self._read_s = page_bytes / READ_BYTES_PER_S
        self._spent_s = 0.0

    def save(self, page_ids: Sequence[int], state: int = NO_STATE) -> Sequence[int] | None:
        num_slots = len(page_ids) + (state != NO_STATE) * self._state_slots
        if num_slots > len(self._free):
            return None
        self._spent_s += num_slots * self._write_s
        return [self._free.pop() for _ in range(num_slots)]

    def load(self, slots: Sequence[int], page_ids: Sequence[int], state: int = NO_STATE) -> bool:
        self._spent_s += len(slots) * self._read_s
        return True

    def free(self, slots: Sequence[int]) -> None:
        self._free.extend(slots)

    def seconds(self, num_pages: int, num_states: int = 0) -> float | None:
        num_slots = num_pages + num_states * self._state_slots
        return num_slots * (self._write_s + self._read_s) if num_slots <= len(self._free) else None

    def pop_spent_s(self) -> float:
        """Return the seconds of disk time since the last call; the scheduler waits for the disk."""
        spent_s = self._spent_s
        self._spent_s = 0.0
        return spent_s


class Simulator:
    """A simulation: `scheduler`, whose clock is `clock`, serves `arrivals`, which are in order of time.

    A request id is the index of the request in `outcomes`, which the hosts of a fleet share. Requests longer than
    `max_model_len` are refused, as in the engine. `spill` is the pager's store. Between steps, `sequence_s` pass per
    sequence. `run` simulates one host; a fleet calls `add`, `begin_step` and `end_step`, at times of its clock.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        pager: Pager,
        clock: VirtualClock,
        cost: StepCost,
        arrivals: Iterable[Arrival],
        *,
        max_model_len: int | None = None,
        spill: SimulatedSpill | None = None,
        sequence_s: float = 0.0,
        outcomes: list[RequestOutcome] | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.pager = pager
        self.clock = clock
        self.outcomes = [] if outcomes is None else outcomes
        self.requests: dict[int, Request] = {}  # unfinished ones, by id
        self.started_s = clock.now
        self.num_steps = 0
        self.computed_tokens = 0  # rows of all steps together
        self.owned_page_seconds = 0.0  # integral of the pages in use over time
        self.max_pages_owned = 0
        self.max_waiting = 0
        self._cost = cost
        self._max_model_len = math.inf if max_model_len is None else max_model_len
        self._spill = spill
        self._sequence_s = sequence_s
        self._arrivals = [(arrival.time_s, order, arrival) for order, arrival in enumerate(arrivals)]  # a heap
        self._num_arrivals = len(self._arrivals)
        self._step: _Step | None = None  # step in flight

    def run(self, until: float = math.inf) -> None:
        """Step until all requests have ended or the clock has reached `until`. Raises SimulationStalled."""
        while self.clock.now < until and self.step():
            pass

    def step(self) -> bool:
        """Run one step or, if nothing can run, advance to the next event. Return False when nothing is left.

        Raises SimulationStalled.
        """
        end = self.begin_step()
        if end is not None:
            self._admit_until(end)
            for outcome in self.end_step():
                self._follow(outcome)
            return True
        soonest = self._next_event()
        if soonest is not None:
            self._admit_until(max(self.clock.now, soonest))
            self.expire()
            return True
        if self.requests:
            raise SimulationStalled(
                f"{len(self.requests)} requests are unfinished at {self.clock.now:.3f} s and none can run"
            )
        return False

    @property
    def hosts(self) -> tuple[Simulator, ...]:
        """This simulator: a fleet of one."""
        return (self,)

    @property
    def is_stepping(self) -> bool:
        """Whether a step is in flight."""
        return self._step is not None

    def begin_step(self) -> float | None:
        """Plan a step. Return the time at which it ends, or None if nothing can run."""
        plan = self.scheduler.schedule()
        start = self.clock.now
        if plan is None:
            return None
        duration_s = self._cost(plan)
        end = start + duration_s + len(plan.sequences) * self._sequence_s
        if self._spill is not None:
            end += self._spill.pop_spent_s()
        self._step = _Step(plan, start, duration_s, self.pager.pool.num_owned)
        return end

    def end_step(self) -> list[RequestOutcome]:
        """Commit the step in flight. Return the outcomes of the requests that have ended."""
        assert self._step is not None, "begin_step comes first"
        (plan, start, duration_s, owned) = self._step
        self._step = None
        sampled = tuple(
            SampledToken(sequence.request_id, self._own_token(sequence.request_id))
            for sequence in plan.sequences
            for _ in range(sequence.num_samples)
        )
        updates = self.scheduler.commit(StepResult(plan.step_id, sampled, duration_s))
        ended = [self._note(update) for update in updates]
        ended += self.expire()
        self.num_steps += 1
        self.computed_tokens += plan.num_decode_rows + plan.num_prefill_tokens
        self.owned_page_seconds += owned * (self.clock.now - start)
        self.max_pages_owned = max(self.max_pages_owned, owned)
        return [outcome for outcome in ended if outcome is not None]

    def expire(self) -> list[RequestOutcome | None]:
        """End requests whose deadline has passed. Return their outcomes."""
        return [self._note(update) for update in self.scheduler.expire()]

    def add(self, arrival: Arrival) -> RequestOutcome:
        """Add a request that arrives now, and return its outcome. A refused request has ended."""
        request_id = len(self.outcomes)
        outcome = RequestOutcome(arrival)
        self.outcomes.append(outcome)
        if arrival.prompt_tokens + arrival.output_tokens > self._max_model_len:
            outcome.refused = "ContextLengthExceeded"
            return outcome
        request = Request(
            RequestSpec(
                request_id,
                prompt_tokens(arrival, request_id),
                max_tokens=arrival.output_tokens,
                tenant=arrival.tenant,
                deadline=None if arrival.deadline_s is None else self.clock.now + arrival.deadline_s,
            )
        )
        try:
            estimate = self.scheduler.add(request)
        except SchedulerError as error:
            outcome.refused = type(error).__name__
        else:
            self.requests[request_id] = request
            self.max_waiting = max(self.max_waiting, estimate.position + 1)
        return outcome

    def readmit(self, request: Request) -> None:
        """Continue a request of another simulator, which was lost with all of its pages."""
        outcome = self.outcomes[request.request_id]
        self._count(outcome, request)
        outcome.lost_tokens = request.num_computed_tokens
        outcome.num_moves += 1
        continued = Request(request.spec, request.output_token_ids)
        self.requests[request.request_id] = continued
        self.scheduler.readmit(continued)

    def _next_event(self) -> float | None:
        """Return the time of the next arrival or deadline."""
        events = [self.scheduler.next_deadline, self._arrivals[0][0] if self._arrivals else None]
        return min((time for time in events if time is not None), default=None)

    def _admit_until(self, time: float) -> None:
        """Add all requests that arrive up to `time`, and advance the clock to it."""
        while self._arrivals and self._arrivals[0][0] <= time:
            arrival = heapq.heappop(self._arrivals)[-1]
            self.clock.now = max(self.clock.now, arrival.time_s)
            self.add(arrival)
        self.clock.now = time

    def _follow(self, outcome: RequestOutcome) -> None:
        """Schedule the next request of the conversation."""
        if outcome.finished and (arrival := outcome.arrival.next_turn(self.clock.now)) is not None:
            heapq.heappush(self._arrivals, (arrival.time_s, self._num_arrivals, arrival))
            self._num_arrivals += 1

    def _note(self, update: RequestUpdate) -> RequestOutcome | None:
        """Record an update. Return the outcome of a request that ended."""
        outcome = self.outcomes[update.request_id]
        for _ in update.tokens:
            outcome.token_times.append(self.clock.now)
        if not update.ended:
            return None
        request = self.requests.pop(update.request_id)
        self._count(outcome, request)
        outcome.end = self.clock.now
        outcome.finish_reason = update.finish_reason
        outcome.refused = "DeadlineExceeded" if update.error == DEADLINE_PASSED else update.error
        outcome.queue_s = request.final_counters().queue_s
        return outcome

    def _count(self, outcome: RequestOutcome, request: Request) -> None:
        """Add the counters of a request that ends on this host or leaves it."""
        if outcome.lost_tokens:
            outcome.recomputed_tokens += max(
                0, min(outcome.lost_tokens, request.num_computed_tokens) - request.cached_tokens
            )
        else:
            outcome.cached_tokens = request.cached_tokens
        outcome.recomputed_tokens += request.recomputed_tokens
        outcome.preemptions += request.preemptions

    def _own_token(self, request_id: int) -> int:
        return own_token(self.outcomes[request_id].arrival, request_id)


class _Step(NamedTuple):
    """A step in flight."""

    plan: StepPlan
    start_s: float
    duration_s: float  # time without the pause between steps
    pages_owned: int


def prompt_tokens(arrival: Arrival, request_id: int) -> list[int]:
    """Return token ids that are equal where blocks are equal: a block repeats one even id, the rest one odd id."""
    tokens: list[int] = []
    for block in arrival.blocks:
        tokens += [2 * block] * arrival.block_tokens
    del tokens[arrival.prompt_tokens :]
    return tokens + [own_token(arrival, request_id)] * (arrival.prompt_tokens - len(tokens))


def own_token(arrival: Arrival, request_id: int) -> int:
    """Return the id of a conversation's own tokens: the tokens of prompts after their blocks, and of answers."""
    return 2 * (request_id if arrival.conversation is None else arrival.conversation) + 1
