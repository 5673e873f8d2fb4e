"""Planning of a step: which sequences run, how many tokens each computes, and how long new requests would wait.

Must not import the scheduler. Planning grows page tables and changes which requests run, nothing else. The plan is what
the tables have grown by, so a plan that is never executed costs no token.

Order of a step: one token for every decoding request; then prefill chunks in the policy's order, newly admitted
requests included, within the budget; then draft tokens, if no other request could use the step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Protocol

from ..pager import OutOfPages
from .admission import SchedulerConfig
from .cost import CostModel, StepLoad, chunk_pairs
from .plan import ScheduledSequence, StepPlan
from .policy import Policy
from .queue import RequestQueue
from .request import Request, State
from .running_batch import RunningBatch, table_of
from .speculative import Speculator

TARGET_SHARE = 0.9  # share of the latency target to plan for; the rest is for work around a step and for errors
LEAST_PREFILL = 16  # prefill tokens in every step, whatever the target: limits how long a prompt takes
OUTPUT_MEMORY = 0.95  # weight of the earlier mean output length, per finished request


class Planner:
    """Plans one step at a time."""

    def __init__(
        self,
        batch: RunningBatch,
        queue: RequestQueue,
        budget: Budget,
        speculator: Speculator,
        config: SchedulerConfig,
        clock: Callable[[], float],
    ) -> None:
        self.load = StepLoad()  # of the last plan
        self._batch = batch
        self._queue = queue
        self._policy: Policy = queue.policy
        self._budget = budget
        self._speculator = speculator
        self._max_num_seqs = config.max_num_seqs
        self._clock = clock
        self._num_plans = 0
        self._has_preempted = False  # to free pages, in the step being planned; then no request is admitted

    def plan(self) -> StepPlan | None:
        """Return the next step, or None when there is nothing to run."""
        self._has_preempted = False
        self._batch.begin_step()
        step = self._grow_decodes()
        self._fill(step)
        drafts: Mapping[int, list[int]] = {}
        if not self._queue and not step.load.prefill_tokens:
            drafts = self._speculator.draft(self._batch.requests.values(), step.load)
        return self._assemble(drafts)

    def preempt(self, request: Request) -> None:
        """Move a running request back to the queue."""
        self._batch.preempt(request, self._clock())
        self._queue.requeue(request)

    def _grow_decodes(self) -> StepBudget:
        """Add a slot to every decoding request, preempting where pages run out. Return the budget that is left."""
        decoding = State.DECODE
        for request in tuple(self._batch.requests.values()):
            if request.state is decoding:
                try:
                    table_of(request).append(1)
                except OutOfPages:
                    self._make_room(request)
        rows = kv_tokens = 0
        for request in self._batch.requests.values():
            if request.state is decoding:
                rows += 1
                kv_tokens += request.num_computed_tokens
        return self._budget.begin(rows, kv_tokens)

    def _fill(self, step: StepBudget) -> None:
        """Add prefill chunks in the policy's order: the next chunks of running requests, the first of admitted ones."""
        prefilling = [request for request in self._batch.requests.values() if request.state is State.PREFILL]
        rank = self._policy.rank
        for request in sorted(prefilling, key=rank):
            while (head := self._queue.head()) is not None and rank(head) < rank(request) and self._admit(head, step):
                pass
            if request.state is State.PREFILL:  # not preempted in this loop
                self._grow_prefill(request, step)
        while (head := self._queue.head()) is not None and self._admit(head, step):
            pass

    def _grow_prefill(self, request: Request, step: StepBudget) -> None:
        table, context = table_of(request), request.num_computed_tokens
        num_tokens = min(step.prefill_tokens(context), len(request.token_ids) - context)
        if num_tokens and table.max_append() < 1 and request is self._batch.oldest():
            self._make_room(request)
            num_tokens = table.num_tokens - context
        else:
            num_tokens = min(num_tokens, table.max_append())
            self._batch.grow_prefill(request, num_tokens)
        if num_tokens > 0:
            step.spend(num_tokens, context)

    def _admit(self, request: Request, step: StepBudget) -> bool:
        """Admit the first queued request, if slots, tokens, latency and pages allow it, and add its first chunk."""
        while (obstacle := self._obstacle(request, step) or self._start(request)) is not None:
            if obstacle not in ("sequences", "pages") or self._has_preempted or not self._displace_for(request):
                self._queue.blocked_by = obstacle
                return False
        self._grow_prefill(request, step)
        return True

    def _obstacle(self, request: Request, step: StepBudget) -> str | None:
        """Return what the request lacks, except for pages, which only `_start` can tell."""
        if self._has_preempted:
            return "pages"
        num_seqs = self._batch.num_seqs + request.width
        if num_seqs > self._max_num_seqs:
            return "sequences"
        if not step.prefill_tokens(0):
            return "tokens"
        if not self._batch.requests:  # a request may always run alone, even a beam search that exceeds the target
            return None
        kv_tokens = sum(len(other.token_ids) for other in self._batch.requests.values()) + len(request.token_ids)
        return None if self._budget.may_join(num_seqs, kv_tokens) else "latency"

    def _start(self, request: Request) -> str | None:
        """Move a queued request to the running batch; return "pages" if it lacks pages."""
        try:
            self._batch.admit(request, self._clock())
        except OutOfPages:
            return "pages"
        self._queue.pop_admitted(request)
        return None

    def _displace_for(self, newcomer: Request) -> bool:
        """Preempt the least advanced request that `newcomer` may displace; return False if there is none."""
        candidates = [
            each
            for each in self._batch.victims(newcomer)
            if self._policy.may_displace(newcomer, each, self._queue.num_seqs)
        ]
        if not candidates:
            return False
        self.preempt(min(candidates, key=_computed_work))
        return True

    def _make_room(self, request: Request) -> None:
        """Append one token, preempting the least advanced victims; if there is none, preempt `request` itself."""
        table = table_of(request)
        while table.max_append() < 1:
            victim = min(self._batch.victims(request), key=_computed_work, default=request)
            self.preempt(victim)
            self._has_preempted = True
            if victim is request:
                return
        table.append(1)

    def _assemble(self, drafts: Mapping[int, list[int]]) -> StepPlan | None:
        """Return what the tables have grown by; requests that were preempted in this step have no table any more."""
        decodes: list[ScheduledSequence] = []
        prefills: list[ScheduledSequence] = []
        decode_rows = prefill_tokens = kv_tokens = pairs = 0
        decoding = State.DECODE
        for request in self._batch.requests.values():
            table = table_of(request)
            first, end = request.num_computed_tokens, table.num_tokens
            if first == end:
                continue
            tokens = request.token_ids
            num_samples = int(end == len(tokens))
            if end > len(tokens):
                tokens, num_samples = tokens + drafts[request.request_id], end - first
            row = ScheduledSequence(
                request.request_id,
                table.pages,
                first,
                tokens[first:end],
                num_samples,
                request.spec.sampling,
                tokens,
                request.num_prompt_tokens,
            )
            if request.state is decoding:
                decodes.append(row)
                decode_rows += end - first
                kv_tokens += first
            else:
                prefills.append(row)
                prefill_tokens += end - first
                pairs += chunk_pairs(first, end - first)
        if not decodes and not prefills:
            return None
        self.load = StepLoad(decode_rows, prefill_tokens, kv_tokens, pairs)
        self._num_plans += 1
        return StepPlan(self._num_plans, (*decodes, *prefills), decode_rows, prefill_tokens)


class Budget(Protocol):
    """How much work a step may contain."""

    max_num_batched_tokens: int  # rows of a step; the model runner's buffers have this size

    def begin(self, decode_rows: int, kv_tokens: int) -> StepBudget:
        """Return the budget of a step with `decode_rows` decode rows that read `kv_tokens` keys and values."""

    def may_join(self, decode_rows: int, kv_tokens: int) -> bool:
        """Return whether `decode_rows` sequences with `kv_tokens` tokens together may run, the new one included."""


class TokenBudget:
    """A fixed number of rows per step, decode rows first: the highest throughput."""

    def __init__(self, max_num_batched_tokens: int) -> None:
        _check_rows(max_num_batched_tokens)
        self.max_num_batched_tokens = max_num_batched_tokens

    def begin(self, decode_rows: int, kv_tokens: int) -> StepBudget:
        return StepBudget(StepLoad(decode_rows, 0, kv_tokens), self.max_num_batched_tokens - decode_rows)

    def may_join(self, decode_rows: int, kv_tokens: int) -> bool:
        return True


class LatencyBudget:
    """As much prefill as keeps a step within `itl_target_s` while any sequence decodes, as predicted by `cost`.

    A sequence that would make steps too long even without prefill waits, unless it would run alone.
    """

    def __init__(self, cost: CostModel, itl_target_s: float, max_num_batched_tokens: int) -> None:
        _check_rows(max_num_batched_tokens)
        if not itl_target_s > 0:
            raise ValueError(f"itl_target_s must be above 0, got {itl_target_s}")
        self.max_num_batched_tokens = max_num_batched_tokens
        self._cost = cost
        self._step_s = TARGET_SHARE * itl_target_s

    def begin(self, decode_rows: int, kv_tokens: int) -> StepBudget:
        load = StepLoad(decode_rows, 0, kv_tokens)
        tokens = self.max_num_batched_tokens - decode_rows
        if not decode_rows:
            return StepBudget(load, tokens)
        return StepBudget(load, tokens, self._step_s - self._cost.predict(load), self._cost)

    def may_join(self, decode_rows: int, kv_tokens: int) -> bool:
        return decode_rows <= 1 or self._cost.predict(StepLoad(decode_rows, 0, kv_tokens)) <= self._step_s


class StepBudget:
    """What is left of one step: rows, and seconds if there is a latency target.

    Allows at least `LEAST_PREFILL` prefill tokens as long as rows are left, so that prefill never starves.
    """

    __slots__ = ("_cost", "_least", "_seconds", "_tokens", "load")

    def __init__(self, load: StepLoad, tokens: int, seconds: float = math.inf, cost: CostModel | None = None) -> None:
        self.load = load  # of the step so far: decode rows, then what `spend` adds
        self._tokens = tokens
        self._seconds = seconds
        self._cost = cost
        self._least = LEAST_PREFILL

    def prefill_tokens(self, context: int) -> int:
        """Return the most prefill tokens that a sequence with `context` computed tokens may add."""
        if self._cost is None:
            return self._tokens
        fits = _chunk_in(self._seconds, context, self._cost)
        return min(self._tokens, max(fits, self._least))

    def spend(self, num_tokens: int, context: int) -> None:
        """Take `num_tokens` prefill tokens of a sequence with `context` computed tokens from the budget."""
        pairs = chunk_pairs(context, num_tokens)
        rows, tokens, kv_tokens, earlier_pairs = self.load
        self.load = StepLoad(rows, tokens + num_tokens, kv_tokens, earlier_pairs + pairs)
        self._tokens -= num_tokens
        self._least = max(0, self._least - num_tokens)
        if self._cost is not None:
            self._seconds -= self._cost.predict(StepLoad(0, num_tokens, 0, pairs)) - self._cost.predict(StepLoad())


class WaitForecast:
    """Predicts the time to a request's first token from step costs and recent output lengths."""

    def __init__(self, cost: CostModel, budget: Budget, max_num_seqs: int) -> None:
        self._cost = cost
        self._budget = budget
        self._max_num_seqs = max_num_seqs
        self._mean_output: float | None = None

    def note_output(self, num_tokens: int) -> None:
        """Record that a request ended after `num_tokens` output tokens."""
        mean = self._mean_output
        self._mean_output = num_tokens if mean is None else OUTPUT_MEMORY * mean + (1 - OUTPUT_MEMORY) * num_tokens

    def wait_s(self, prefill_tokens: int, position: int, running: int, kv_tokens: int) -> float | None:
        """Return the seconds to the first token of a request with `position` requests ahead of it in the queue.

        `prefill_tokens` must be computed before it, its own prompt included; `running` sequences hold `kv_tokens`
        tokens. Returns None until step costs have been measured.
        """
        if not self._cost.is_warm:
            return None
        step_s = self._cost.predict(StepLoad(running, 0, kv_tokens))
        per_step = self._budget.begin(min(running, self._max_num_seqs - 1), kv_tokens).prefill_tokens(0)
        prefill_s = self._cost.coefficients.prefill_token * prefill_tokens + -(-prefill_tokens // per_step) * step_s
        return prefill_s + self._slot_s(position, running, step_s)

    def _slot_s(self, position: int, running: int, step_s: float) -> float:
        """Return the seconds until a slot is free: of n sequences, one ends every (output length / n) steps."""
        must_end = running + position + 1 - self._max_num_seqs
        if must_end <= 0 or self._mean_output is None:
            return 0.0
        return must_end * self._mean_output * step_s / self._max_num_seqs


def _computed_work(request: Request) -> tuple[int, int]:
    """Order requests by the computed tokens that preempting them would lose, the youngest first among equals."""
    return request.num_computed_tokens, -request.order


def _check_rows(max_num_batched_tokens: int) -> None:
    if max_num_batched_tokens < 1:
        raise ValueError(f"max_num_batched_tokens must be at least 1, got {max_num_batched_tokens}")


def _chunk_in(seconds: float, context: int, cost: CostModel) -> int:
    """Return the largest chunk after `context` tokens that takes at most `seconds`: the root of a quadratic."""
    if seconds <= 0:
        return 0
    _, _, token, _, pair = cost.coefficients
    linear, square = token + pair * (context + 0.5), pair / 2
    if square > 0:
        return int((math.sqrt(linear * linear + 4 * square * seconds) - linear) / (2 * square))
    return int(seconds / linear) if linear > 0 else 1 << 30
