"""The statistics of one engine over all of its processes: its counters never fall."""

from __future__ import annotations

from ..engine import EngineStats
from ..engine.stats import NO_STATS, counters_of, sum_stats


class EngineCounters:
    """The last statistics of the current process, and the counters of the processes before it."""

    def __init__(self) -> None:
        self.stats: EngineStats | None = None  # stats of this process; None until the first report
        self._former = NO_STATS

    def forget_process(self) -> None:
        """Keep only the counters of a process that is gone."""
        if self.stats is not None:
            self._former = sum_stats([self._former, counters_of(self.stats)])
        self.stats = None

    def total(self, counted_here: EngineStats) -> EngineStats:
        """Return the last statistics, with counters over all processes and those of this process about them."""
        return sum_stats([self._former, self.stats or NO_STATS, counted_here])
