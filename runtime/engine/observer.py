"""The observer of an engine that nobody watches."""

from __future__ import annotations

from ..common.errors import QuireError
from .facade import RequestStats, StepStats


class SilentObserver:
    """Implements `facade.EngineObserver` by doing nothing."""

    def on_step(self, stats: StepStats) -> None:
        pass

    def on_tokens(self, count: int, since_last_s: float | None) -> None:
        pass

    def on_rejected(self, error: QuireError) -> None:
        pass

    def on_finished(self, stats: RequestStats) -> None:
        pass
