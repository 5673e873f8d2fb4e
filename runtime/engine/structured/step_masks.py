"""`StepMasks`: the masks of one step's samples: the wait for their jobs, and the job of the next step's masks.

Must not import the compilation of grammars.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ....scheduler.plan import ScheduledSequence, StepResult, verified_samples
from ...model.runner import AllowedTokens
from .masks import HOLD_S, MaskJob, MaskQueue, RunningGrammar


@dataclass(slots=True)
class StepMasks:
    """The masks of one step. Its thread calls `wait` when the rows are computed, then `advance` and `compute_next`."""

    queue: MaskQueue
    wait_s: float  # wait for masks, if other sequences sample in the step
    wait_alone_s: float  # wait if no other sequence samples
    sampling: list[tuple[RunningGrammar, ScheduledSequence, int]] = field(default_factory=list)  # int: first sample
    busy: set[int] = field(default_factory=set)  # request ids whose matcher computes masks for other tokens
    others_sample: bool = False  # the step samples sequences without a grammar
    next: MaskJob = field(default_factory=MaskJob)  # job of the masks after the samples

    def wait(self) -> AllowedTokens:
        """Wait for the masks, but not so long that other sequences notice. A job that is not ready has no masks."""
        jobs = {running.job for running, sequence, _ in self.sampling if sequence.request_id not in self.busy}
        pending = [job for job in jobs if job is not None and not job.is_done]
        if pending:
            self._wait_for(pending, self.others_sample or len(pending) < len(jobs))
        masks, offsets = _stacked(jobs)
        return AllowedTokens(masks, *self._rows(offsets))

    def advance(self, result: StepResult, max_forced: int) -> StepResult:
        """Advance the matchers over the accepted samples, and prepare the job of the masks after these.

        A matcher whose compiled grammar is in use advances with the next step, because it would hold the GIL while it
        waits. Returns the result with up to `max_forced` tokens that each grammar forces next, which may become draft
        tokens. Their masks are computed as well.
        """
        sampled = result.sampled
        job = self.next
        deadline = time.monotonic() + HOLD_S
        held = None
        forced_at: dict[int, tuple[int, ...]] = {}
        for running, sequence, at in self.sampling:
            token = sampled[at]
            if running.is_beam or token.error is not None or token.is_deferred:
                continue
            if running.isolated_masks_left and running.stays_isolated():
                continue
            if running.compiled is not held:
                if not job.hold(running.compiled, max(0.0, deadline - time.monotonic())):
                    continue
                held = running.compiled
            verified = verified_samples(sequence, sampled[at : at + sequence.num_samples])
            accepted = [sample.token_id for sample in verified]
            running.accept(accepted)
            running.end += len(accepted)
            forced = running.forced(max_forced) if running.may_force else ()
            if forced:
                forced_at[at + len(accepted) - 1] = forced
            job.add(running, forced)
        if not forced_at:
            return result
        with_forced = [
            token._replace(forced=forced_at[i]) if i in forced_at else token for i, token in enumerate(sampled)
        ]
        return replace(result, sampled=tuple(with_forced))

    def compute_next(self) -> None:
        """Compute the masks after the samples, while the event loop commits these and plans."""
        if self.next.parts:
            self.queue.run(self.next)

    def _rows(self, offsets: dict[MaskJob | None, int]) -> tuple[dict[int, int], dict[int, str | None]]:
        """Return the first mask of each request, and the errors of requests without masks: None if masks are late."""
        first: dict[int, int] = {}
        missing: dict[int, str | None] = {}
        for running, sequence, _ in self.sampling:
            request_id = sequence.request_id
            offset = offsets.get(running.job)
            if offset is None:
                running.check_limit()
            if offset is None or running.error is not None or running.needs_restart or request_id in self.busy:
                missing[request_id] = running.error
            else:
                first[request_id] = offset + running.row
        return first, missing

    def _wait_for(self, pending: list[MaskJob], others_sample: bool) -> None:
        """Wait until one of the jobs is done; with `others_sample`, until all that were not late before are done."""
        changed = self.queue.changed
        new = [job for job in pending if not job.is_late]
        with changed:
            if not others_sample:
                changed.wait_for(lambda: any(job.is_done for job in pending), self.wait_alone_s)
            changed.wait_for(lambda: all(job.is_done for job in new), self.wait_s)
        late = {job for job in new if not job.is_done}
        for running, _, _ in self.sampling:
            if running.job in late:
                running.note_late()
        for job in late:
            job.is_late = True


def _stacked(jobs: Iterable[MaskJob | None]) -> tuple[Any, dict[MaskJob | None, int]]:
    """Return the masks of all finished jobs, int32 [masks, words] or None, and each job's first row in them."""
    masks: list[Any] = []
    offsets: dict[MaskJob | None, int] = {}
    num_masks = 0
    for job in jobs:
        if job is not None and job.is_done and job.masks is not None:
            offsets[job] = num_masks
            num_masks += job.num_masks
            masks.append(job.masks)
    return masks[0] if len(masks) == 1 else np.concatenate(masks) if masks else None, offsets
