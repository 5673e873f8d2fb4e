"""When an engine process is given up."""

from __future__ import annotations

from quire.runtime.workers.health import TICK_S, HealthMonitor


def ticks(health: HealthMonitor, seconds: float, *, heartbeat: bool = True) -> str | None:
    for _ in range(round(seconds / TICK_S)):
        if heartbeat:
            health.note_heartbeat()
        if (why := health.tick()) is not None:
            return why
    return None


def test_without_a_pulse() -> None:
    health = HealthMonitor(1.0, 30.0)
    assert ticks(health, 1.0, heartbeat=False) is None
    assert ticks(health, TICK_S, heartbeat=False) == "no sign of life for 1.0 s"


def test_with_a_pulse_a_step_may_take_long_but_not_for_ever() -> None:
    health = HealthMonitor(1.0, 30.0)
    health.note_step(5, has_work=True)
    assert ticks(health, 30.0) is None
    assert ticks(health, 2 * TICK_S) == "no step finished for 30.0 s while requests wait or run"


def test_the_idle_and_the_advancing_live() -> None:
    health = HealthMonitor(1.0, 2.0)
    for step in range(10):
        assert ticks(health, 1.5) is None
        health.note_step(step, has_work=True)
    for _ in range(10):
        assert ticks(health, 1.5) is None
        health.note_step(9, has_work=False)
    assert ticks(health, 3.0) is not None
