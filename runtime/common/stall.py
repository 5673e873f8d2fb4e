"""Measure how long an engine with work has gone without finishing a step."""

from __future__ import annotations


class StallDetector:
    """Compares step counters. Callers choose the unit of `now`: seconds, or ticks of their own."""

    def __init__(self, now: float) -> None:
        self._step = -1
        self._advanced_at = now

    def note(self, step: int, has_work: bool, now: float) -> None:
        """Record the engine's step counter. An engine without work does not stall."""
        if step != self._step or not has_work:
            self._step = step
            self._advanced_at = now

    def stalled_for(self, now: float) -> float:
        """Return the time since the engine last finished a step or had no work."""
        return now - self._advanced_at
