"""Planning of a step: which sequences run, and how many tokens each computes.

Must not import the scheduler. Planning grows page tables and changes which requests run, nothing else. The plan is what
the tables have grown by, so a plan that is never executed costs no token.

Order of a step: one token for every decoding request; then prefill chunks in the policy's order, newly admitted
requests included, within the budget; then draft tokens, if no other request could use the step. The encoder gets the
time that is left. Prefill has tokens of one image at most. An image gets the time that an encoder would get, and the
sequence is deferred until its image is done. Where the tokens of an image see each other (`whole_images`), a chunk ends
inside no image. An image may then take longer than the latency target, but never more rows than a step has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ..pager import OutOfPages, images_between
from .admission import SchedulerConfig
from .budget import TARGET_SHARE, Budget, StepBudget
from .cost import CostModel, StepLoad, chunk_pairs
from .encoding import EncoderPlanner, seconds_beside
from .plan import PlacedImage, ScheduledSequence, StepPlan, least_whole_chunk, whole_chunk
from .policy import Policy
from .queue import RequestQueue
from .request import Request, State
from .running_batch import RunningBatch, table_of
from .speculative import Speculator


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
        cost: CostModel,
        encoder: EncoderPlanner | None = None,
    ) -> None:
        self.load = StepLoad()  # of the last plan
        self.itl_overrun = 0.0  # share of the latency target that decoding alone takes; 0: the target can be met
        self.num_itl_overruns = 0  # steps planned while it could not be met
        self._batch = batch
        self._queue = queue
        self._policy: Policy[Request] = queue.policy
        self._budget = budget
        self._speculator = speculator
        self._max_num_seqs = config.max_num_seqs
        self._whole_images = config.whole_images
        self._clock = clock
        self._cost = cost
        self._encoder = encoder
        self._num_plans = 0
        self._has_preempted = False  # to free pages, in the step being planned; then no request is admitted
        self._has_image = False  # the step being planned has tokens of one

    def plan(self) -> StepPlan | None:
        """Return the next step, or None when there is nothing to run."""
        self._has_preempted = self._has_image = False
        self._batch.begin_step()
        if not self._batch.requests and not self._queue:
            return self._plan_texts()
        step = self._grow_decodes()
        seconds_left = step.seconds_left  # before prefill
        self._note_target(step)
        if self._encoder is not None and self._encoder.has_work:
            step.keep_half()
        self._fill(step)
        drafts: Mapping[int, list[int]] = {}
        if not self._queue and not step.load.prefill_tokens:
            drafts = self._speculator.draft(self._batch.requests.values(), step.load)
        return self._assemble(drafts, step, seconds_left)

    def _plan_texts(self) -> StepPlan | None:
        """Return a step without sequences, as `plan` would: what such a step begins with costs a short text dearly."""
        self.load = StepLoad()
        if self._encoder is None or not self._encoder.has_work:
            return None
        encoding = self._encoder.plan(self.load, None, self._clock())
        if not encoding:
            return None
        self._num_plans += 1
        return StepPlan(self._num_plans, (), 0, 0, encoding)

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

    def _note_target(self, step: StepBudget) -> None:
        """Note whether decoding alone exceeds the latency target, and from then on until it falls to TARGET_SHARE."""
        if step.load.decode_rows:
            is_over = step.decode_over_target > (TARGET_SHARE if self.itl_overrun else 1.0)
            self.itl_overrun = step.decode_over_target if is_over else 0.0
            self.num_itl_overruns += is_over

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
        table, context, images = table_of(request), request.num_computed_tokens, request.spec.images
        num_tokens, least = min(step.prefill_tokens(context), len(request.token_ids) - context), 1
        if images:
            num_tokens = self._with_one_image(images, context, num_tokens)
        if images and self._whole_images and num_tokens:
            least = least_whole_chunk(images, context)
            num_tokens = whole_chunk(images, context, num_tokens) or (least if least <= step.rows_left else 0)
        if num_tokens and table.max_append() < least and request is self._batch.oldest():
            self._make_room(request, least)
            num_tokens = table.num_tokens - context
        else:
            num_tokens = min(num_tokens, table.max_append())
            if self._whole_images:
                num_tokens = whole_chunk(images, context, num_tokens)
            self._batch.grow_prefill(request, num_tokens)
        if num_tokens > 0:
            step.spend(num_tokens, context)

    def _with_one_image(self, images: Sequence[PlacedImage], first: int, num_tokens: int) -> int:
        """Return how many of the next tokens the step takes, with those of one image at most for all its requests."""
        touched, num_allowed = images_between(images, first, first + num_tokens), 0 if self._has_image else 1
        self._has_image |= bool(touched)
        return max(0, touched[num_allowed].position - first) if len(touched) > num_allowed else num_tokens

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
            return step.limit
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

    def _make_room(self, request: Request, num_tokens: int = 1) -> None:
        """Append tokens, preempting the least advanced victims; if there is none, preempt `request` itself."""
        table = table_of(request)
        while table.max_append() < num_tokens:
            victim = min(self._batch.victims(request), key=_computed_work, default=request)
            self.preempt(victim)
            self._has_preempted = True
            if victim is request:
                return
        table.append(num_tokens)

    def _assemble(
        self, drafts: Mapping[int, list[int]], step: StepBudget, seconds_left: float | None
    ) -> StepPlan | None:
        """Return what the tables have grown by; requests that were preempted in this step have no table any more.

        `seconds_left` were left under the latency target after decoding. An image gets half of them.
        """
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
            images = images_between(request.spec.images, first, end) if request.spec.images else ()
            row = ScheduledSequence(
                request.request_id,
                table.pages,
                first,
                tokens[first:end],
                num_samples,
                request.spec.sampling,
                tokens,
                request.num_prompt_tokens,
                request.spec.echoed,
                images,
                request.spec.prefix_salt if images else b"",
                request.spec.images,
            )
            if request.state is decoding:
                decodes.append(row)
                decode_rows += end - first
                kv_tokens += first
            else:
                prefills.append(row)
                prefill_tokens += end - first
                pairs += chunk_pairs(first, end - first)
        self.load = StepLoad(decode_rows, prefill_tokens, kv_tokens, pairs)
        encoding = () if self._encoder is None else self._encoder.plan(self.load, step.seconds_left, self._clock())
        if not decodes and not prefills and not encoding:
            return None
        images_s = 0.0
        if any(row.images for row in prefills):
            half_s = None if seconds_left is None else seconds_left / 2
            images_s = seconds_beside(StepLoad(decode_rows, 0, kv_tokens), half_s, self._cost)
        self._num_plans += 1
        max_forced = self._speculator.max_forced(StepLoad(len(decodes) + len(prefills), 0, kv_tokens))
        return StepPlan(
            self._num_plans, (*decodes, *prefills), decode_rows, prefill_tokens, encoding, images_s, max_forced
        )


def _computed_work(request: Request) -> tuple[int, int]:
    """Order requests by the computed tokens that preempting them would lose, the youngest first among equals."""
    return request.num_computed_tokens, -request.order
