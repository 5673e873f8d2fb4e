"""Any interleaving of the pager's operations keeps the books balanced and every sequence readable by its table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from quire.pager import OutOfPages, PageTable, check

World = Any
NUM_PAGES = 9
tokens_of_few = st.lists(st.integers(0, 1), min_size=1, max_size=14)  # few values: hits and duplicates are common
salts = st.sampled_from([b"", b"other"])
choice = st.integers(0, 1000)


@dataclass
class Sequence:
    table: PageTable
    salt: bytes
    tokens: list[int] = field(default_factory=list)  # what its table must read back


class PagerMachine(RuleBasedStateMachine):
    def __init__(self, make_world: Callable[..., World]) -> None:
        super().__init__()
        self.world = make_world(NUM_PAGES)
        self.pager = self.world.pager
        self.live: list[Sequence] = []

    @rule(tokens=tokens_of_few, salt=salts)
    def open(self, tokens: list[int], salt: bytes) -> None:
        table, cached = self.pager.open(tokens, salt)
        assert cached < len(tokens)
        self.live.append(Sequence(table, salt, tokens[:cached]))
        self._grow(self.live[-1], tokens[cached:])

    @rule(tokens=tokens_of_few, salt=salts, spare=st.integers(0, 3))
    def open_with_room_to_finish(self, tokens: list[int], salt: bytes, spare: int) -> None:
        before = self._counts()
        try:
            table, cached = self.pager.open(tokens, salt, spare_pages=spare)
        except OutOfPages:
            assert self._counts() == before
            return
        sequence = Sequence(table, salt, tokens[:cached])
        self.live.append(sequence)
        self.world.extend(table, tokens[cached:])  # promised: never OutOfPages
        sequence.tokens = tokens
        assert self.pager.num_available >= spare

    @precondition(lambda self: self.live)
    @rule(which=choice, tokens=tokens_of_few)
    def grow(self, which: int, tokens: list[int]) -> None:
        self._grow(self._pick(which), tokens)

    @precondition(lambda self: self.live)
    @rule(which=choice)
    def fork(self, which: int) -> None:
        sequence = self._pick(which)
        owned = self.pager.num_owned
        self.live.append(Sequence(self.pager.fork(sequence.table), sequence.salt, sequence.tokens[:]))
        assert self.pager.num_owned == owned

    @precondition(lambda self: self.live)
    @rule(which=choice, share=st.floats(0, 1))
    def rollback(self, which: int, share: float) -> None:
        sequence = self._pick(which)
        to = round(share * len(sequence.tokens))
        self.pager.rollback(sequence.table, to)
        del sequence.tokens[to:]

    @precondition(lambda self: self.live)
    @rule(which=choice)
    def publish(self, which: int) -> None:
        sequence = self._pick(which)
        self.pager.publish(sequence.table, sequence.tokens)
        assert sequence.table.num_published == len(sequence.tokens) // self.pager.page_size

    @precondition(lambda self: self.live)
    @rule(which=choice)
    def release(self, which: int) -> None:
        sequence = self._pick(which)
        self.live.remove(sequence)
        self.pager.release(sequence.table)

    @invariant()
    def books_balance(self) -> None:
        check(self.pager, [sequence.table for sequence in self.live])

    @invariant()
    def every_sequence_reads_its_own_tokens(self) -> None:
        for sequence in self.live:
            assert self.world.cells.read(sequence.table) == sequence.tokens

    def teardown(self) -> None:
        for sequence in self.live:
            self.pager.release(sequence.table)
        check(self.pager, [])
        assert self.pager.num_owned == 0
        assert self.pager.num_available == NUM_PAGES

    def _pick(self, which: int) -> Sequence:
        return self.live[which % len(self.live)]

    def _counts(self) -> tuple[int, int, int]:
        return self.pager.num_free, self.pager.num_cached, self.pager.prefix_queried_tokens

    def _grow(self, sequence: Sequence, tokens: list[int]) -> None:
        table = sequence.table
        before = (table.num_tokens, list(table.page_ids), self._counts())
        overflows = table.would_overflow(len(tokens))
        try:
            self.world.extend(table, tokens)
        except OutOfPages:
            assert overflows
            assert (table.num_tokens, list(table.page_ids), self._counts()) == before
            return
        assert not overflows
        sequence.tokens = sequence.tokens + tokens


def test_any_interleaving_conserves_pages_and_tokens(make_world: Callable[..., World]) -> None:
    run_state_machine_as_test(
        lambda: PagerMachine(make_world),
        settings=settings(max_examples=150, stateful_step_count=40, deadline=None, database=None),
    )
