"""Sums of the statistics of several engines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from .facade import EngineStats


def sum_stats(all_stats: Sequence[EngineStats], counters: Sequence[Mapping[str, int]] = ()) -> EngineStats:
    """Add up the statistics of at least one engine, and the counters of engines without statistics."""
    if len(all_stats) == 1 and not counters:
        return all_stats[0]
    reasons: Counter[str] = Counter()
    for stats in all_stats:
        reasons.update(stats.waiting_by_reason)
    names = [name for name in EngineStats.__struct_fields__ if name != "waiting_by_reason"]
    sums = {name: sum(getattr(stats, name) for stats in all_stats) for name in names}
    for counts in counters:
        for name, count in counts.items():
            sums[name] += count
    return EngineStats(waiting_by_reason=dict(reasons), **sums)
