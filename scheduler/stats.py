"""What a scheduler tells about itself."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """A snapshot. `pages_free + pages_cached + pages_owned == pages_total`. Counters count from the start."""

    step: int  # finished steps
    running: int
    waiting: int
    waiting_by_reason: dict[str, int]  # for sequences, pages, latency, tokens, quota, or source (a fork's)
    pages_total: int
    pages_owned: int
    pages_cached: int
    pages_free: int
    pages_reserved: int  # of those free or cached: running requests are sure to get them
    pages_pinned: int  # of those cached: evicted last
    pages_spilled: int  # in the store
    prefix_queries_tokens: int
    prefix_hits_tokens: int
    preemptions: int
    preemptions_spilled: int  # of those: pages were kept
    recomputed_tokens: int  # lost to preemption and computed again
    draft_tokens: int  # verified
    accepted_draft_tokens: int
