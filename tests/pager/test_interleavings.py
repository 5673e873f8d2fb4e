"""In any order of operations every page is accounted for and every sequence reads back its own tokens."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from quire.pager import OutOfPages, PageTable, Spilled, check
from quire.pager.layout import first_kept_token

from tests.pager.conftest import MakeHarness, PagerHarness

tokens_of_few = st.lists(st.integers(0, 1), min_size=1, max_size=14)  # few values: hits and duplicates are common
salts = st.sampled_from([b"", b"other"])
few_pages = st.integers(0, 4)
choice = st.integers(0, 1000)


@dataclass
class Sequence:
    table: PageTable
    salt: bytes
    tokens: list[int] = field(default_factory=list)  # tokens that its tables must read back


class PagerMachine(RuleBasedStateMachine):
    def __init__(self, harness: PagerHarness) -> None:
        super().__init__()
        self.harness = harness
        self.pager = harness.pager
        self.live: list[Sequence] = []
        self.spilled: list[tuple[Spilled, bytes, list[int]]] = []

    @rule(tokens=tokens_of_few, salt=salts)
    def open(self, tokens: list[int], salt: bytes) -> None:
        before = self._counts()
        try:
            table = self.pager.open(tokens, salt)
            cached = table.num_tokens
        except OutOfPages:
            assert self._counts() == before
            assert self.pager.pool.num_reserved > 0
            return
        assert cached < len(tokens)
        self.live.append(Sequence(table, salt, tokens[:cached]))
        self._grow(self.live[-1], tokens[cached:])

    @rule(tokens=tokens_of_few, salt=salts, spare=few_pages)
    def open_with_spare_pages(self, tokens: list[int], salt: bytes, spare: int) -> None:
        before = self._counts()
        try:
            table = self.pager.open(tokens, salt, spare)
            cached = table.num_tokens
        except OutOfPages:
            assert self._counts() == before
            return
        sequence = Sequence(table, salt, tokens[:cached])
        self.live.append(sequence)
        for end in range(cached + 1, len(tokens) + 1):
            self.harness.extend(table, tokens[end - 1 : end])  # `open` has checked that the pages are available
            self.pager.commit(table, tokens[:end])
        sequence.tokens = tokens
        assert self.pager.pool.num_available >= spare

    @precondition(lambda self: self.live)
    @rule(which=choice, tokens=tokens_of_few)
    def grow(self, which: int, tokens: list[int]) -> None:
        self._grow(self._pick(which), tokens)

    @precondition(lambda self: self.live)
    @rule(which=choice)
    def fork(self, which: int) -> None:
        sequence = self._pick(which)
        owned = self.pager.pool.num_owned
        self.live.append(Sequence(sequence.table.fork(), sequence.salt, sequence.tokens[:]))
        assert self.pager.pool.num_owned == owned

    @precondition(lambda self: self.live)
    @rule(which=choice, share=st.floats(0, 1))
    def rollback(self, which: int, share: float) -> None:
        sequence = self._pick(which)
        to = round(share * len(sequence.tokens))
        if not sequence.table.can_roll_back(to):
            with pytest.raises(ValueError, match="left their window"):
                sequence.table.rollback(to)
            return
        sequence.table.rollback(to)
        del sequence.tokens[to:]

    @precondition(lambda self: self.live)
    @rule(which=choice)
    def commit(self, which: int) -> None:
        sequence = self._pick(which)
        self.pager.commit(sequence.table, sequence.tokens)
        for pages, window in zip(sequence.table.pages, self.pager.windows, strict=True):
            assert pages.count(-1) >= first_kept_token(len(sequence.tokens), window) // self.pager.page_size

    @precondition(lambda self: self.live)
    @rule(which=choice, num_pages=few_pages)
    def reserve(self, which: int, num_pages: int) -> None:
        table = self._pick(which).table
        before = (table.reserved, self._counts())
        try:
            table.reserve(num_pages)
        except OutOfPages:
            assert (table.reserved, self._counts()) == before
            assert num_pages - table.reserved > self.pager.pool.num_available

    @precondition(lambda self: self.live)
    @rule(which=choice, drafted=st.integers(0, 3))
    def spill(self, which: int, drafted: int) -> None:
        sequence = self._pick(which)
        num_computed = max(0, len(sequence.tokens) - drafted)
        if not sequence.table.can_roll_back(num_computed):
            return
        before = self._counts()
        spilled = self.pager.spill(sequence.table, num_computed)
        if spilled is None:
            assert self._counts() == before
            return
        assert sequence.table.num_tokens == 0
        self.live.remove(sequence)
        self.spilled.append((spilled, sequence.salt, sequence.tokens))

    @precondition(lambda self: self.spilled)
    @rule(which=choice, spare=few_pages, damaged=st.booleans())
    def restore(self, which: int, spare: int, damaged: bool) -> None:
        spilled, salt, tokens = self.spilled[which % len(self.spilled)]
        before = self._counts()
        self.harness.store.damaged = damaged
        try:
            table = self.pager.restore(spilled, tokens, salt, spare)
        except OutOfPages:
            assert self._counts() == before
            return
        self.spilled.remove((spilled, salt, tokens))
        if table is None:
            assert damaged
            return
        assert table.num_tokens == spilled.num_tokens
        assert self.pager.pool.num_available >= spare
        self.live.append(Sequence(table, salt, tokens[: table.num_tokens]))

    @precondition(lambda self: self.spilled)
    @rule(which=choice)
    def discard(self, which: int) -> None:
        self.pager.discard(self.spilled.pop(which % len(self.spilled))[0])

    @rule(tokens=tokens_of_few, salt=salts, seconds=st.integers(0, 5))
    def pin(self, tokens: list[int], salt: bytes, seconds: int) -> None:
        before = self._counts()
        kept = self.pager.pin(tokens, salt, self.harness.now + seconds)
        assert kept <= len(tokens)
        assert self._counts() == before

    @precondition(lambda self: self.live)
    @rule(which=choice, seconds=st.integers(0, 5))
    def pin_a_live_one(self, which: int, seconds: int) -> None:
        sequence = self._pick(which)
        self.pager.pin(sequence.tokens, sequence.salt, self.harness.now + seconds)

    @rule(seconds=st.integers(1, 3))
    def expire(self, seconds: int) -> None:
        self.harness.now += seconds

    @precondition(lambda self: self.live)
    @rule(which=choice)
    def release(self, which: int) -> None:
        sequence = self._pick(which)
        self.live.remove(sequence)
        sequence.table.release()

    @invariant()
    def pages_are_accounted_for(self) -> None:
        check(self.pager, [sequence.table for sequence in self.live])

    @invariant()
    def the_store_holds_what_was_spilled(self) -> None:
        held = sum(spilled.num_pages for spilled, _, _ in self.spilled)
        assert self.pager.num_spilled == self.harness.store.num_used == held

    @invariant()
    def every_sequence_reads_its_own_tokens(self) -> None:
        for sequence in self.live:
            for group, window in enumerate(self.pager.windows):
                first = first_kept_token(len(sequence.tokens), window)
                assert self.harness.memory.read(sequence.table, group, first) == sequence.tokens[first:]

    def teardown(self) -> None:
        for sequence in self.live:
            sequence.table.release()
        for spilled, _, _ in self.spilled:
            self.pager.discard(spilled)
        check(self.pager, [])
        assert self.pager.pool.num_owned == self.pager.num_spilled == self.harness.store.num_used == 0
        assert self.pager.pool.num_available == self.pager.pool.num_pages

    def _pick(self, which: int) -> Sequence:
        return self.live[which % len(self.live)]

    def _counts(self) -> tuple[int, ...]:
        pager = self.pager
        pool = self.pager.pool
        return pool.num_free, pool.num_cached, pool.num_reserved, pager.num_spilled, pager.prefix_queried_tokens

    def _grow(self, sequence: Sequence, tokens: list[int]) -> None:
        table = sequence.table
        before = (table.num_tokens, [list(pages) for pages in table.pages], self._counts())
        overflows = len(tokens) > table.max_append()
        try:
            self.harness.extend(table, tokens)
        except OutOfPages:
            assert overflows
            assert (table.num_tokens, [list(pages) for pages in table.pages], self._counts()) == before
            return
        assert not overflows
        sequence.tokens = sequence.tokens + tokens


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize(("windows", "num_pages"), [((0,), 9), ((8,), 11), ((0, 8), 19), ((0, 8, 8), 28)])
def test_any_interleaving_conserves_pages_and_tokens(
    make_harness: MakeHarness, windows: tuple[int, ...], num_pages: int
) -> None:
    run_state_machine_as_test(
        lambda: PagerMachine(make_harness(num_pages, windows, store_pages=8)),
        settings=settings(max_examples=60, stateful_step_count=40, database=None),
    )
