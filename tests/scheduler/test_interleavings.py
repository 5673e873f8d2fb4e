"""In any order of operations every request gets the tokens it would get alone, and every page is released.

Operations: adding requests, forks and beam searches, stepping, failing, cancelling, preempting, spilling, drafting,
pinning and deadlines, under any policy, budget and quota, with full and sliding layer groups.
"""

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
from quire.scheduler import (
    DEADLINE_PASSED,
    MAX_PREEMPTIONS,
    BeamSpec,
    Coefficients,
    CostModel,
    Fair,
    FirstComeFirstServed,
    LatencyBudget,
    Priority,
    Refused,
    State,
    StepPlan,
    TokenBudget,
)

from tests.scheduler.conftest import SchedulerHarness, continuation
from tests.support.forced_preemption import preempt

prompts = st.lists(
    st.integers(0, 1), min_size=1, max_size=14
)  # few values: shared prefixes and accepted drafts are frequent
tenants = st.sampled_from(["a", "b", "c"])
choice = st.integers(0, 1000)
COSTS = Coefficients(20e-3, 1e-3, 1e-3, 1e-5, 1e-5)
ENDINGS = ("cancelled", "failed", "NaN", DEADLINE_PASSED)
COUNTED_STATES = {"running": (State.PREFILL, State.DECODE), "waiting": (State.WAITING, State.PREEMPTED)}
POLICIES = (FirstComeFirstServed, Priority, Fair, lambda: Fair({"a": 3.0, "b": 0.5}))


class SchedulerMachine(RuleBasedStateMachine):
    """A step is scheduled and committed by two rules, so any other rule can run while it is in flight."""

    longest_prompt = 14
    pools = st.integers(4, 14)
    windows: st.SearchStrategy[tuple[int, ...]] = st.just((0,))
    cached_states: st.SearchStrategy[int | None] = st.none()  # None: a model without states

    @initialize(
        data=st.data(),
        budget=st.integers(4, 20),
        max_num_seqs=st.integers(1, 4),
        chunk=st.none() | st.integers(1, 5),
        policy=st.sampled_from(POLICIES),
        has_target=st.booleans(),
        vocabulary=st.sampled_from([2, 50]),
        num_drafts=st.sampled_from([0, 3]),
        store_slots=st.sampled_from([0, 3, 30]),
        quota=st.none() | st.integers(3, 9),
        caching=st.booleans(),
    )
    def start(
        self,
        data: st.DataObject,
        budget: int,
        max_num_seqs: int,
        chunk: int | None,
        policy: Callable[[], Any],
        has_target: bool,
        vocabulary: int,
        num_drafts: int,
        store_slots: int,
        quota: int | None,
        caching: bool,
    ) -> None:
        cost = CostModel(COSTS)
        windows = data.draw(self.windows)
        cached_states = data.draw(self.cached_states)
        self.vocabulary = vocabulary
        self.max_num_seqs = max_num_seqs
        self.plan: StepPlan | None = None
        self.next_id = 0
        self.harness = SchedulerHarness(
            data.draw(self.pools) * len(windows),
            max_num_seqs=max_num_seqs,
            enable_prefix_caching=caching,
            vocabulary=vocabulary,
            windows=windows,
            store_slots=store_slots,
            budget=LatencyBudget(cost, 0.03, budget) if has_target else TokenBudget(budget),
            cost=cost,
            policy=policy(),
            max_num_waiting=6,
            max_num_waiting_per_tenant=4,
            max_kv_pages_per_tenant=quota and quota * len(windows),
            max_chunk=chunk,
            max_num_samples=max_num_seqs + 3,
            num_speculative_tokens=num_drafts,
            num_states=0 if cached_states is None else max_num_seqs + cached_states,
            num_cached_states=cached_states or 0,
        )
        self.harness.step_s = 0.02
        self.scheduler = self.harness.scheduler

    @rule(
        data=st.data(),
        max_tokens=st.integers(1, 9),
        stop=st.integers(0, 49),
        tenant=tenants,
        priority=st.integers(-2, 2),
        count=st.sampled_from([1, 1, 1, 2, 3]),
        lifetime=st.none() | st.floats(0, 0.5),
        pin_s=st.sampled_from([None, None, 0.1, 5.0]),
    )
    def add(
        self,
        data: st.DataObject,
        max_tokens: int,
        stop: int,
        tenant: str,
        priority: int,
        count: int,
        lifetime: float | None,
        pin_s: float | None,
    ) -> None:
        self._add(
            range(self.next_id, self.next_id + count),
            data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=self.longest_prompt)),
            max_tokens,
            stop_token_ids=frozenset({stop}),
            min_tokens=min(2, max_tokens),
            tenant=tenant,
            priority=priority,
            deadline=None if lifetime is None else self.harness.now + lifetime,
            pin_s=pin_s,
        )

    @rule(prompt=prompts, max_tokens=st.integers(1, 6), width=st.integers(1, 3), tenant=tenants)
    def search(self, prompt: list[int], max_tokens: int, width: int, tenant: str) -> None:
        beam = BeamSpec(min(width, self.max_num_seqs))
        self._add((self.next_id,), prompt, max_tokens, tenant=tenant, beam=beam, stop_token_ids=frozenset({7}))

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
        self.harness.commit(self.plan)
        self.plan = None

    @precondition(lambda self: self.plan is None)
    @rule(count=st.integers(1, 6))
    def several_steps(self, count: int) -> None:
        for _ in range(count):
            self.harness.step()

    @precondition(lambda self: self.plan is not None)
    @rule()
    def fail_the_step(self) -> None:
        for update in self.scheduler.abandon("failed"):
            self.harness.note(update)
        self.plan = None

    @precondition(lambda self: self.next_id)
    @rule(which=choice)
    def cancel(self, which: int) -> None:
        self.harness.cancel(which % self.next_id)

    @precondition(lambda self: self.next_id)
    @rule(which=choice)
    def give_bad_logits(self, which: int) -> None:
        self.harness.failing[which % self.next_id] = "NaN"

    @precondition(lambda self: self.next_id)
    @rule(which=choice)
    def preempt(self, which: int) -> None:
        preempt(self.scheduler, which % self.next_id)

    @rule(seconds=st.floats(0, 0.3))
    def expire(self, seconds: float) -> None:
        self.harness.now += seconds
        self.harness.expire()

    @rule(is_damaged=st.booleans(), seconds_per_page=st.sampled_from([1e-9, 1e-3, 1e9]))
    def change_the_store(self, is_damaged: bool, seconds_per_page: float) -> None:
        self.harness.store.is_damaged = is_damaged
        self.harness.store.seconds_per_page = seconds_per_page

    @invariant()
    def counters_agree_with_states(self) -> None:
        stats = self.scheduler.stats()
        assert stats.pages_free + stats.pages_cached + stats.pages_owned == stats.pages_total
        assert stats.pages_reserved <= stats.pages_free + stats.pages_cached
        assert sum(stats.waiting_by_reason.values()) == stats.waiting
        in_store = len(self.harness.store.slots) - self.harness.store.slots.count(None)
        assert stats.pages_spilled + stats.states_spilled == in_store
        for name, states in COUNTED_STATES.items():
            counted = sum(request.state in states for request in self.harness.requests.values())
            assert getattr(stats, name) == counted

    @invariant()
    def nothing_is_owned_when_nothing_runs(self) -> None:
        stats = self.scheduler.stats()
        assert stats.running or not stats.pages_owned + stats.pages_reserved
        assert stats.running or stats.states_free + stats.states_cached == stats.states_total

    @invariant()
    def streams_are_prefixes_of_what_they_would_be_alone(self) -> None:
        for request_id, request in self.harness.requests.items():
            output = self.harness.outputs[request_id]
            assert output == continuation(request.spec.prompt_token_ids, len(output), self.vocabulary)

    @invariant()
    def preemptions_are_limited(self) -> None:
        assert all(request.preemptions <= MAX_PREEMPTIONS for request in self.harness.requests.values())

    def teardown(self) -> None:
        if not hasattr(self, "harness"):
            return
        if self.plan is not None:
            self.harness.commit(self.plan)
        self.harness.run()
        for request_id, request in self.harness.requests.items():
            assert request.state is State.ENDED
            self._check_end(request_id, request)
        self.counters_agree_with_states()
        self.nothing_is_owned_when_nothing_runs()

    def _add(self, ids: Any, prompt: list[int], max_tokens: int, **options: Any) -> None:
        before = self.scheduler.stats()
        try:
            self.harness.add_forks(ids, prompt, max_tokens, **options)
        except Refused:
            assert self.scheduler.stats() == before
            return
        self.next_id += len(ids)

    def _check_plan(self, plan: StepPlan) -> None:
        tokens = [len(row.token_ids) for row in plan.sequences]
        assert all(tokens)
        assert sum(tokens) == plan.num_decode_rows + plan.num_prefill_tokens
        assert len(plan.sequences) <= self.max_num_seqs
        assert sum(row.num_samples for row in plan.sequences) <= self.max_num_seqs + 3

    def _check_end(self, request_id: int, request: Any) -> None:
        output = self.harness.outputs[request_id]
        end = self.harness.ended[request_id]
        spec = request.spec
        stopped = len(output) >= spec.min_tokens and output[-1] in spec.stop_token_ids if output else False
        if end in ENDINGS:
            assert len(output) < request.spec.max_tokens
        elif request.beam is not None:
            assert end == request.hypotheses[0].finish_reason
            assert not output
        elif end == "stop":
            assert stopped
        else:
            assert end == "length"
            assert len(output) == request.spec.max_tokens
            assert not stopped


class SlidingMachine(SchedulerMachine):
    """Sequences longer than a tile and a window, so that pages are released while they run."""

    longest_prompt = 90
    pools = st.integers(30, 60)
    windows = st.sampled_from([(0, 3), (5,), (0, 2, 2)])


class StatesMachine(SchedulerMachine):
    """Sequences with states, of which the prefix cache keeps some."""

    cached_states = st.integers(0, 4)


def test_any_interleaving_ends_every_request_with_its_own_tokens() -> None:
    run_state_machine_as_test(
        SchedulerMachine, settings=settings(max_examples=150, stateful_step_count=40, database=None)
    )


def test_any_interleaving_with_sliding_layers() -> None:
    run_state_machine_as_test(SlidingMachine, settings=settings(max_examples=60, stateful_step_count=30, database=None))


def test_any_interleaving_with_states() -> None:
    run_state_machine_as_test(StatesMachine, settings=settings(max_examples=30, stateful_step_count=40, database=None))
