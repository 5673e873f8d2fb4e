"""The draft model's runner: a small model that proposes the next tokens of all sequences of a batch together.

It must not import requests or asyncio. It has pages of its own for the tokens that it has computed of each sequence, by
request id. It computes missing tokens, whatever the reason: a new prompt, rejected draft tokens, or pages that were
dropped. A text that is far behind is computed in chunks, one for each step, and has no proposals until then.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ....pager import OutOfPages, Pager, PageTable
from ....scheduler.plan import (
    DraftResult,
    DraftTask,
    SampledToken,
    ScheduledSequence,
    StepPlan,
    StepResult,
    verified_samples,
)
from ...common.config import EngineConfig
from .. import model_path, pack_model
from .capacity import draft_config
from .model_runner import ModelRunner


def load_draft(
    config: EngineConfig, target: ModelRunner, stop: threading.Event | None = None, *, populate: bool = True
) -> DraftRunner:
    """Load `config.draft_model` beside the runner of the model, with its threads. Raises what `load_model` raises."""
    alone = draft_config(config)
    capacity = target.capacity.draft
    assert capacity is not None, "the capacity follows from the same configuration"
    model = pack_model(model_path(alone.model), alone.weights, stop)
    runner = ModelRunner(alone, model, capacity, populate=populate, pool=target.pool)
    pager = runner.open_pager(enable_prefix_caching=config.enable_prefix_caching)
    cost = capacity.memory.weights_bytes / target.capacity.memory.weights_bytes
    return DraftRunner(runner, pager, target.spec.vocab_size, cost)


@dataclass(slots=True)
class DraftSequence:
    """The tokens of a sequence that the draft model has computed."""

    table: PageTable
    token_ids: list[int]  # computed tokens, of which `table` holds the keys and values
    num_known: int  # leading tokens of the last text, which are part of every later one


@dataclass(slots=True)
class Proposal:
    """The next row of a sequence in a pass of the draft model, and its draft tokens so far."""

    source: ScheduledSequence
    draft: DraftSequence
    context: list[int]  # the text with the draft tokens
    limit: int
    num_rows: int  # tokens that the next pass computes
    tokens: list[int] = field(default_factory=list)

    @property
    def is_complete(self) -> bool:
        """Whether the next pass computes the last token of the context, and so samples."""
        return len(self.draft.token_ids) + self.num_rows == len(self.context)


class DraftRunner:
    """Proposes draft tokens with `runner`, whose pages `pager` owns; the runner is closed with this object.

    Tokens are drawn as the target model's are, with the same parameters, seed and position: so a draft model with the
    same probabilities proposes the same tokens.
    """

    def __init__(self, runner: ModelRunner, pager: Pager, vocab_size: int, cost: float) -> None:
        """`vocab_size` is the target model's: no proposal has a token beyond it.

        `cost` is the estimated time of a step of the draft model over that of the target model.
        """
        self.runner = runner
        self.pager = pager
        self.cost = cost
        self._vocab_size = min(vocab_size, runner.spec.vocab_size)
        self._max_rows = runner.max_rows
        self._max_len = runner.capacity.max_model_len
        self._sequences: dict[int, DraftSequence] = {}  # request id -> sequence; the least recently used is first

    def propose(self, plan: StepPlan, task: DraftTask, result: StepResult) -> StepResult:
        """Return the result of `plan` with proposals for the tokens after its samples."""
        started = time.perf_counter()
        for request_id in task.ended:
            self._drop(request_id)
        proposals = self._open_all(plan, task, result)
        num_passes = num_rows = 0
        running = [each for each in proposals if each.num_rows]
        while running:
            num_passes += 1
            num_rows += sum([each.num_rows for each in running])
            running = self._run_pass(running)
        tokens = {each.source.request_id: tuple(each.tokens) for each in proposals if each.tokens}
        seconds = time.perf_counter() - started
        return dataclasses.replace(result, drafting=DraftResult(tokens, num_passes, num_rows, seconds))

    def close(self) -> None:
        """Release the pages and the model. Idempotent."""
        for request_id in tuple(self._sequences):
            self._drop(request_id)
        self.runner.close()

    def _open_all(self, plan: StepPlan, task: DraftTask, result: StepResult) -> list[Proposal]:
        """Return the sequences to propose for, with their pages and the rows of the first pass."""
        proposals = []
        for sequence, accepted in _accepted(plan, result):
            limit = task.lengths.get(sequence.request_id, 0)
            if not limit or not accepted:
                continue
            num_given = len(sequence.context) - sequence.num_samples + 1
            context = [*sequence.context[:num_given], *accepted]
            limit = min(limit, self._max_len - len(context) + 1)
            draft = self._sequence(sequence, context, task.salts[sequence.request_id]) if limit > 0 else None
            if draft is None or max(context[len(draft.token_ids) :]) >= self._vocab_size:
                continue
            proposals.append(Proposal(sequence, draft, context, limit, len(context) - len(draft.token_ids)))
        rows_left = min(task.max_rows, self._max_rows)
        for each in sorted(proposals, key=lambda each: each.num_rows):  # texts that are not behind come first
            each.num_rows = min(each.num_rows, rows_left)
            rows_left -= each.num_rows
        self._make_room([each for each in proposals if each.num_rows])
        return proposals

    def _sequence(self, source: ScheduledSequence, context: list[int], salt: bytes) -> DraftSequence | None:
        """Return the sequence with as many tokens of `context` as are computed; None without pages."""
        draft = self._sequences.pop(source.request_id, None)
        if draft is not None:
            computed = draft.token_ids
            common = min(draft.num_known, len(computed))
            end = min(len(computed), len(context) - 1)
            while common < end and computed[common] == context[common]:
                common += 1
            if draft.table.can_roll_back(common):
                draft.table.rollback(common)
                del computed[common:]
            else:  # pages of the next row's window were released
                draft.table.release()
                draft = None
        if draft is None:
            try:
                table = self.pager.open(context, salt)
            except OutOfPages:
                return None
            draft = DraftSequence(table, context[: table.num_tokens], 0)
        draft.num_known = len(context)
        self.pager.commit(draft.table, draft.token_ids)
        self._sequences[source.request_id] = draft
        return draft

    def _run_pass(self, running: Sequence[Proposal]) -> list[Proposal]:
        """Compute the next rows, and return the proposals that continue, with the rows of their next pass."""
        result = self.runner.execute(StepPlan(0, tuple([_row(each) for each in running]), len(running), 0))
        samples = iter(result.sampled)
        for each in running:
            is_complete = each.is_complete
            begin = len(each.draft.token_ids)
            each.draft.token_ids += each.context[begin : begin + each.num_rows]
            each.num_rows = 0
            if is_complete:
                self._take(each, next(samples))
        self._make_room([each for each in running if each.num_rows])
        return [each for each in running if each.num_rows]

    def _take(self, proposal: Proposal, sample: SampledToken) -> None:
        """Add a drawn token to a proposal; without a valid token the proposal ends."""
        if sample.error is not None:  # a NaN, which pages must not keep
            self._drop(proposal.source.request_id)
            return
        if sample.token_id < self._vocab_size:
            proposal.tokens.append(sample.token_id)
            proposal.context.append(sample.token_id)
            proposal.num_rows = int(len(proposal.tokens) < proposal.limit)

    def _make_room(self, running: Sequence[Proposal]) -> None:
        """Grow the tables by the rows of the next pass, or by the rows that there are pages for."""
        keep = {each.source.request_id for each in running}
        for each in running:
            table = each.draft.table
            while table.max_append() < each.num_rows:
                other = next((other for other in self._sequences if other not in keep), None)
                if other is None:
                    break
                self._drop(other)
            each.num_rows = min(each.num_rows, table.max_append())
            table.append(each.num_rows)

    def _drop(self, request_id: int) -> None:
        draft = self._sequences.pop(request_id, None)
        if draft is not None:
            draft.table.release()


def _accepted(plan: StepPlan, result: StepResult) -> Iterator[tuple[ScheduledSequence, Sequence[int]]]:
    """Yield each sequence of a step with the tokens that it gained."""
    at = 0
    for sequence in plan.sequences:
        samples = verified_samples(sequence, result.sampled[at : at + sequence.num_samples])
        yield sequence, [sample.token_id for sample in samples]
        at += sequence.num_samples


def _row(proposal: Proposal) -> ScheduledSequence:
    source = proposal.source
    first = len(proposal.draft.token_ids)
    return ScheduledSequence(
        source.request_id,
        proposal.draft.table.pages,
        first,
        proposal.context[first : first + proposal.num_rows],
        int(proposal.is_complete),
        source.sampling,
        proposal.context,
        source.num_prompt_tokens,
        source.echoed,
    )
