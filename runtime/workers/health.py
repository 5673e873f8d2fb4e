"""Decides when to replace an engine process: it sends no heartbeat, finishes no step, or reports that it is broken.

Heartbeats come from a separate thread: a process that is stopped or stuck is found within a second, while a process
that copies a gigabyte stays healthy. A step may take long, so the timeout for steps is longer.

Time is counted in calls of `check`, which come every TICK_S. A pause of this process, or of the whole machine, is not
counted against the engine process.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..common.stall import StallDetector

TICK_S = 0.25
ALIVE = b"."  # heartbeat: the process runs
HELD_UP = b"!"  # heartbeat: a long call may delay the next one


@dataclass(frozen=True, slots=True)
class HealthTimeouts:
    """Seconds an engine process may go without a heartbeat, and with work but without finishing a step."""

    heartbeat_s: float = 1.0
    stall_s: float = 30.0
    held_up_s: float = 15.0  # limit without a heartbeat after one that announced a long call with the GIL


class HealthMonitor:
    def __init__(self, timeouts: HealthTimeouts) -> None:
        self._now = 0.0  # TICK_S for each check
        self._heartbeat_at = 0.0
        self._heartbeat_timeout_s = max(2 * TICK_S, timeouts.heartbeat_s)
        self._held_up_timeout_s = max(self._heartbeat_timeout_s, timeouts.held_up_s)
        self._is_held_up = False
        self._stall_timeout_s = max(2 * TICK_S, timeouts.stall_s)
        self._stall = StallDetector(self._now)
        self._noted: tuple[int, bool] | None = None  # the last step since the last check, and whether there was work
        self._is_broken = False

    def note_heartbeat(self, is_held_up: bool = False) -> None:
        """Record a heartbeat, and whether a long call may delay the next one."""
        self._heartbeat_at = self._now
        self._is_held_up = is_held_up

    def note_step(self, step: int, has_work: bool) -> None:
        """Record the number of finished steps, and whether requests wait or run."""
        self._noted = step, has_work

    def note_broken(self) -> None:
        """Record that the process runs, but its engine loop has ended."""
        self._is_broken = True

    def check(self) -> str | None:
        """Return the reason to replace the process, or None. Call it every TICK_S."""
        if self._noted is not None:
            self._stall.note(*self._noted, self._now)
            self._noted = None
        silent_s = self._now - self._heartbeat_at
        stalled_s = self._stall.stalled_for(self._now)
        self._now += TICK_S
        if self._is_broken:
            return "its engine loop ended"
        if silent_s >= (self._held_up_timeout_s if self._is_held_up else self._heartbeat_timeout_s):
            return f"no heartbeat for {silent_s:.1f} s"
        if stalled_s >= self._stall_timeout_s:
            return f"no step finished for {stalled_s:.1f} s while requests wait or run"
        return None
