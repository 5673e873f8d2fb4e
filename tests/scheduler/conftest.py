"""A world for the scheduler: pages of 4 tokens, a clock that stands still, and an executor that reads through pages.

The executor's memory holds token ids where a model's would hold keys and values. It computes the next token from what
it reads back through the page table, and from nothing else: a page lost, shared or freed too early changes the output.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from zlib import crc32

import pytest
from quire.pager import Pager
from quire.scheduler import (
    Request,
    RequestUpdate,
    SampledToken,
    ScheduledSequence,
    Scheduler,
    StepPlan,
    StepResult,
    TokenBudget,
)

PAGE_SIZE = 4
VOCABULARY = 50


def next_token(context: Sequence[int]) -> int:
    """The model: a pure function of the whole context."""
    return crc32(bytes(context)) % VOCABULARY


def continuation(prompt: Sequence[int], length: int) -> list[int]:
    """What any schedule must generate for this prompt."""
    tokens = list(prompt)
    for _ in range(length):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


class World:
    """A scheduler, its pager and an executor, stepped by hand."""

    def __init__(
        self,
        num_pages: int = 16,
        max_num_batched_tokens: int = 32,
        max_num_seqs: int = 8,
        enable_prefix_caching: bool = True,
        **options: Any,
    ) -> None:
        self.now = 0.0
        self.pages = [[-1] * PAGE_SIZE for _ in range(num_pages)]
        self.pager = Pager(PAGE_SIZE, num_pages, copy_page=self._copy_page, enable_prefix_caching=enable_prefix_caching)
        self.scheduler = Scheduler(
            self.pager,
            budget=TokenBudget(max_num_batched_tokens),
            max_num_seqs=max_num_seqs,
            clock=lambda: self.now,
            debug=True,
            **options,
        )
        self.requests: dict[int, Request] = {}
        self.outputs: dict[int, list[int]] = {}  # as told by updates
        self.ended: dict[int, str] = {}  # finish reason or error, by updates
        self.failing: dict[int, str] = {}  # requests whose logits cannot be sampled

    def add(self, request_id: int, prompt: Sequence[int], max_tokens: int = 4, **options: Any) -> Any:
        request = Request(request_id, prompt, max_tokens=max_tokens, **options)
        admission = self.scheduler.add(request)
        self.requests[request_id] = request
        self.outputs[request_id] = []
        return admission

    def step(self) -> StepPlan | None:
        """Schedule, execute, commit."""
        plan = self.scheduler.schedule()
        if plan is not None:
            self.commit(plan)
        return plan

    def commit(self, plan: StepPlan) -> list[RequestUpdate]:
        updates = self.scheduler.commit(self.execute(plan))
        for update in updates:
            self.note(update)
        return updates

    def cancel(self, request_id: int) -> RequestUpdate | None:
        update = self.scheduler.cancel(request_id)
        if update is not None:
            self.note(update)
        return update

    def run(self, max_steps: int = 1000) -> int:
        """Step until nothing is left. Returns the number of steps."""
        for steps in range(max_steps):
            if self.step() is None:
                assert not self.scheduler.has_work
                return steps
        raise AssertionError(f"still busy after {max_steps} steps")

    def execute(self, plan: StepPlan) -> StepResult:
        for row in plan.sequences:
            for position, token in enumerate(row.token_ids, row.first_position):
                self.pages[row.tables[0][position // PAGE_SIZE]][position % PAGE_SIZE] = token
        return StepResult(plan.step_id, tuple(self._sample(row) for row in plan.sequences if row.num_samples), 0.0)

    def note(self, update: RequestUpdate) -> None:
        request_id = update.request.request_id
        assert request_id not in self.ended, f"request {request_id} was mentioned after its end"
        self.outputs[request_id] += [token.token_id for token in update.tokens]
        if update.ended:
            self.ended[request_id] = str(update.finish_reason or update.error)

    def _sample(self, row: ScheduledSequence) -> SampledToken:
        if row.request_id in self.failing:
            return SampledToken(row.request_id, -1, error=self.failing[row.request_id])
        read = [slot for page in row.tables[0] for slot in self.pages[page]]
        length = row.first_position + len(row.token_ids)
        assert read[:length] == list(row.context) == self.requests[row.request_id].token_ids
        return SampledToken(row.request_id, next_token(read[:length]))

    def _copy_page(self, source: int, destination: int) -> None:
        self.pages[destination] = list(self.pages[source])


@pytest.fixture
def make_world() -> Callable[..., World]:
    return World


@pytest.fixture
def expected() -> Callable[[Sequence[int], int], list[int]]:
    return continuation
