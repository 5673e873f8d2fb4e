"""The runner of a head that predicts further tokens (MTP): a layer that continues the hidden states of its model.

It must not import requests or asyncio. An entry of the head is made of a token and the hidden state of the token before
it, so the head reads the rows of every step of its model. The keys and values of entries are in pages of the head. An
entry whose hidden state is gone, as after a prefix hit of the model alone, cannot be made: the entries then begin
behind it, which costs accepted tokens and no output.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

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
from .. import pack_head
from .capacity import draft_config
from .model_runner import ModelRunner

Rows = npt.NDArray[np.float32]  # [rows, hidden]
FIRST_TOKEN_BYTES = 4


def load_head(
    config: EngineConfig, target: ModelRunner, stop: threading.Event | None = None, *, populate: bool = True
) -> HeadRunner:
    """Load the head of a model beside its runner, with its threads. Raises what `load_model` raises."""
    capacity = target.capacity.draft
    assert capacity is not None, "the capacity follows from the same configuration"
    alone = draft_config(config)
    head = pack_head(target.model, alone.weights, stop)
    runner = ModelRunner(alone, head, capacity, populate=populate, pool=target.pool)
    pager = runner.open_pager(enable_prefix_caching=config.enable_prefix_caching)
    step_bytes = capacity.memory.weights_bytes + head.weights.lm_head.nbytes
    return HeadRunner(runner, pager, target, step_bytes / target.capacity.memory.weights_bytes)


@dataclass(slots=True)
class HeadSequence:
    """The entries of a sequence. Entry i belongs to the token at position `base` + 1 + i."""

    table: PageTable
    base: int
    token_ids: list[int]  # tokens of the entries that `table` holds
    unread: Rows | None = None  # [1, hidden]: state of the token at `last`, if the next token was not known

    @property
    def last(self) -> int:
        """Position of the last token that has an entry."""
        return self.base + len(self.token_ids)


@dataclass(slots=True)
class Reading:
    """The entries of a sequence that the next passes compute, and its draft tokens so far."""

    source: ScheduledSequence
    head: HeadSequence
    new_ids: list[int]  # tokens of entries to compute
    hidden: Rows  # [len(new_ids), hidden]: states of the tokens before them
    context: list[int]  # the text with the draft tokens
    limit: int  # most draft tokens
    is_draft: bool = False  # the new entry is that of a draft token, which leaves the table again
    num_rows: int = 0  # entries that the next pass computes
    tokens: list[int] = field(default_factory=list)

    @property
    def samples(self) -> bool:
        """Whether the next pass computes the last new entry, and so draws a draft token."""
        return self.num_rows == len(self.new_ids) and self.limit > 0


class HeadRunner:
    """Proposes draft tokens with the head `runner` of `target`; `pager` owns its pages.

    The runner is closed with this object. Tokens are drawn as the model's are, with the same parameters, seed and
    position. `cost` is the estimated time of a pass over that of a step of the model.
    """

    def __init__(self, runner: ModelRunner, pager: Pager, target: ModelRunner, cost: float) -> None:
        self.runner = runner
        self.pager = pager
        self.cost = cost
        self._target = target
        self._max_rows = runner.max_rows
        self._max_entries = runner.capacity.max_model_len
        self._sequences: dict[int, HeadSequence] = {}  # request id -> entries; the least recently used are first

    def propose(self, plan: StepPlan, task: DraftTask, result: StepResult) -> StepResult:
        """Read the rows of `plan`, and return its result with proposals for the tokens after its samples."""
        started = time.perf_counter()
        for request_id in task.ended:
            self._drop(request_id)
        readings = self._read_all(plan, task, result)
        num_passes = num_rows = 0
        while running := self._with_room([each for each in readings if each.new_ids]):
            num_passes += 1
            num_rows += sum([each.num_rows for each in running])
            self._run_pass(running)
        for each in readings:
            self._remove_drafts(each.head)
        tokens = {each.source.request_id: tuple(each.tokens) for each in readings if each.tokens}
        seconds = time.perf_counter() - started
        return dataclasses.replace(result, drafting=DraftResult(tokens, num_passes, num_rows, seconds))

    def close(self) -> None:
        """Release the pages and the head. Idempotent."""
        for request_id in tuple(self._sequences):
            self._drop(request_id)
        self.runner.close()

    def _read_all(self, plan: StepPlan, task: DraftTask, result: StepResult) -> list[Reading]:
        """Return the new entries of the sequences that the task names."""
        readings = []
        at = first_row = 0
        for sequence in plan.sequences:
            samples = result.sampled[at : at + sequence.num_samples]
            at += sequence.num_samples
            if sequence.request_id in result.deferred:
                continue
            count = len(sequence.token_ids)
            if sequence.request_id in task.lengths:
                hidden = self._target.hidden_rows(first_row, first_row + count)
                accepted = [sample.token_id for sample in verified_samples(sequence, samples)]
                reading = self._read(sequence, accepted, hidden, task)
                readings += [] if reading is None else [reading]
            first_row += count
        return readings

    def _read(
        self, sequence: ScheduledSequence, accepted: Sequence[int], hidden: Rows, task: DraftTask
    ) -> Reading | None:
        """Return the entries that the rows of a step add to a sequence; None without any."""
        first = sequence.first_position
        count = len(sequence.token_ids) - sequence.num_samples + len(accepted)  # rows of tokens that stay
        if count < 1:
            return None
        context = [*sequence.context[: first + count], *accepted[-1:]]
        head = self._sequence(sequence.request_id, context, first, task.salts[sequence.request_id])
        if head is None:
            return None
        begin = head.last  # position of the state that the first new entry is made of
        states = hidden[max(begin - first, 0) : count]
        if begin < first and head.unread is not None:
            states = np.concatenate((head.unread, states))
        new_ids = context[begin + 1 :]
        if accepted:
            head.unread = None
        elif len(states):
            head.unread = states[-1:].copy()
        if not new_ids or begin + 1 + len(new_ids) - head.base > self._max_entries:
            return None
        limit = task.lengths[sequence.request_id] if accepted else 0
        return Reading(sequence, head, new_ids, states[: len(new_ids)].copy(), context, limit)

    def _sequence(self, request_id: int, context: Sequence[int], first: int, salt: bytes) -> HeadSequence | None:
        """Return the entries of a sequence whose states are known from position `first` on; None without pages."""
        head = self._sequences.pop(request_id, None)
        if head is not None and (head.last >= first or (head.last == first - 1 and head.unread is not None)):
            self._sequences[request_id] = head
            return head
        if head is not None:  # states between the entries and this step are not known
            head.table.release()
        # The first token has no entry of its own, but all entries depend on it.
        salt += context[0].to_bytes(FIRST_TOKEN_BYTES, "little")
        try:
            table = self.pager.open(context[1:], salt)
            if table.num_tokens < first:
                table.release()
                table = self.pager.open(())
        except OutOfPages:
            return None
        base = 0 if table.num_tokens else first
        head = HeadSequence(table, base, list(context[1 : 1 + table.num_tokens]))
        self._sequences[request_id] = head
        return head

    def _with_room(self, running: Sequence[Reading]) -> list[Reading]:
        """Return the sequences of the next pass, whose tables have slots for the entries that it computes.

        Others wait for a later pass, or lack pages.
        """
        rows_left = self._max_rows
        keep = {each.source.request_id for each in running}
        found = []
        for each in running:
            each.num_rows = min(len(each.new_ids), rows_left)
            table = each.head.table
            while table.max_append() < each.num_rows:
                other = next((other for other in self._sequences if other not in keep), None)
                if other is None:
                    break
                self._drop(other)
            if table.max_append() < each.num_rows:
                each.new_ids = []
                if not each.is_draft:
                    self._drop(each.source.request_id)
            elif each.num_rows:
                table.append(each.num_rows)
                rows_left -= each.num_rows
                found.append(each)
        return found

    def _run_pass(self, running: Sequence[Reading]) -> None:
        """Compute the entries, and leave in each sequence the entries of the next pass."""
        rows = 0
        for each in running:
            self.runner.give_hidden(rows, each.hidden[: each.num_rows])
            rows += each.num_rows
        result = self.runner.execute(StepPlan(0, tuple([_entries(each) for each in running]), len(running), 0))
        samples = iter(enumerate(result.sampled))
        for each in running:
            drawn = next(samples) if each.samples else None
            if not each.is_draft:
                self._keep_entries(each)
            each.new_ids = each.new_ids[each.num_rows :]
            each.hidden = each.hidden[each.num_rows :]
            if drawn is not None:
                self._take(each, *drawn)

    def _keep_entries(self, reading: Reading) -> None:
        """Note the entries of the pass, whose tokens and states are the model's."""
        head = reading.head
        head.token_ids += reading.new_ids[: reading.num_rows]
        if head.base == 0:  # other entries lack a part of their text
            self.pager.commit(head.table, head.token_ids)

    def _take(self, reading: Reading, index: int, sample: SampledToken) -> None:
        """Add a drawn token to a proposal, and its entry to the next pass, unless the proposal is complete."""
        if sample.error is not None:  # a NaN, which pages must not keep
            self._drop(reading.source.request_id)
            return
        reading.tokens.append(sample.token_id)
        reading.context.append(sample.token_id)
        if len(reading.tokens) < reading.limit and reading.head.table.num_tokens < self._max_entries:
            reading.new_ids = [sample.token_id]
            reading.hidden = self.runner.hidden_rows(index, index + 1).copy()
            reading.is_draft = True

    def _remove_drafts(self, head: HeadSequence) -> None:
        """Keep the entries of the model's tokens; a table that was released has none."""
        if head.table.num_tokens > len(head.token_ids):
            head.table.rollback(len(head.token_ids))

    def _drop(self, request_id: int) -> None:
        head = self._sequences.pop(request_id, None)
        if head is not None:
            head.table.release()


def _entries(reading: Reading) -> ScheduledSequence:
    source = reading.source
    table = reading.head.table
    return ScheduledSequence(
        source.request_id,
        table.pages,
        table.num_tokens - reading.num_rows,
        reading.new_ids[: reading.num_rows],
        int(reading.samples),
        source.sampling,
        reading.context,
        source.num_prompt_tokens,
        source.echoed,
    )
