"""`SchedulerStats`: the gauges and counters of a scheduler at one moment."""

from __future__ import annotations

from dataclasses import dataclass, field

from .encoding import EncoderStats


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """A snapshot. `pages_free + pages_cached + pages_owned == pages_total`. Counters count from the start."""

    step: int  # finished steps
    running: int
    waiting: int
    waiting_by_reason: dict[str, int]  # keys: sequences, pages, latency, tokens, quota, fork
    pages_total: int
    pages_owned: int
    pages_cached: int
    pages_free: int
    pages_reserved: int  # free or cached pages that are kept for running requests
    pages_pinned: int  # cached pages that are evicted last
    pages_spilled: int  # pages in the spill store
    prefix_queries_tokens: int
    prefix_hits_tokens: int
    states_total: int  # slots for states; 0: the model has none
    states_cached: int  # kept by the prefix cache
    states_free: int
    states_kept: int  # states that the prefix cache has kept so far
    state_hits: int  # prompts that continued from a kept state
    state_copies: int  # states that were copied because two owners shared a slot
    states_spilled: int  # states in the spill store
    states_cached_bytes: int
    stateless_tokens: int  # prompt tokens computed again where the prefix cache had pages, but no state
    preemptions: int
    preemptions_spilled: int  # preemptions whose pages were spilled
    recomputed_tokens: int  # tokens computed again after a preemption
    draft_tokens: int  # verified draft tokens
    accepted_draft_tokens: int
    drafted_by_source: dict[str, int]  # keys: prompt, suffix, model, head, forced
    accepted_by_source: dict[str, int]
    accepted_by_position: dict[str, int]  # accepted tokens of drafters by their position in the draft, from 0
    steps_over_itl_target: int  # steps whose decoding alone was predicted to exceed the latency target
    encoder: EncoderStats = field(default_factory=EncoderStats)
