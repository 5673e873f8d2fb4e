"""Readiness: the step counter advances while work exists."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import pytest
from quire.runtime.common.errors import Unavailable
from quire.runtime.engine.facade import EngineStats
from quire.runtime.server.monitoring.readiness import Readiness

IDLE = EngineStats(
    step=0,
    running=0,
    waiting=0,
    pages_total=1,
    pages_owned=0,
    pages_cached=0,
    pages_free=1,
    prefix_queries_tokens=0,
    prefix_hits_tokens=0,
    preemptions=0,
)


@dataclass
class Scene:
    now: float = 100.0
    stats: EngineStats = IDLE

    def at(self, now: float, step: int, running: int = 0, waiting: int = 0) -> None:
        self.now = now
        self.stats = msgspec.structs.replace(IDLE, step=step, running=running, waiting=waiting)


@pytest.fixture
def scene() -> Scene:
    return Scene()


@pytest.fixture
def progress(scene: Scene) -> Readiness:
    return Readiness(lambda: scene.stats, stall_timeout_s=10, clock=lambda: scene.now)


def test_idle_is_ready_however_long(scene: Scene, progress: Readiness) -> None:
    for now in (100, 200, 10_000):
        scene.at(now, step=5)
        assert progress.problem() is None


def test_work_with_steps_is_ready_however_long(scene: Scene, progress: Readiness) -> None:
    for step in range(5):
        scene.at(100 + 9 * step, step=step, running=1)
        assert progress.problem() is None


@pytest.mark.parametrize("work", [{"running": 1}, {"waiting": 1}])
def test_work_without_steps_is_a_stall(scene: Scene, progress: Readiness, work: dict[str, int]) -> None:
    scene.at(100, step=5, **work)
    assert progress.problem() is None
    scene.at(109, step=5, **work)
    assert progress.problem() is None
    scene.at(110, step=5, **work)
    assert progress.problem() == "no step finished for 10.0 s while 1 requests wait or run"
    scene.at(111, step=6, **work)
    assert progress.problem() is None


def test_work_after_a_long_idle_time_is_no_stall(scene: Scene, progress: Readiness) -> None:
    scene.at(100, step=5)
    assert progress.problem() is None
    scene.at(199, step=5)
    assert progress.problem() is None
    scene.at(200, step=5, running=1)
    assert progress.problem() is None


def test_an_engine_that_cannot_answer_is_not_ready() -> None:
    def gone() -> EngineStats:
        raise Unavailable("restarting")

    assert Readiness(gone, 10).problem() == "the engine does not answer: restarting"
