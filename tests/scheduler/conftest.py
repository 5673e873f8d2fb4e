"""A scheduler with pages of 4 tokens, a clock that tests set, and a fake model that reads its context through pages.

The fake model stores token ids where a real one stores keys and values. It computes the next token only from what it
reads back through the page tables, so a page that is lost, shared or released too early changes the output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import log
from typing import Any
from zlib import crc32

import pytest
from quire.pager import Pager, StatePool
from quire.pager.layout import first_kept_token
from quire.pager.states import NO_STATE
from quire.scheduler import (
    NO_ENCODER,
    Budget,
    CostModel,
    EncodeRequest,
    EncoderLimits,
    Policy,
    Request,
    RequestSpec,
    RequestUpdate,
    SampledToken,
    ScheduledSequence,
    Scheduler,
    SchedulerConfig,
    StepPlan,
    StepResult,
    TokenBudget,
)

from tests.support.chunked_budget import ChunkedBudget

PAGE_SIZE = 4
VOCABULARY = 50
ROLLBACK = 5  # tokens that a state goes back


def next_token(context: Sequence[int], vocabulary: int = VOCABULARY) -> int:
    """Return the token that the fake model samples: a pure function of the whole context."""
    return crc32(bytes(context)) % vocabulary


def continuation(prompt: Sequence[int], length: int, vocabulary: int = VOCABULARY) -> list[int]:
    """Return the tokens that any schedule must generate for this prompt."""
    tokens = list(prompt)
    for _ in range(length):
        tokens.append(next_token(tokens, vocabulary))
    return tokens[len(prompt) :]


def top_logprobs(context: Sequence[int], vocabulary: int) -> list[tuple[int, float]]:
    """Return the distribution for beam search, likeliest first. `next_token` is not its maximum."""
    weights = [1 + crc32(bytes([*context, token])) % 1000 for token in range(vocabulary)]
    order = sorted(range(vocabulary), key=lambda token: (-weights[token], token))
    return [(token, log(weights[token] / sum(weights))) for token in order]


class FakePageStore:
    """A PageStore of `num_slots` slots in memory; a state takes one."""

    def __init__(self, pages: list[list[int]], num_slots: int, states: list[list[int]]) -> None:
        self.pages = pages
        self.states = states
        self.slots: list[list[int] | None] = [None] * num_slots
        self.seconds_per_page = 1e-9
        self.is_damaged = False

    def save(self, page_ids: Sequence[int], state: int) -> list[int] | None:
        contents = [self.pages[page][:] for page in page_ids]
        if state != NO_STATE:
            contents.append(self.states[state][:])
        free = [slot for slot, content in enumerate(self.slots) if content is None][: len(contents)]
        if len(free) < len(contents):
            return None
        for slot, content in zip(free, contents, strict=True):
            self.slots[slot] = content
        return free

    def load(self, slots: Sequence[int], page_ids: Sequence[int], state: int) -> bool:
        if self.is_damaged:
            return False
        for slot, page in zip(slots, page_ids, strict=False):
            self.pages[page] = list(self.slots[slot] or ())
        if state != NO_STATE:
            self.states[state] = list(self.slots[slots[-1]] or ())
        return True

    def free(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self.slots[slot] = None

    def seconds(self, num_pages: int, num_states: int) -> float | None:
        return num_pages * self.seconds_per_page


class SchedulerHarness:
    """A scheduler, its pager and a fake model; tests run each step."""

    def __init__(
        self,
        num_pages: int = 16,
        max_num_batched_tokens: int = 32,
        max_num_seqs: int = 8,
        enable_prefix_caching: bool = True,
        vocabulary: int = VOCABULARY,
        windows: Sequence[int] = (0,),
        store_slots: int = 0,
        budget: Budget | None = None,
        max_chunk: int | None = None,
        cost: CostModel | None = None,
        policy: Policy[Request] | None = None,
        encoder: EncoderLimits = NO_ENCODER,
        encoder_policy: Policy[EncodeRequest] | None = None,
        num_states: int = 0,
        num_cached_states: int = 0,
        **limits: Any,
    ) -> None:
        self.now = 0.0
        self.step_s = 0.0  # duration of each step, on the clock and in its result
        self.vocabulary = vocabulary
        self.windows = windows
        self.pages = [[-1] * PAGE_SIZE for _ in range(num_pages)]
        self.states: list[list[int]] = [[] for _ in range(num_states)]  # the tokens that each slot's state has seen
        self.store = FakePageStore(self.pages, store_slots, self.states)
        self.pager = Pager(
            PAGE_SIZE,
            num_pages,
            windows=windows,
            copy_page=self._copy_page,
            enable_prefix_caching=enable_prefix_caching,
            store=self.store if store_slots else None,
            states=StatePool(num_states, ROLLBACK, self._copy_state) if num_states else None,
            num_cached_states=num_cached_states,
            state_interval=2 * PAGE_SIZE,
            clock=lambda: self.now,
        )
        budget = budget or TokenBudget(max_num_batched_tokens)
        self.scheduler = Scheduler(
            self.pager,
            budget if max_chunk is None else ChunkedBudget(budget, max_chunk),
            SchedulerConfig(max_num_seqs=max_num_seqs, **limits),
            cost=cost,
            policy=policy,
            encoder=encoder,
            encoder_policy=encoder_policy,
            clock=lambda: self.now,
            debug=True,
        )
        self.requests: dict[int, Request] = {}
        self.outputs: dict[int, list[int]] = {}  # tokens reported by updates
        self.ended: dict[int, str] = {}  # finish reason or error reported by updates
        self.failing: dict[int, str] = {}  # requests whose logits cannot be sampled

    def add(self, request_id: int, prompt: Sequence[int], max_tokens: int = 4, **options: Any) -> Any:
        return self.add_forks((request_id,), prompt, max_tokens, **options)

    def add_forks(self, ids: Sequence[int], prompt: Sequence[int], max_tokens: int = 4, **options: Any) -> Any:
        requests = [Request(RequestSpec(each, prompt, max_tokens=max_tokens, **options)) for each in ids]
        estimate = self.scheduler.add(*requests)
        for request in requests:
            self.requests[request.request_id] = request
            self.outputs[request.request_id] = []
        return estimate

    def step(self) -> StepPlan | None:
        """Schedule a step, execute it and commit the result."""
        plan = self.scheduler.schedule()
        if plan is not None:
            self.commit(plan)
        return plan

    def commit(self, plan: StepPlan) -> list[RequestUpdate]:
        result = self.execute(plan)
        self.now += self.step_s
        return self._noted(self.scheduler.commit(result))

    def expire(self) -> list[RequestUpdate]:
        return self._noted(self.scheduler.expire())

    def cancel(self, request_id: int) -> RequestUpdate | None:
        update = self.scheduler.finish(request_id, "cancelled")
        if update is not None:
            self.note(update)
        return update

    def run(self, max_steps: int = 1000) -> int:
        """Run steps until every request has ended. Return the number of steps."""
        for steps in range(max_steps):
            if self.step() is None:
                assert not self.scheduler.has_work
                return steps
        raise AssertionError(f"still busy after {max_steps} steps")

    def execute(self, plan: StepPlan) -> StepResult:
        for row in plan.sequences:
            if self.states:
                self._advance_state(row)
            for position, token in enumerate(row.token_ids, row.first_position):
                for table in row.tables:
                    self.pages[table[position // PAGE_SIZE]][position % PAGE_SIZE] = token
        sampled = [sample for row in plan.sequences for sample in self._samples(row)]
        return StepResult(plan.step_id, tuple(sampled), self.step_s)

    def note(self, update: RequestUpdate) -> None:
        request_id = update.request_id
        assert request_id not in self.ended, f"request {request_id} was mentioned after its end"
        self.outputs[request_id] += [token.token_id for token in update.tokens]
        if update.ended:
            self.ended[request_id] = str(update.finish_reason or update.error)

    def _noted(self, updates: list[RequestUpdate]) -> list[RequestUpdate]:
        for update in updates:
            self.note(update)
        return updates

    def _samples(self, row: ScheduledSequence) -> Iterator[SampledToken]:
        end = row.first_position + len(row.token_ids)
        context = list(row.context)
        assert len(context) == end if row.num_samples else len(context) > end
        for group, window in enumerate(self.windows):
            first = first_kept_token(row.first_position, window)
            assert self._read(row.tables[group], first, end) == context[first:end]
        for length in range(end - row.num_samples + 1, end + 1):
            if row.request_id in self.failing:
                yield SampledToken(row.request_id, -1, error=self.failing[row.request_id])
            else:
                top = tuple(top_logprobs(context[:length], self.vocabulary)) if self._searches(row) else ()
                token = next_token(context[:length], self.vocabulary)
                yield SampledToken(row.request_id, token, None, top)

    def _searches(self, row: ScheduledSequence) -> bool:
        return row.request_id < 0 or self.requests[row.request_id].beam is not None

    def _read(self, table: Sequence[int], first: int, end: int) -> list[int]:
        return [self.pages[table[at // PAGE_SIZE]][at % PAGE_SIZE] for at in range(first, end)]

    def _advance_state(self, row: ScheduledSequence) -> None:
        """Compute a row in place: the state continues at any of its last positions, or at 0."""
        first = row.first_position
        seen = self.states[row.state]
        assert first == 0 or first <= len(seen) <= first + ROLLBACK
        assert not first or seen[:first] == list(row.context[:first])
        self.states[row.state] = [*row.context[:first], *row.token_ids]

    def _copy_state(self, source: int, destination: int) -> None:
        self.states[destination] = self.states[source][:]

    def _copy_page(self, source: int, destination: int) -> None:
        self.pages[destination] = list(self.pages[source])


MakeHarness = Callable[..., SchedulerHarness]
Expected = Callable[..., list[int]]


@pytest.fixture
def make_harness() -> MakeHarness:
    return SchedulerHarness


@pytest.fixture
def expected() -> Expected:
    return continuation
