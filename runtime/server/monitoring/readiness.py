"""Readiness as progress: the step counter advances while work exists, not merely that the port answers.

It must not know HTTP. One invariant: an engine that is idle or finished a step within the limit is ready, any other
is not, and none is behind a server that leaves.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from ...common.errors import QuireError
from ...engine.facade import EngineStats

WATCH_INTERVAL_S = 1.0


class Readiness:
    """Remembers when the engine was last seen to be idle or to advance."""

    def __init__(
        self, stats: Callable[[], EngineStats], stall_timeout_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._stats = stats
        self._stall_timeout_s = stall_timeout_s
        self._clock = clock
        self._leaving = False
        self._step = -1
        self._advanced_at = clock()

    def leave(self) -> None:
        """The server drains: requests should go elsewhere from now on."""
        self._leaving = True

    def problem(self) -> str | None:
        """Why requests should go elsewhere now, or None."""
        if self._leaving:
            return "the server is shutting down"
        try:
            stats = self._stats()
        except QuireError as error:
            return f"the engine does not answer: {error}"
        now = self._clock()
        if stats.step != self._step or stats.running + stats.waiting == 0:
            self._step = stats.step
            self._advanced_at = now
        stalled_s = now - self._advanced_at
        if stalled_s < self._stall_timeout_s:
            return None
        return f"no step finished for {stalled_s:.1f} s while {stats.running + stats.waiting} requests wait or run"

    async def watch(self) -> None:
        """Look regularly, so that a probe after a long idle time does not mistake new work for a stall."""
        while True:
            self.problem()
            await asyncio.sleep(min(WATCH_INTERVAL_S, self._stall_timeout_s / 4))
