"""How long an engine with work has not finished a step."""

from __future__ import annotations

from quire.runtime.common.stall import StallDetector


def test_the_time_runs_while_there_is_work_and_no_new_step() -> None:
    detector = StallDetector(10)
    detector.note(step=5, has_work=True, now=11)
    detector.note(step=5, has_work=True, now=14)
    assert detector.stalled_for(15) == 4
    detector.note(step=6, has_work=True, now=16)
    assert detector.stalled_for(16) == 0


def test_an_engine_without_work_does_not_stall() -> None:
    detector = StallDetector(10)
    for now in (11, 15, 19):
        detector.note(step=5, has_work=False, now=now)
        assert detector.stalled_for(now) == 0
    detector.note(step=5, has_work=True, now=20)
    assert detector.stalled_for(20) == 1, "the time counts from when the engine last had no work"


def test_an_engine_that_never_reported_counts_from_the_start() -> None:
    assert StallDetector(10).stalled_for(17) == 7
