"""Readiness: the engine finishes steps while there is work, and the server is not draining."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from ...common.errors import QuireError
from ...common.stall import StallDetector
from ...engine.facade import EngineStats

WATCH_INTERVAL_S = 1.0


class Readiness:
    """The answer to /readyz. An engine is ready if it is idle or finished a step within `stall_timeout_s`."""

    def __init__(
        self, stats: Callable[[], EngineStats], stall_timeout_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._stats = stats
        self._stall_timeout_s = stall_timeout_s
        self._clock = clock
        self._is_leaving = False
        self._detector = StallDetector(clock())

    def leave(self) -> None:
        """End readiness: the server drains."""
        self._is_leaving = True

    def problem(self) -> str | None:
        """Return the reason why requests should go elsewhere now, or None."""
        if self._is_leaving:
            return "the server is shutting down"
        try:
            stats = self._stats()
        except QuireError as error:
            return f"the engine does not answer: {error}"
        now = self._clock()
        num_requests = stats.running + stats.waiting
        self._detector.note(stats.step, num_requests > 0, now)
        stalled_s = self._detector.stalled_for(now)
        if stalled_s < self._stall_timeout_s:
            return None
        return f"no step finished for {stalled_s:.1f} s while {num_requests} requests wait or run"

    async def watch(self) -> None:
        """Check regularly, so that a probe after a long idle time does not mistake new work for a stall."""
        while True:
            self.problem()
            await asyncio.sleep(min(WATCH_INTERVAL_S, self._stall_timeout_s / 4))
