"""The statistics that are counters, and sums over several engines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from .facade import EngineStats

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


def counters_of(stats: EngineStats) -> dict[str, int]:
    """Return the counters among an engine's statistics."""
    return {name: getattr(stats, name) for name in COUNTERS + COUNTED_HERE}


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
