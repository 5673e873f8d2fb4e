"""The real scheduler and pager in virtual time: requests arrive, steps are planned, the clock moves on, tokens appear.

It must not know how long a step takes (`Cost`) nor what is made of the outcomes (`report.py`). One invariant: every
request that arrived is in exactly one outcome, and the clock never runs backwards.

Requests arrive while a step computes, as they do in the engine; each is added at its own time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise

from ....pager import Pager
from ....scheduler import (
    DEADLINE_PASSED,
    Request,
    RequestUpdate,
    SampledToken,
    Scheduler,
    SchedulerError,
    StepPlan,
    StepResult,
)
from ..traffic import Arrival
from .cost import Cost
from .spill import SimulatedSpill

SEQUENCE_S = (
    30e-6  # between steps, per sequence of the step: schedule, commit, publish, arrays (`quire bench` measures it)
)


class Stalled(Exception):
    """Requests are alive, nothing is runnable and nothing will happen: they would wait forever."""


class VirtualClock:
    """Seconds since the simulation began. The scheduler reads it, the simulator sets it."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass(slots=True)
class Outcome:
    """What became of one arrival. Times are seconds of the clock; counters are final once it has ended."""

    arrival: Arrival
    token_times: list[float] = field(default_factory=list)  # when each output token appeared
    end: float | None = None
    finish_reason: str | None = None  # None while it is alive, and where it was refused or failed
    refused: str | None = None  # why it was not accepted, or failed: the name of the error
    queue_s: float = 0.0
    cached_tokens: int = 0
    recomputed_tokens: int = 0
    preemptions: int = 0

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def ttft_s(self) -> float:
        """Time to first token; only where there is one."""
        return self.token_times[0] - self.arrival.time_s

    @property
    def e2e_s(self) -> float:
        return self.token_times[-1] - self.arrival.time_s

    @property
    def itl_s(self) -> list[float]:
        """Inter-token latencies: one less than there are tokens."""
        times = self.token_times
        return [after - before for before, after in pairwise(times)]

    @property
    def tpot_s(self) -> float:
        """Time per output token after the first; only where there are two."""
        return (self.token_times[-1] - self.token_times[0]) / (len(self.token_times) - 1)


class Simulator:
    """Drives `scheduler`, whose clock is `clock`. `arrivals` come in order of time.

    Request ids are the indices of `outcomes`. `max_model_len` refuses longer requests as the engine does. `spill` is
    the pager's store.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        pager: Pager,
        clock: VirtualClock,
        cost: Cost,
        arrivals: Iterable[Arrival],
        *,
        max_model_len: int | None = None,
        spill: SimulatedSpill | None = None,
        sequence_s: float = SEQUENCE_S,
    ) -> None:
        self.scheduler = scheduler
        self.pager = pager
        self.clock = clock
        self.outcomes: list[Outcome] = []
        self.num_steps = 0
        self.computed_tokens = 0  # rows of all steps
        self.owned_page_seconds = 0.0  # pages in use, over time
        self.most_pages_owned = 0
        self.most_waiting = 0
        self._cost = cost
        self._max_model_len = math.inf if max_model_len is None else max_model_len
        self._spill = spill
        self._sequence_s = sequence_s
        self._arrivals = iter(arrivals)
        self._next: Arrival | None = next(self._arrivals, None)
        self._num_alive = 0

    def run(self, until: float = math.inf) -> None:
        """Step until everything has ended, or until the clock has reached `until`. Raises Stalled."""
        while self.clock.now < until and self.step():
            pass

    def step(self) -> bool:
        """One step, or, where nothing is runnable, the time until something happens. False once all is over.

        Raises Stalled.
        """
        plan = self.scheduler.schedule()
        if plan is not None:
            self._execute(plan)
            return True
        soonest = self._next_event()
        if soonest is not None:
            self._admit_until(max(self.clock.now, soonest))
            self._expire()
            return True
        if self._num_alive:
            raise Stalled(f"{self._num_alive} requests are alive at {self.clock.now:.3f} s and none can run")
        return False

    def _next_event(self) -> float | None:
        """When somebody arrives or a deadline passes."""
        events = [self.scheduler.next_deadline, None if self._next is None else self._next.time_s]
        return min((time for time in events if time is not None), default=None)

    def _expire(self) -> None:
        for update in self.scheduler.expire():
            self._note(update)

    def cancel(self, request_id: int) -> None:
        """Its user leaves, between two steps."""
        update = self.scheduler.cancel(request_id)
        if update is not None:
            self._note(update)

    def _execute(self, plan: StepPlan) -> None:
        start, owned = self.clock.now, self.pager.num_owned
        duration_s = self._cost(plan)
        end = start + duration_s + len(plan.sequences) * self._sequence_s
        if self._spill is not None:
            end += self._spill.take_spent_s()
        self._admit_until(end)
        sampled = tuple(
            SampledToken(sequence.request_id, _own_token(sequence.request_id))
            for sequence in plan.sequences
            for _ in range(sequence.num_samples)
        )
        for update in self.scheduler.commit(StepResult(plan.step_id, sampled, duration_s)):
            self._note(update)
        self._expire()
        self.num_steps += 1
        self.computed_tokens += plan.num_decode_rows + plan.num_prefill_tokens
        self.owned_page_seconds += owned * (end - start)
        self.most_pages_owned = max(self.most_pages_owned, owned)

    def _admit_until(self, time: float) -> None:
        """Everyone who arrives up to `time`, which it is then."""
        while self._next is not None and self._next.time_s <= time:
            self.clock.now = max(self.clock.now, self._next.time_s)
            self._add(self._next)
            self._next = next(self._arrivals, None)
        self.clock.now = time

    def _add(self, arrival: Arrival) -> None:
        request_id, outcome = len(self.outcomes), Outcome(arrival)
        self.outcomes.append(outcome)
        if arrival.prompt_tokens + arrival.output_tokens > self._max_model_len:
            outcome.refused = "ContextLengthExceeded"
            return
        request = Request(
            request_id,
            _prompt(arrival, request_id),
            max_tokens=arrival.output_tokens,
            tenant=arrival.tenant,
            priority=arrival.priority,
            deadline=None if arrival.deadline_s is None else self.clock.now + arrival.deadline_s,
        )
        try:
            estimate = self.scheduler.add(request)
        except SchedulerError as error:
            outcome.refused = type(error).__name__
        else:
            self._num_alive += 1
            self.most_waiting = max(self.most_waiting, estimate.position + 1)

    def _note(self, update: RequestUpdate) -> None:
        request = update.request
        outcome = self.outcomes[request.request_id]
        for _ in update.tokens:
            outcome.token_times.append(self.clock.now)
        if not update.ended:
            return
        self._num_alive -= 1
        outcome.end = self.clock.now
        outcome.finish_reason = update.finish_reason
        outcome.refused = "DeadlineExceeded" if update.error == DEADLINE_PASSED else update.error
        outcome.queue_s = request.queue_s
        outcome.cached_tokens = request.cached_tokens
        outcome.recomputed_tokens = request.recomputed_tokens
        outcome.preemptions = request.preemptions


def _prompt(arrival: Arrival, request_id: int) -> list[int]:
    """Token ids, equal where blocks are: every block is one even token over and over, the rest one odd token."""
    tokens: list[int] = []
    for block in arrival.blocks:
        tokens += [2 * block] * arrival.block_tokens
    del tokens[arrival.prompt_tokens :]
    return tokens + [_own_token(request_id)] * (arrival.prompt_tokens - len(tokens))


def _own_token(request_id: int) -> int:
    return 2 * request_id + 1
