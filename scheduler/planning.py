"""What the next step computes: every phase grows page tables, and the plan is what they grew by.

It must not know results, nor how requests come and end. The one invariant: planning changes page tables and who runs,
nothing else, so a plan that is not executed costs no token.

Decode rows grow first, then prefills in the policy's order, newly admitted requests among them, within the budget; last
come guesses, where nothing else wants the step.
"""

from __future__ import annotations

from collections.abc import Callable

from ..pager import OutOfPages, Pager
from .budget import Budget, StepBudget
from .cost import StepLoad, chunk_pairs
from .plan import ScheduledSequence, StepPlan
from .policy import Policy
from .queue import RequestQueue
from .request import Request, State
from .running_batch import RunningBatch, table_of
from .speculative import Speculator


class Planner:
    """`max_prefill_chunk` limits one sequence's prefill tokens per step."""

    def __init__(
        self,
        pager: Pager,
        batch: RunningBatch,
        queue: RequestQueue,
        budget: Budget,
        speculator: Speculator,
        *,
        max_num_seqs: int,
        max_prefill_chunk: int | None,
        clock: Callable[[], float],
    ) -> None:
        self.load = StepLoad()  # of the last plan
        self._pager = pager
        self._batch = batch
        self._queue = queue
        self._policy: Policy = queue.policy
        self._budget = budget
        self._speculator = speculator
        self._max_num_seqs = max_num_seqs
        self._max_prefill_chunk = max_prefill_chunk
        self._clock = clock
        self._num_plans = 0
        self._is_short = False  # of pages: in the step being planned, somebody was preempted to make room

    def plan(self) -> StepPlan | None:
        """The next step, or None when there is nothing to run."""
        self._is_short = False
        self._batch.begin_step()
        step = self._grow_decodes()
        self._fill(step)
        if not self._queue and not step.load.prefill_tokens:
            self._speculator.guess(self._batch.requests.values(), step.load)
        return self._assemble()

    def preempt(self, request: Request) -> None:
        """Put a running request back to the queue."""
        self._batch.preempt(request, self._clock())
        self._queue.requeue(request)

    def _grow_decodes(self) -> StepBudget:
        """One more token for every decoding request; those that find no page preempt. The budget of the rest."""
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
        """Prefill in the policy's order: the next chunk of those that run, the first of those that are let in."""
        prefilling = [request for request in self._batch.requests.values() if request.state is State.PREFILL]
        rank = self._policy.rank
        for request in sorted(prefilling, key=rank):
            while (head := self._queue.head()) is not None and rank(head) < rank(request) and self._admit(head, step):
                pass
            if request.state is State.PREFILL:  # not preempted meanwhile
                self._grow_prefill(request, step)
        while (head := self._queue.head()) is not None and self._admit(head, step):
            pass

    def _grow_prefill(self, request: Request, step: StepBudget) -> None:
        table, context = table_of(request), request.num_computed_tokens
        num_tokens = min(step.prefill_tokens(context), len(request.token_ids) - context)
        if self._max_prefill_chunk is not None:
            num_tokens = min(num_tokens, self._max_prefill_chunk)
        if num_tokens and table.max_append() < 1 and request is self._batch.oldest():
            self._make_room(request)
            num_tokens = table.num_tokens - context
        else:
            num_tokens = min(num_tokens, table.max_append())
            self._batch.grow_prefill(request, num_tokens)
        if num_tokens > 0:
            step.spend(num_tokens, context)

    def _admit(self, request: Request, step: StepBudget) -> bool:
        """Let the head of the queue in, if sequences, tokens, latency and pages allow, and compute its first chunk."""
        while (obstacle := self._obstacle(request, step) or self._start(request)) is not None:
            if obstacle not in ("sequences", "pages") or self._is_short or not self._displace_for(request):
                self._queue.held_up = obstacle
                return False
        self._grow_prefill(request, step)
        return True

    def _obstacle(self, request: Request, step: StepBudget) -> str | None:
        """What a request is in want of, before it is seen whether there are pages."""
        if self._is_short:
            return "pages"
        num_seqs = self._batch.num_seqs + request.width
        if num_seqs > self._max_num_seqs:
            return "sequences"
        if not step.prefill_tokens(0):
            return "tokens"
        if not self._batch.requests:  # also a search wider than the target allows runs, alone
            return None
        known = sum(len(other.token_ids) for other in self._batch.requests.values()) + len(request.token_ids)
        return None if self._budget.may_join(num_seqs, known) else "latency"

    def _start(self, request: Request) -> str | None:
        """Run a waiting request if its pages allow it; else say so."""
        try:
            self._batch.enter(request, self._clock())
        except OutOfPages:
            return "pages"
        self._queue.pop_admitted(request)
        return None

    def _displace_for(self, newcomer: Request) -> bool:
        """Preempt for a newcomer, where the policy says so, whoever loses least. Whether there was anybody."""
        num_seqs = self._queue.num_seqs
        candidates = [
            each for each in self._batch.victims(newcomer) if self._policy.may_displace(newcomer, each, num_seqs)
        ]
        if not candidates:
            return False
        self.preempt(min(candidates, key=_work))
        return True

    def _assemble(self) -> StepPlan | None:
        """What the tables grew by, and its load: whoever was preempted while the step was planned is in neither."""
        decodes: list[ScheduledSequence] = []
        prefills: list[ScheduledSequence] = []
        decode_rows = prefill_tokens = kv_tokens = pairs = 0
        guesses, decoding = self._speculator.guesses, State.DECODE
        for request in self._batch.requests.values():
            table = table_of(request)
            first, end = request.num_computed_tokens, table.num_tokens
            if first == end:
                continue
            tokens = request.token_ids
            num_samples = int(end == len(tokens))
            if end > len(tokens):
                tokens, num_samples = tokens + guesses[request.request_id], end - first
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

    def _make_room(self, request: Request) -> None:
        """Grow by one token at the cost of whoever loses least; if nobody else may be preempted, it yields itself."""
        table = table_of(request)
        while table.max_append() < 1:
            victim = min(self._batch.victims(request), key=_work, default=request)
            self.preempt(victim)
            self._is_short = True
            if victim is request:
                return
        table.append(1)


def _work(request: Request) -> tuple[int, int]:
    """What preempting it would lose; the youngest of equals first."""
    return request.num_computed_tokens, -request.order
