"""The statistics that are counters, and sums over several engines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import msgspec

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
COUNTERS_BY_NAME = ("drafted_by_source", "accepted_by_source", "accepted_by_position")  # a count for each of some names
COUNTED_HERE = ("restarts", "replayed_requests", "quarantined_requests")  # a host also counts its own processes
_DICTS = ("waiting_by_reason", *COUNTERS_BY_NAME)  # fields that are no integers
NO_STATS = EngineStats(
    step=0,
    running=0,
    waiting=0,
    pages_total=0,
    pages_owned=0,
    pages_cached=0,
    pages_free=0,
    prefix_queries_tokens=0,
    prefix_hits_tokens=0,
    preemptions=0,
)


def counters_of(stats: EngineStats) -> EngineStats:
    """Return the counters among an engine's statistics; all other fields are 0 or empty."""
    names = (*COUNTERS, *COUNTERS_BY_NAME, *COUNTED_HERE)
    return msgspec.structs.replace(NO_STATS, **{name: getattr(stats, name) for name in names})


def sum_stats(all_stats: Iterable[EngineStats]) -> EngineStats:
    """Add up the statistics of several engines."""
    sums = {name: 0 for name in EngineStats.__struct_fields__ if name not in _DICTS}
    sums_by_name = {field: Counter[str]() for field in _DICTS}
    for stats in all_stats:
        for name in sums:
            sums[name] += getattr(stats, name)
        for field, counts in sums_by_name.items():
            counts.update(getattr(stats, field))
    return _replace(NO_STATS, sums, sums_by_name)


def subtract_counters(stats: EngineStats, earlier: EngineStats) -> EngineStats:
    """Return the statistics with counters that count from `earlier`, which has counters of the same engines."""
    counts = {name: getattr(stats, name) - getattr(earlier, name) for name in COUNTERS + COUNTED_HERE}
    counts_by_name = {field: Counter[str](getattr(stats, field)) for field in COUNTERS_BY_NAME}
    for field, later in counts_by_name.items():
        later.subtract(getattr(earlier, field))
    return _replace(stats, counts, counts_by_name)


def _replace(stats: EngineStats, counts: dict[str, int], counts_by_name: dict[str, Counter[str]]) -> EngineStats:
    dicts = {field: dict(counter) for field, counter in counts_by_name.items()}
    return msgspec.structs.replace(stats, **counts, **dicts)
