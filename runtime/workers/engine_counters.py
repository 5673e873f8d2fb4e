"""The statistics of one engine over all of its processes: its counters never fall."""

from __future__ import annotations

from ..engine import EngineStats

COUNTERS = (  # fields of EngineStats that a new process counts from 0
    "step",
    "prefix_queries_tokens",
    "prefix_hits_tokens",
    "preemptions",
    "preemptions_spilled",
    "recomputed_tokens",
    "draft_tokens",
    "accepted_draft_tokens",
    "steps_over_itl_target",
    "states_kept",
    "state_hits",
    "state_copies",
    "stateless_tokens",
    "encoded_texts",
    "encoded_tokens",
    "encoded_images",
    "image_cache_hits",
)
COUNTED_HERE = ("restarts", "replayed_requests", "quarantined_requests")  # a host also counts its own processes


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
