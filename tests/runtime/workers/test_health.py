"""When an engine process has to be replaced."""

from __future__ import annotations

from quire.runtime.workers.health import TICK_S, HealthMonitor, HealthTimeouts

TIMEOUTS = HealthTimeouts(heartbeat_s=1.0, stall_s=30.0)


def problem_within(health: HealthMonitor, seconds: float, *, heartbeats: bool = True) -> str | None:
    """Check for that long, and return the first problem."""
    for _ in range(round(seconds / TICK_S)):
        if heartbeats:
            health.note_heartbeat()
        if (problem := health.check()) is not None:
            return problem
    return None


def test_a_process_without_heartbeats_is_replaced_after_the_timeout() -> None:
    health = HealthMonitor(TIMEOUTS)
    assert problem_within(health, 1.0, heartbeats=False) is None
    assert problem_within(health, TICK_S, heartbeats=False) == "no heartbeat for 1.0 s"


def test_a_process_that_announces_a_long_call_may_be_silent_for_longer() -> None:
    health = HealthMonitor(HealthTimeouts(heartbeat_s=1.0, held_up_s=5.0))
    for _ in range(2):
        health.note_heartbeat(is_held_up=True)
        assert problem_within(health, 5.0, heartbeats=False) is None
    health.note_heartbeat()
    assert problem_within(health, 1.25, heartbeats=False) == "no heartbeat for 1.0 s"
    health.note_heartbeat(is_held_up=True)
    assert problem_within(health, 5.25, heartbeats=False) == "no heartbeat for 5.0 s"


def test_a_process_with_heartbeats_may_compute_a_long_step_but_not_for_ever() -> None:
    health = HealthMonitor(TIMEOUTS)
    health.note_step(5, has_work=True)
    assert problem_within(health, 30.0) is None
    assert problem_within(health, 2 * TICK_S) == "no step finished for 30.0 s while requests wait or run"


def test_a_process_that_finishes_steps_or_has_no_work_is_healthy() -> None:
    health = HealthMonitor(HealthTimeouts(stall_s=2.0))
    for step in range(10):
        assert problem_within(health, 1.5) is None
        health.note_step(step, has_work=True)
    for _ in range(10):
        assert problem_within(health, 1.5) is None
        health.note_step(9, has_work=False)
    assert problem_within(health, 3.0) is not None


def test_a_broken_engine_loop_is_a_problem_at_once() -> None:
    health = HealthMonitor(TIMEOUTS)
    health.note_broken()
    assert health.check() == "its engine loop ended"


def test_timeouts_shorter_than_two_ticks_count_as_two() -> None:
    health = HealthMonitor(HealthTimeouts(heartbeat_s=0.0, stall_s=0.0))
    assert problem_within(health, 2 * TICK_S, heartbeats=False) is None
    assert health.check() is not None
