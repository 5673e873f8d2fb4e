"""Work in parts: how much of it a step does, by a clock that advances with the work."""

from __future__ import annotations

from collections.abc import Iterator

from quire.runtime.model.runner.paced_work import PacedWork, WorkPiece


class Ledger:
    """Work that takes `seconds` for an item of size 1, and its clock."""

    def __init__(self, seconds: float = 0.001) -> None:
        self.now = 0.0
        self.seconds = seconds
        self.parts: list[tuple[str, int, int]] = []  # parts in the order in which they were done
        self.paced = PacedWork(lambda: self.now)

    def work(self, kind: str, num_items: int, size: float = 1.0, part_items: int = 1) -> WorkPiece:
        def do(first: int, end: int) -> None:
            self.parts.append((kind, first, end))
            self.now += self.seconds * size * (end - first)

        return WorkPiece(kind, num_items, size, part_items, do)

    def steps(self, seconds: float) -> list[list[tuple[str, int, int]]]:
        """Return the parts of each step until all work is done."""
        steps = []
        is_done = False
        while not is_done:
            self.parts = []
            is_done = self.paced.advance(seconds)
            steps.append(self.parts)
        return steps


def test_a_step_does_what_is_predicted_to_fit() -> None:
    """The first part of a kind is the least one, as its pace is not known."""
    ledger = Ledger()
    ledger.paced.begin([ledger.work("a", 40, 1.0, 2)])
    assert ledger.steps(0.0101) == [
        [("a", 0, 2), ("a", 2, 10)],
        [("a", 10, 20)],
        [("a", 20, 30)],
        [("a", 30, 40)],
    ]


def test_a_step_does_one_part_at_least() -> None:
    ledger = Ledger()
    ledger.paced.begin([ledger.work("a", 7, 1.0, 3), ledger.work("b", 1)])
    assert ledger.steps(0.0) == [[("a", 0, 3)], [("a", 3, 6)], [("a", 6, 7)], [("b", 0, 1)]]


def test_parts_are_no_smaller_than_the_least_one() -> None:
    ledger = Ledger()
    ledger.paced.begin([ledger.work("a", 32, 1.0, 16), ledger.work("a", 20, 1.0, 16)])
    assert ledger.steps(0.0201) == [[("a", 0, 16)], [("a", 16, 32)], [("a", 0, 20)]]


def test_seconds_follow_the_size_of_items_and_the_pace_of_each_kind() -> None:
    ledger = Ledger()
    ledger.paced.begin([ledger.work("a", 1), ledger.work("a", 8, 4.0), ledger.work("b", 3)])
    assert ledger.steps(0.0091) == [
        [("a", 0, 1), ("a", 0, 2)],
        [("a", 2, 4)],
        [("a", 4, 6)],
        [("a", 6, 8), ("b", 0, 1)],
        [("b", 1, 3)],
    ]


def test_the_pace_follows_a_machine_that_becomes_slower() -> None:
    ledger = Ledger()
    ledger.paced.begin([ledger.work("a", 10_000)])
    assert ledger.paced.advance(0.1) is False
    ledger.seconds *= 10
    durations = []
    for _ in range(12):
        start = ledger.now
        ledger.paced.advance(0.1)
        durations.append(ledger.now - start)
    assert durations[0] > 0.9
    assert durations[-1] <= 0.11


def test_all_is_done_without_a_limit_and_work_is_made_when_it_is_reached() -> None:
    ledger = Ledger()

    def pieces() -> Iterator[WorkPiece]:
        yield ledger.work("a", 5)
        assert ledger.parts[-1][2] == 5, "the piece before is done"
        yield ledger.work("b", 2)

    ledger.paced.begin(pieces())
    assert ledger.paced.advance(float("inf"))
    assert ledger.parts == [("a", 0, 1), ("a", 1, 5), ("b", 0, 1), ("b", 1, 2)]
    assert ledger.paced.advance(0.0), "there is no more work"


def test_new_work_takes_the_place_of_what_is_not_done() -> None:
    ledger = Ledger()
    ledger.paced.begin([ledger.work("a", 5)])
    assert not ledger.paced.advance(0.0)
    ledger.paced.begin([ledger.work("b", 1)])
    assert ledger.paced.advance(0.0)
    assert ledger.parts == [("a", 0, 1), ("b", 0, 1)]
