"""Planning of a step: which sequences run, and how many tokens each computes.

Must not import the scheduler. Planning grows page tables and changes which requests run, nothing else. The plan is read
from the growth of the tables, so a plan that is never executed costs no token.

Order of a step: one token for every decoding request; then prefill chunks in the policy's order, newly admitted
requests included, within the budget; then draft tokens, if no other request could use the step. The encoder gets the
time that is left. A step prefills at most one image. An image gets the time that an encoder would get, and the
sequence is deferred until its image is done. Where the tokens of an image see each other (`whole_images`), a chunk ends
inside no image. An image may then take longer than the latency target, but never more rows than a step has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ..pager import OutOfPages, PageTable, images_between
from .admission import SchedulerConfig
from .budget import TARGET_SHARE, Budget, StepBudget
from .cost import CostModel, StepLoad, chunk_pairs
from .encoding import EncoderPlanner, seconds_beside
from .plan import DraftTask, PlacedImage, ScheduledSequence, StepPlan, least_whole_chunk, whole_chunk
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
        *,
        budget: Budget,
        speculator: Speculator,
        encoder: EncoderPlanner,
        config: SchedulerConfig,
        cost: CostModel,
        clock: Callable[[], float],
    ) -> None:
        self.load = StepLoad()  # load of the last plan
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
        self._has_preempted = False  # the step being planned has freed pages by a preemption: it admits no request
        self._has_image = False  # the step being planned has tokens of an image

    def plan(self) -> StepPlan | None:
        """Return the next step, or None when there is nothing to run."""
        self._has_preempted = self._has_image = False
        self._batch.begin_step()
        if not self._batch.requests and not self._queue:
            return self._plan_texts()
        step = self._grow_decodes()
        seconds_left = step.seconds_left  # seconds left before prefill
        self._note_target(step)
        if self._encoder.has_work:
            step.keep_half()
        self._fill(step)
        drafts: Mapping[int, list[int]] = {}
        drafting = None
        if not self._queue and not step.load.prefill_tokens:
            running = self._batch.requests.values()
            drafts = self._speculator.draft(running, step.load, step.seconds_left)
            drafting = self._speculator.ask(running, step.load, step.seconds_left)
        else:
            drafting = self._speculator.read(self._batch.requests.values(), step.load)
        return self._assemble(drafts, step, seconds_left, drafting)

    def _plan_texts(self) -> StepPlan | None:
        """Return a step without sequences, as `plan` would: the setup cost dominates short texts."""
        self.load = StepLoad()
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
        """Note whether decoding alone exceeds the latency target; the note stays until it falls to TARGET_SHARE."""
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
        """Add the next chunk of a running request's known tokens, as long as the step and the free pages allow.

        For its smallest possible chunk, the oldest request may preempt others.
        """
        table = table_of(request)
        context = request.num_computed_tokens
        images = request.spec.images
        wanted = min(step.prefill_tokens(context), self._batch.next_end(request) - context)
        fits, least = self._prefill_that_fits(images, context, wanted, step.rows_left)
        if images_between(images, context, context + wanted):
            self._has_image = True
        if fits and table.max_append() < least and request is self._batch.oldest():
            self._make_room(request, least)
        else:
            fits = min(fits, table.max_append())
            self._batch.grow_prefill(request, whole_chunk(images, context, fits) if self._whole_images else fits)
        num_tokens = table.num_tokens - context
        if num_tokens > 0:
            step.spend(num_tokens, context)

    def _prefill_that_fits(
        self, images: Sequence[PlacedImage], context: int, num_tokens: int, rows_left: int
    ) -> tuple[int, int]:
        """Return the most of the `num_tokens` tokens after `context` that a step may compute, and the fewest.

        Only images limit the chunk: a step has at most one image. With `whole_images`, a chunk ends inside no image,
        and an image at its start may need more than `num_tokens`, up to `rows_left`.
        """
        if not images:
            return num_tokens, 1
        touched = images_between(images, context, context + num_tokens)
        num_allowed = 0 if self._has_image else 1
        if len(touched) > num_allowed:
            num_tokens = max(0, touched[num_allowed].position - context)
        if not num_tokens or not self._whole_images:
            return num_tokens, 1
        least = least_whole_chunk(images, context)
        return whole_chunk(images, context, num_tokens) or (least if least <= rows_left else 0), least

    def _admit(self, request: Request, step: StepBudget) -> bool:
        """Admit the first queued request, if slots, tokens, latency and pages allow it, and add its first chunk."""
        while (obstacle := self._obstacle(request, step) or self._start(request)) is not None:
            if obstacle not in ("sequences", "pages") or self._has_preempted or not self._displace_for(request):
                self._queue.blocked_by = obstacle
                return False
        self._grow_prefill(request, step)
        return True

    def _obstacle(self, request: Request, step: StepBudget) -> str | None:
        """Return the resource that the request lacks. Pages are not considered: `_start` checks them."""
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
        self,
        drafts: Mapping[int, list[int]],
        step: StepBudget,
        seconds_left: float | None,
        drafting: DraftTask | None,
    ) -> StepPlan | None:
        """Return the step that computes the growth of the tables, with the encoder's part.

        `seconds_left` were left under the latency target after decoding.
        """
        decodes, prefills = self._rows(drafts)
        load = self.load
        encoding = self._encoder.plan(load, step.seconds_left, self._clock())
        if not decodes and not prefills and not encoding:
            return None
        self._num_plans += 1
        return StepPlan(
            step_id=self._num_plans,
            sequences=(*decodes, *prefills),
            num_decode_rows=load.decode_rows,
            num_prefill_tokens=load.prefill_tokens,
            encoder=encoding,
            images_s=self._image_seconds(seconds_left) if any(row.images for row in prefills) else 0.0,
            max_forced=self._speculator.max_forced(StepLoad(len(decodes) + len(prefills), 0, load.kv_tokens)),
            drafting=drafting,
        )

    def _rows(self, drafts: Mapping[int, list[int]]) -> tuple[Sequence[ScheduledSequence], Sequence[ScheduledSequence]]:
        """Return the decode rows and the prefill chunks that the tables have grown by. Set `load` to their load."""
        decodes: list[ScheduledSequence] = []
        prefills: list[ScheduledSequence] = []
        decode_rows = prefill_tokens = kv_tokens = pairs = 0
        decoding = State.DECODE
        for request in self._batch.requests.values():
            table = table_of(request)
            first = request.num_computed_tokens
            end = table.num_tokens
            if first == end:
                continue
            row = _row_of(request, table, end, drafts)
            if request.state is decoding:
                decodes.append(row)
                decode_rows += end - first
                kv_tokens += first
            else:
                prefills.append(row)
                prefill_tokens += end - first
                pairs += chunk_pairs(first, end - first)
        self.load = StepLoad(decode_rows, prefill_tokens, kv_tokens, pairs)
        return decodes, prefills

    def _image_seconds(self, seconds_left: float | None) -> float:
        """Return the seconds that images may take: half of the time that is left under the latency target."""
        half_s = None if seconds_left is None else seconds_left / 2
        return seconds_beside(StepLoad(self.load.decode_rows, 0, self.load.kv_tokens), half_s, self._cost)


def _row_of(request: Request, table: PageTable, end: int, drafts: Mapping[int, list[int]]) -> ScheduledSequence:
    """Return the row that computes a running request's tokens up to `end`, its draft tokens included.

    Rows are made per sequence and step, where keyword arguments would double their cost: the variables have the names
    of the fields, in their order.
    """
    spec = request.spec
    context = request.token_ids
    first_position = request.num_computed_tokens
    num_samples = 1 if end == len(context) else 0
    if end > len(context):
        context = context + drafts[request.request_id]
        num_samples = end - first_position
    prompt_images = spec.images
    images = images_between(prompt_images, first_position, end) if prompt_images else ()
    salt = spec.prefix_salt if images else b""
    return ScheduledSequence(
        request.request_id,
        table.pages,
        first_position,
        context[first_position:end],
        num_samples,
        spec.sampling,
        context,
        request.num_prompt_tokens,
        spec.echoed,
        images,
        salt,
        prompt_images,
        table.state,
    )


def _computed_work(request: Request) -> tuple[int, int]:
    """Order requests by the computed tokens that preempting them would lose, the youngest first among equals."""
    return request.num_computed_tokens, -request.order
