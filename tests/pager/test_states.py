"""States of sequences: slots that forks share until one writes, going back, and what a full pool does."""

from __future__ import annotations

from collections.abc import Collection

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from quire.pager import InvariantViolated, OutOfStates, Pager, PageTable, Spilled, StatePool, check

from tests.pager.conftest import FakePageMemory, FakePageStore

PAGE = 4
ROLLBACK = 3
STORE_SLOTS_OF_STATE = 2


class States:
    """The memory of states: after each token a state holds all of them."""

    def __init__(
        self,
        slots: int,
        cached: int = 0,
        interval: int = 512,
        pages: int = 40,
        store_slots: int | None = None,
        message_ends: Collection[int] = (),
    ) -> None:
        self.of: list[list[int]] = [[-1]] * (slots + cached)  # content of a slot that no sequence has written
        self.pool = StatePool(slots + cached, ROLLBACK, self.copy)
        self.store = None
        if store_slots is not None:
            self.store = FakePageStore(FakePageMemory(pages), store_slots, self, STORE_SLOTS_OF_STATE)
        self.pager = Pager(
            PAGE,
            pages,
            states=self.pool,
            num_cached_states=cached,
            state_interval=interval,
            store=self.store,
            message_ends=message_ends,
        )

    def copy(self, source: int, destination: int) -> None:
        self.of[destination] = self.of[source][:]

    def compute(self, table: PageTable, tokens: list[int]) -> None:
        """Compute tokens in place, as a step does: the state continues at any of the last positions, or at 0."""
        first = table.num_tokens
        table.append(len(tokens))
        state = self.of[table.state]
        assert first == 0 or len(state) - first <= ROLLBACK
        self.of[table.state] = [*state[:first], *tokens]


@pytest.fixture
def states() -> States:
    return States(3)


def test_a_sequence_has_a_slot_from_its_first_token_on(states: States) -> None:
    table = states.pager.open([1, 2, 3])
    assert (table.state, states.pool.num_owned) == (-1, 0)
    states.compute(table, [1, 2])
    slot = table.state
    states.compute(table, [3, 4, 5, 6])
    assert (table.state, states.pool.num_owned, states.pool.num_copies) == (slot, 1, 0)
    check(states.pager, [table])
    table.release()
    assert (table.state, states.pool.num_owned) == (-1, 0)
    check(states.pager, [])


def test_forks_share_a_slot_until_one_of_them_writes(states: States) -> None:
    table = states.pager.open([1])
    states.compute(table, [1, 2, 3, 4])
    twin = table.fork()
    assert (twin.state, states.pool.num_owned) == (table.state, 1)
    check(states.pager, [table, twin])
    states.compute(twin, [8])
    assert (states.pool.num_owned, states.pool.num_copies) == (2, 1)
    states.compute(table, [9])
    assert (states.pool.num_owned, states.pool.num_copies) == (2, 1)
    assert [states.of[each.state] for each in (table, twin)] == [[1, 2, 3, 4, 9], [1, 2, 3, 4, 8]]
    check(states.pager, [table, twin])


def test_a_fork_of_the_prompt_without_its_last_token(states: States) -> None:
    table = states.pager.open([1])
    states.compute(table, [1, 2, 3, 4, 5])
    states.pager.commit(table, [1, 2, 3, 4, 5])
    twin = table.fork()
    twin.rollback(4)
    states.compute(twin, [5, 6])
    assert states.of[twin.state] == [1, 2, 3, 4, 5, 6]


def test_rejected_draft_tokens_leave_nothing(states: States) -> None:
    table = states.pager.open([1])
    states.compute(table, [1, 2, 3, 4])
    states.pager.commit(table, [1, 2, 3, 4])
    states.compute(table, [5, 70, 71])
    assert [table.can_roll_back(to) for to in (2, 3, 4, 5, 7)] == [False, False, True, True, True]
    table.rollback(5)
    states.pager.commit(table, [1, 2, 3, 4, 5])
    states.compute(table, [6])
    assert states.of[table.state] == [1, 2, 3, 4, 5, 6]


def test_a_sequence_goes_back_no_further_than_its_state_can(states: States) -> None:
    table = states.pager.open([1])
    states.compute(table, [1, 2, 3, 4, 5, 6, 7])
    assert [table.can_roll_back(to) for to in (0, 1, 3, 4, 6)] == [True, False, False, True, True]
    with pytest.raises(ValueError, match="cannot roll back to 3 tokens, the state is at 7"):
        table.rollback(3)
    states.pager.commit(table, [1, 2, 3, 4, 5, 6, 7])
    assert [table.can_roll_back(to) for to in (0, 5, 6, 7)] == [True, False, True, True]
    table.rollback(0)
    states.compute(table, [8])
    assert states.of[table.state] == [8]


def test_going_back_in_steps_is_no_way_to_go_back_further(states: States) -> None:
    table = states.pager.open([1])
    states.compute(table, [1, 2, 3, 4, 5, 6, 7])
    table.rollback(5)
    for each in (table, table.fork()):
        assert [each.can_roll_back(to) for to in (0, 3, 4, 5)] == [True, False, True, True]


def test_tokens_that_were_not_computed_are_withdrawn_from_any_length(states: States) -> None:
    table = states.pager.open([1])
    states.compute(table, [1, 2])
    states.pager.commit(table, [1, 2])
    table.append(9)
    assert not table.can_roll_back(2)
    table.withdraw(2)
    states.compute(table, [3])
    assert states.of[table.state] == [1, 2, 3]


def test_more_sequences_than_slots_are_an_error_that_changes_nothing(states: States) -> None:
    tables = [states.pager.open([1]) for _ in range(4)]
    for table in tables[:3]:
        states.compute(table, [1])
    with pytest.raises(OutOfStates, match="all 3 states are in use"):
        tables[3].append(1)
    assert (states.pool.num_owned, tables[3].num_tokens) == (3, 0)


def test_without_cached_states_there_is_no_prefix_cache() -> None:
    pager = Pager(PAGE, 40, states=StatePool(2, ROLLBACK))
    table = pager.open([1, 2, 3, 4, 5])
    table.append(5)
    pager.commit(table, [1, 2, 3, 4, 5])
    table.release()
    assert pager.open([1, 2, 3, 4, 5, 6]).num_tokens == 0
    assert pager.pin([1, 2, 3, 4, 5], b"", 1e12) == 0


@pytest.mark.parametrize(("cached", "kept"), [(0, 0), (4, 1)])
def test_a_spilled_state_comes_back_with_its_pages_and_continues(cached: int, kept: int) -> None:
    states = States(2, cached=cached, store_slots=7)
    pager, store = states.pager, states.store
    assert store is not None
    table = pager.open([1])
    states.compute(table, [1, 2, 3, 4, 5, 6])
    pager.commit(table, [1, 2, 3, 4, 5, 6])
    assert [pager.spill_seconds(pages) for pages in (2, 5, 6)] == [4.0, 7.0, None]
    spilled = pager.spill(table, 6)
    assert spilled is not None
    assert (spilled.num_pages, len(spilled.state_slots), store.num_used) == (2, 2, 4)
    assert (pager.num_spilled, pager.num_spilled_states, states.pool.num_owned) == (2, 1, kept)
    other = pager.open([9])
    states.compute(other, [9, 8, 7])  # overwrites the slot that the state had
    table = pager.restore(spilled, [1, 2, 3, 4, 5, 6, 7])
    assert table is not None
    check(pager, [table, other])
    assert states.of[table.state] == [1, 2, 3, 4, 5, 6]
    assert [table.can_roll_back(to) for to in (0, 5, 6)] == [True, False, True]
    assert (pager.num_spilled, pager.num_spilled_states, store.num_used) == (0, 0, 0)
    states.compute(table, [7, 8])
    pager.commit(table, [1, 2, 3, 4, 5, 6, 7, 8])
    assert (states.of[table.state], states.pool.num_copies) == ([1, 2, 3, 4, 5, 6, 7, 8], 0)


def test_a_restored_sequence_keeps_a_state_where_its_prompt_ends() -> None:
    states = States(2, cached=4, store_slots=7)
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    table = states.pager.open(prompt)
    states.compute(table, prompt[:3])
    spilled = states.pager.spill(table, 3)
    assert spilled is not None
    table = states.pager.restore(spilled, prompt)
    assert table is not None
    assert states.pager.next_end(table, 3, 9) == 8
    for end in (8, 9):
        states.compute(table, prompt[table.num_tokens : end])
        states.pager.commit(table, prompt)
    for token in range(20, 28):
        prompt.append(token)
        states.compute(table, [token])
        states.pager.commit(table, prompt)
    assert sorted(len(states.of[slot]) for slot in states.pager.cached_states.slots()) == [8, 16]


def test_a_state_ahead_of_rejected_draft_tokens_is_spilled_as_it_is() -> None:
    states = States(1, store_slots=9)
    table = states.pager.open([1])
    states.compute(table, [1, 2, 3, 4, 70, 71])
    spilled = states.pager.spill(table, 4)
    assert spilled is not None
    table = states.pager.restore(spilled, [1, 2, 3, 4, 5])
    assert table is not None
    assert states.of[table.state] == [1, 2, 3, 4, 70, 71]
    states.compute(table, [5])
    assert states.of[table.state] == [1, 2, 3, 4, 5]


def test_a_state_that_a_fork_shares_is_spilled_and_stays_with_the_fork() -> None:
    states = States(2, store_slots=9)
    table = states.pager.open([1])
    states.compute(table, [1, 2, 3])
    twin = table.fork()
    spilled = states.pager.spill(table, 3)
    assert spilled is not None
    assert (states.of[twin.state], states.pool.num_owned) == ([1, 2, 3], 1)
    table = states.pager.restore(spilled, [1, 2, 3])
    assert table is not None
    assert table.state != twin.state
    assert states.of[table.state] == [1, 2, 3]
    check(states.pager, [table, twin])


def test_a_state_too_far_ahead_is_not_spilled() -> None:
    states = States(1, store_slots=9)
    table = states.pager.open([1])
    states.compute(table, [1, 2, 3, 4, 5, 6, 7])
    with pytest.raises(ValueError, match="the state is at 7"):
        states.pager.spill(table, 3)
    check(states.pager, [table])


@pytest.mark.parametrize("store_slots", [0, 2, 3])
def test_a_store_without_room_for_the_state_takes_nothing(store_slots: int) -> None:
    states = States(1, store_slots=store_slots)
    table = states.pager.open([1])
    states.compute(table, [1, 2, 3, 4, 5])
    assert states.pager.spill_seconds(2) is None
    assert states.pager.spill(table, 5) is None
    assert (table.num_tokens, states.of[table.state], states.pager.num_spilled_states) == (5, [1, 2, 3, 4, 5], 0)


def test_a_damaged_state_is_not_restored_and_its_slot_is_free() -> None:
    states = States(2, store_slots=9)
    table = states.pager.open([1])
    states.compute(table, [1, 2, 3, 4, 5])
    spilled = states.pager.spill(table, 5)
    assert spilled is not None
    assert states.store is not None
    states.store.damaged = True
    assert states.pager.restore(spilled, [1, 2, 3, 4, 5]) is None
    assert (states.pool.num_owned, states.store.num_used, states.pager.num_spilled_states) == (0, 0, 0)
    check(states.pager, [])


def test_restoring_without_a_free_slot_changes_nothing() -> None:
    states = States(1, store_slots=9)
    table = states.pager.open([1])
    states.compute(table, [1, 2, 3, 4, 5])
    spilled = states.pager.spill(table, 5)
    assert spilled is not None
    other = states.pager.open([1])
    states.compute(other, [1])
    with pytest.raises(OutOfStates, match="all 1 states are in use"):
        states.pager.restore(spilled, [1, 2, 3, 4, 5])
    check(states.pager, [other])
    other.release()
    assert states.pager.restore(spilled, [1, 2, 3, 4, 5]) is not None


def test_a_sequence_without_tokens_spills_no_state() -> None:
    states = States(1, store_slots=9)
    table = states.pager.open([1])
    states.compute(table, [1, 2, 3])
    table.withdraw(0)
    spilled = states.pager.spill(table, 0)
    assert spilled is not None
    assert (spilled.used_slots(), states.pool.num_owned) == ([], 0)
    table = states.pager.restore(spilled, [1])
    assert table is not None
    states.compute(table, [1])
    check(states.pager, [table])


def test_the_audit_notices_a_lost_and_a_shared_slot(states: States) -> None:
    table = states.pager.open([1])
    states.compute(table, [1])
    with pytest.raises(InvariantViolated, match="state slots have"):
        check(Pager(PAGE, 40, states=states.pool), [])
    twin = table.fork()
    twin._writable = 4
    with pytest.raises(InvariantViolated, match="writable, but shared"):
        check(states.pager, [table, twin])


@pytest.mark.parametrize(("slots", "rollback"), [(0, 1), (1, -1)])
def test_a_pool_has_slots(slots: int, rollback: int) -> None:
    with pytest.raises(ValueError, match="there must be slots"):
        StatePool(slots, rollback)


class StateMachine(RuleBasedStateMachine):
    """Sequences that grow, fork, go back, are spilled and end; their states always hold their tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.states = States(4, cached=3, interval=8, pages=30, store_slots=12)
        self.live: list[tuple[PageTable, list[int]]] = []
        self.spilled: list[tuple[Spilled, list[int]]] = []

    @precondition(lambda self: len(self.live) < 4)
    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=18))
    def open(self, tokens: list[int]) -> None:
        table = self.states.pager.open(tokens)
        assert table.num_tokens < len(tokens)
        self.live.append((table, tokens[: table.num_tokens]))
        self.grow(-1, tokens[table.num_tokens :])

    @precondition(lambda self: 0 < len(self.live) < 4)
    @rule(which=st.integers(0, 9))
    def fork(self, which: int) -> None:
        table, tokens = self.live[which % len(self.live)]
        self.live.append((table.fork(), tokens))

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 9), tokens=st.lists(st.integers(0, 1), min_size=1, max_size=4))
    def grow(self, which: int, tokens: list[int]) -> None:
        table, known = self.live[which % len(self.live)]
        if len(known) + len(tokens) <= 30:
            self.states.compute(table, tokens)
            self.live[which % len(self.live)] = table, known + tokens

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 9), length=st.integers(0, 30))
    def go_back(self, which: int, length: int) -> None:
        table, known = self.live[which % len(self.live)]
        if table.can_roll_back(length):
            table.rollback(length)
            self.live[which % len(self.live)] = table, known[:length]

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 9), drafted=st.integers(0, ROLLBACK))
    def spill(self, which: int, drafted: int) -> None:
        table, known = self.live[which % len(self.live)]
        num_computed = max(0, len(known) - drafted)
        if table.can_roll_back(num_computed):
            spilled = self.states.pager.spill(table, num_computed)
            if spilled is not None:
                self.live.pop(which % len(self.live))
                self.spilled.append((spilled, known[:num_computed]))

    @precondition(lambda self: self.spilled and len(self.live) < 4)
    @rule(which=st.integers(0, 9), damaged=st.booleans())
    def restore(self, which: int, damaged: bool) -> None:
        assert self.states.store is not None
        self.states.store.damaged = damaged
        spilled, tokens = self.spilled.pop(which % len(self.spilled))
        table = self.states.pager.restore(spilled, tokens)
        if table is None:
            assert damaged
            return
        assert table.num_tokens == len(tokens)
        self.live.append((table, tokens))

    @precondition(lambda self: self.spilled)
    @rule(which=st.integers(0, 9))
    def discard(self, which: int) -> None:
        self.states.pager.discard(self.spilled.pop(which % len(self.spilled))[0])

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 9))
    def commit(self, which: int) -> None:
        table, known = self.live[which % len(self.live)]
        self.states.pager.commit(table, known)

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 9))
    def release(self, which: int) -> None:
        self.live.pop(which % len(self.live))[0].release()

    @invariant()
    def slots_are_accounted_for_and_hold_the_tokens(self) -> None:
        check(self.states.pager, [table for table, _ in self.live])
        for table, known in self.live:
            assert not known or self.states.of[table.state][: len(known)] == known

    @invariant()
    def the_store_holds_what_was_spilled(self) -> None:
        assert self.states.store is not None
        handles = [spilled for spilled, _ in self.spilled]
        assert self.states.store.num_used == sum(len(spilled.used_slots()) for spilled in handles)
        assert self.states.pager.num_spilled == sum(spilled.num_pages for spilled in handles)
        assert self.states.pager.num_spilled_states == sum(bool(spilled.state_slots) for spilled in handles)

    def teardown(self) -> None:
        for table, _ in self.live:
            table.release()
        for spilled, _ in self.spilled:
            self.states.pager.discard(spilled)
        check(self.states.pager, [])
        cached = self.states.pager.cached_states
        assert self.states.pool.num_owned == len(cached)
        assert self.states.store is not None
        assert self.states.store.num_used == 0


def test_any_interleaving_conserves_states() -> None:
    run_state_machine_as_test(StateMachine, settings=settings(max_examples=60, stateful_step_count=30, database=None))
