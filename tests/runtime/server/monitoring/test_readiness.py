"""Readiness: the step counter advances while there is work."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import pytest
from quire.runtime.common.errors import Unavailable
from quire.runtime.engine.facade import EngineStats
from quire.runtime.server.monitoring.readiness import Readiness

from tests.support import samples


@dataclass
class FakeEngine:
    """An engine whose statistics the test sets, and the clock."""

    now: float = 100.0
    current: EngineStats = samples.STATS

    def stats(self) -> EngineStats:
        return self.current

    def at(self, now: float, step: int, running: int = 0, waiting: int = 0) -> None:
        self.now = now
        self.current = msgspec.structs.replace(samples.STATS, step=step, running=running, waiting=waiting)


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def readiness(engine: FakeEngine) -> Readiness:
    return Readiness(engine.stats, stall_timeout_s=10, clock=lambda: engine.now)


def test_an_idle_engine_stays_ready(engine: FakeEngine, readiness: Readiness) -> None:
    for now in (100, 200, 10_000):
        engine.at(now, step=5)
        assert readiness.problem() is None


def test_an_engine_that_finishes_steps_stays_ready(engine: FakeEngine, readiness: Readiness) -> None:
    for step in range(5):
        engine.at(100 + 9 * step, step=step, running=1)
        assert readiness.problem() is None


@pytest.mark.parametrize("work", [{"running": 1}, {"waiting": 1}])
def test_work_without_steps_is_a_stall(engine: FakeEngine, readiness: Readiness, work: dict[str, int]) -> None:
    engine.at(100, step=5, **work)
    assert readiness.problem() is None
    engine.at(109, step=5, **work)
    assert readiness.problem() is None
    engine.at(110, step=5, **work)
    assert readiness.problem() == "no step finished for 10.0 s while 1 requests wait or run"
    engine.at(111, step=6, **work)
    assert readiness.problem() is None


def test_work_after_a_long_idle_time_is_no_stall(engine: FakeEngine, readiness: Readiness) -> None:
    engine.at(100, step=5)
    assert readiness.problem() is None
    engine.at(199, step=5)
    assert readiness.problem() is None
    engine.at(200, step=5, running=1)
    assert readiness.problem() is None


def test_an_engine_that_does_not_answer_is_not_ready() -> None:
    def gone() -> EngineStats:
        raise Unavailable("restarting")

    assert Readiness(gone, 10).problem() == "the engine does not answer: restarting"


def test_a_draining_server_is_not_ready(readiness: Readiness) -> None:
    readiness.leave()
    assert readiness.problem() == "the server is shutting down"
