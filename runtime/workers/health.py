"""Whether an engine process is alive: its pulse beats, and where there is work its step counter advances.

Two signs, because they tell different things. The pulse comes from a thread of its own, so a process that is stopped or
stuck is found within a second, while one that copies a gigabyte for somebody is not. Progress is slow to judge: one
step may take long.

Pure: whoever watches calls `tick` at a steady pace. One invariant: time is counted in ticks, so a pause of the watcher
itself, of the whole machine for instance, is nobody's stall.
"""

from __future__ import annotations

from ..common.stall import StallDetector

TICK_S = 0.25


class HealthMonitor:
    def __init__(self, heartbeat_timeout_s: float, stall_timeout_s: float) -> None:
        self._silence_limit = max(2, round(heartbeat_timeout_s / TICK_S))
        self._stall_limit = max(2.0, stall_timeout_s / TICK_S)
        self._silent = 0  # ticks since its pulse was last felt
        self._ticks = 0
        self._stall = StallDetector(0)

    def note_heartbeat(self) -> None:
        self._silent = 0

    def note_step(self, step: int, has_work: bool) -> None:
        """It said how far it is."""
        self._stall.note(step, has_work, self._ticks)

    def tick(self) -> str | None:
        """Why it should be replaced, or None."""
        self._silent += 1
        self._ticks += 1
        if self._silent > self._silence_limit:
            return f"no sign of life for {self._silence_limit * TICK_S:.1f} s"
        if self._stall.stalled_for(self._ticks) > self._stall_limit:
            return f"no step finished for {self._stall_limit * TICK_S:.1f} s while requests wait or run"
        return None
