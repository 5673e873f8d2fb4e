"""Run the real scheduler and pager in virtual time, on a stream of requests and a cost of steps.

How long a step takes is the caller's `StepCost`. Every request that arrived is in exactly one outcome, and the clock
never runs backwards. Requests arrive while a step computes, as in the engine; each is added at its own time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from ....pager import Pager
from ....pager.spill import READ_BYTES_PER_S, WRITE_BYTES_PER_S
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
    """What happened to one request. Times are seconds of the clock; counters are final once the request has ended."""

    arrival: Arrival
    token_times: list[float] = field(default_factory=list)  # when each output token appeared
    end: float | None = None
    finish_reason: str | None = None  # None: unfinished, refused or failed
    refused: str | None = None  # the name of the error, if it was refused or failed
    queue_s: float = 0.0
    cached_tokens: int = 0
    recomputed_tokens: int = 0
    preemptions: int = 0

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
    """A PageStore that holds no bytes, only slots; as fast as a SpillFile assumes a disk that it has not measured."""

    def __init__(self, page_bytes: int, max_bytes: int) -> None:
        self._free = list(range(max_bytes // page_bytes))
        self._write_s = page_bytes / WRITE_BYTES_PER_S  # per page
        self._read_s = page_bytes / READ_BYTES_PER_S
        self._spent_s = 0.0

    def save(self, page_ids: Sequence[int]) -> Sequence[int] | None:
        if len(page_ids) > len(self._free):
            return None
        self._spent_s += len(page_ids) * self._write_s
        return [self._free.pop() for _ in page_ids]

    def load(self, slots: Sequence[int], page_ids: Sequence[int]) -> bool:
        self._spent_s += len(slots) * self._read_s
        return True

    def free(self, slots: Sequence[int]) -> None:
        self._free.extend(slots)

    def seconds(self, num_pages: int) -> float | None:
        return num_pages * (self._write_s + self._read_s) if num_pages <= len(self._free) else None

    def take_spent_s(self) -> float:
        """Return the seconds of disk time since the last call; the scheduler waits for the disk."""
        spent_s, self._spent_s = self._spent_s, 0.0
        return spent_s


class Simulator:
    """A simulation: `scheduler`, whose clock is `clock`, serves `arrivals`, which are in order of time.

    A request id is the index of the request in `outcomes`. Requests longer than `max_model_len` are refused, as in the
    engine. `spill` is the pager's store. Between steps, `sequence_s` pass per sequence.
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
    ) -> None:
        self.scheduler = scheduler
        self.pager = pager
        self.clock = clock
        self.outcomes: list[RequestOutcome] = []
        self.num_steps = 0
        self.computed_tokens = 0  # rows of all steps together
        self.owned_page_seconds = 0.0  # integral of the pages in use over time
        self.max_pages_owned = 0
        self.max_waiting = 0
        self._cost = cost
        self._max_model_len = math.inf if max_model_len is None else max_model_len
        self._spill = spill
        self._sequence_s = sequence_s
        self._arrivals = iter(arrivals)
        self._next: Arrival | None = next(self._arrivals, None)
        self._requests: dict[int, Request] = {}  # unfinished ones, by id

    def run(self, until: float = math.inf) -> None:
        """Step until all requests have ended or the clock has reached `until`. Raises SimulationStalled."""
        while self.clock.now < until and self.step():
            pass

    def step(self) -> bool:
        """Run one step or, if nothing can run, advance to the next event. Return False when nothing is left.

        Raises SimulationStalled.
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
        if self._requests:
            raise SimulationStalled(
                f"{len(self._requests)} requests are unfinished at {self.clock.now:.3f} s and none can run"
            )
        return False

    def _next_event(self) -> float | None:
        """Return the time of the next arrival or deadline."""
        events = [self.scheduler.next_deadline, None if self._next is None else self._next.time_s]
        return min((time for time in events if time is not None), default=None)

    def _expire(self) -> None:
        for update in self.scheduler.expire():
            self._note(update)

    def _execute(self, plan: StepPlan) -> None:
        start, owned = self.clock.now, self.pager.pool.num_owned
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
        self.max_pages_owned = max(self.max_pages_owned, owned)

    def _admit_until(self, time: float) -> None:
        """Add all requests that arrive up to `time`, and advance the clock to it."""
        while self._next is not None and self._next.time_s <= time:
            self.clock.now = max(self.clock.now, self._next.time_s)
            self._add(self._next)
            self._next = next(self._arrivals, None)
        self.clock.now = time

    def _add(self, arrival: Arrival) -> None:
        request_id, outcome = len(self.outcomes), RequestOutcome(arrival)
        self.outcomes.append(outcome)
        if arrival.prompt_tokens + arrival.output_tokens > self._max_model_len:
            outcome.refused = "ContextLengthExceeded"
            return
        request = Request(
            RequestSpec(
                request_id,
                _prompt(arrival, request_id),
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
            self._requests[request_id] = request
            self.max_waiting = max(self.max_waiting, estimate.position + 1)

    def _note(self, update: RequestUpdate) -> None:
        outcome = self.outcomes[update.request_id]
        for _ in update.tokens:
            outcome.token_times.append(self.clock.now)
        if not update.ended:
            return
        request = self._requests.pop(update.request_id)
        outcome.end = self.clock.now
        outcome.finish_reason = update.finish_reason
        outcome.refused = "DeadlineExceeded" if update.error == DEADLINE_PASSED else update.error
        outcome.queue_s = request.queue_s
        outcome.cached_tokens = request.cached_tokens
        outcome.recomputed_tokens = request.recomputed_tokens
        outcome.preemptions = request.preemptions


def _prompt(arrival: Arrival, request_id: int) -> list[int]:
    """Return token ids that are equal where blocks are: a block repeats one even id, the rest one odd id."""
    tokens: list[int] = []
    for block in arrival.blocks:
        tokens += [2 * block] * arrival.block_tokens
    del tokens[arrival.prompt_tokens :]
    return tokens + [_own_token(request_id)] * (arrival.prompt_tokens - len(tokens))


def _own_token(request_id: int) -> int:
    return 2 * request_id + 1
