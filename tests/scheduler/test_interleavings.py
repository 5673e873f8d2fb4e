"""Any interleaving of adding, stepping, cancelling and preempting gives every request the tokens it would get alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from quire.scheduler import Limits, QueueFull, State, StepPlan, TooLong

MakeWorld = Callable[..., Any]
Expected = Callable[..., list[int]]
prompts = st.lists(st.integers(0, 1), min_size=1, max_size=14)  # few values: shared prefixes are common
choice = st.integers(0, 1000)
COUNTED_STATES = {"running": (State.PREFILL, State.DECODE), "waiting": (State.WAITING, State.PREEMPTED)}


class SchedulerMachine(RuleBasedStateMachine):
    """Steps are split in two, so that everything can also happen while one is in flight."""

    def __init__(self, make_world: MakeWorld, expected: Expected) -> None:
        super().__init__()
        self.make_world = make_world
        self.expected = expected
        self.plan: StepPlan | None = None
        self.next_id = 0

    @initialize(
        num_pages=st.integers(4, 12),
        budget=st.integers(4, 20),
        max_num_seqs=st.integers(1, 4),
        chunk=st.none() | st.integers(1, 5),
        caching=st.booleans(),
    )
    def start(self, num_pages: int, budget: int, max_num_seqs: int, chunk: int | None, caching: bool) -> None:
        self.world = self.make_world(
            num_pages, budget, max_num_seqs, caching, max_prefill_chunk=chunk, limits=Limits(max_num_waiting=5)
        )
        self.scheduler = self.world.scheduler

    @rule(prompt=prompts, max_tokens=st.integers(1, 9), stop=st.integers(0, 49), tenant=st.sampled_from(["a", "b"]))
    def add(self, prompt: list[int], max_tokens: int, stop: int, tenant: str) -> None:
        before = self.scheduler.stats()
        try:
            self.world.add(
                self.next_id, prompt, max_tokens, stop_token_ids=frozenset({stop}), min_tokens=2, tenant=tenant
            )
        except (QueueFull, TooLong):
            assert self.scheduler.stats() == before
            return
        self.next_id += 1

    @precondition(lambda self: self.plan is None)
    @rule()
    def schedule(self) -> None:
        self.plan = self.scheduler.schedule()
        assert (self.plan is not None) == self.scheduler.has_work
        if self.plan is not None:
            self._check_plan(self.plan)

    @precondition(lambda self: self.plan is not None)
    @rule()
    def commit(self) -> None:
        self.world.commit(self.plan)
        self.plan = None

    @precondition(lambda self: self.plan is not None)
    @rule()
    def fail_the_step(self) -> None:
        for update in self.scheduler.abandon("failed"):
            self.world.note(update)
        self.plan = None

    @precondition(lambda self: self.next_id)
    @rule(which=choice)
    def cancel(self, which: int) -> None:
        self.world.cancel(which % self.next_id)

    @precondition(lambda self: self.next_id)
    @rule(which=choice)
    def preempt(self, which: int) -> None:
        self.scheduler.preempt(which % self.next_id)

    @invariant()
    def counters_agree_with_states(self) -> None:
        stats = self.scheduler.stats()
        assert stats.pages_free + stats.pages_cached + stats.pages_owned == stats.pages_total
        for name, states in COUNTED_STATES.items():
            counted = sum(request.state in states for request in self.world.requests.values())
            assert getattr(stats, name) == counted

    @invariant()
    def nothing_is_owned_when_nothing_runs(self) -> None:
        stats = self.scheduler.stats()
        assert stats.running or not stats.pages_owned

    @invariant()
    def streams_are_prefixes_of_what_they_would_be_alone(self) -> None:
        for request_id, request in self.world.requests.items():
            output = self.world.outputs[request_id]
            assert output == self.expected(request.prompt_token_ids, len(output))

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        if self.plan is not None:
            self.world.commit(self.plan)
        self.world.run()
        for request_id, request in self.world.requests.items():
            assert request.state is State.ENDED
            self._check_end(request_id, request)
        self.counters_agree_with_states()
        self.nothing_is_owned_when_nothing_runs()

    def _check_plan(self, plan: StepPlan) -> None:
        tokens = [len(row.token_ids) for row in plan.sequences]
        assert all(tokens)
        assert sum(tokens) == plan.num_decode_rows + plan.num_prefill_tokens
        assert tokens[: plan.num_decode_rows] == [1] * plan.num_decode_rows
        running = [request for request in self.world.requests.values() if request.state in COUNTED_STATES["running"]]
        oldest = min(running, key=lambda request: request.order)
        assert oldest.request_id in {row.request_id for row in plan.sequences}

    def _check_end(self, request_id: int, request: Any) -> None:
        output, end = self.world.outputs[request_id], self.world.ended[request_id]
        stopped = len(output) >= request.min_tokens and output[-1] in request.stop_token_ids if output else False
        if end == "stop":
            assert stopped
        elif end == "length":
            assert len(output) == request.max_tokens
            assert not stopped
        else:
            assert end in ("cancelled", "failed")
            assert len(output) < request.max_tokens


def test_any_interleaving_ends_every_request_with_its_own_tokens(make_world: MakeWorld, expected: Expected) -> None:
    run_state_machine_as_test(
        lambda: SchedulerMachine(make_world, expected),
        settings=settings(max_examples=150, stateful_step_count=40, deadline=None, database=None),
    )
