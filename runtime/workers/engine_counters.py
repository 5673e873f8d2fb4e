"""The statistics of one engine over all of its processes: its counters never fall."""

from __future__ import annotations

from ..engine import EngineStats
from ..engine.stats import COUNTED_HERE, COUNTERS


class EngineCounters:
    """The last statistics of the current process, and the counters of the processes before it."""

    def __init__(self) -> None:
        self.stats: EngineStats | None = None  # stats of this process; None until the first report
        self._former_counts = dict.fromkeys(COUNTERS + COUNTED_HERE, 0)

    def forget_process(self) -> None:
        """Keep only the counters of a process that is gone."""
        if self.stats is not None:
            for name in self._former_counts:
                self._former_counts[name] += getattr(self.stats, name)
        self.stats = None

    def total(self, **counted_here: int) -> dict[str, int]:
        """Return the counters over all processes; `counted_here` has the counters of this process about them."""
        stats = self.stats
        counts = {name: count + (getattr(stats, name) if stats else 0) for name, count in self._former_counts.items()}
        return counts | {name: counts[name] + count for name, count in counted_here.items()}
