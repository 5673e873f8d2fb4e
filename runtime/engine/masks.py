"""Masks of a step's samples: the jobs that compute them, what waits for these, and the masks of the next step.

Must not import what compiles grammars. One thread at a time uses a matcher: that of its job until the job is done, else
the event loop between steps and the step's thread in a step.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from typing import Any

import numpy as np
import structlog
from llguidance import LLExecutor, LLMatcher

from ...scheduler.plan import SampledToken, ScheduledSequence, StepResult
from ..common.errors import QuireError
from ..model.runner import AllowedTokens, SamplingSpec

DISTRUST = 4  # masks that a sequence computes apart, in time, after it was late; doubled each time
MAX_DOUBLINGS = 8
LIMIT_S = 10.0  # for the masks of one job: some ambiguous grammars never end
MAX_FORCED = 64  # tokens; after more, forced tokens are not looked for: a text of 250,000 characters takes a second

_log = structlog.get_logger("quire.engine")


class MaskJob:
    """The computation of masks of some sequences by one thread. Those of one sequence follow each other."""

    __slots__ = ("is_done", "is_late", "masks", "num_masks", "parts", "started")

    def __init__(self, sequences: list[RunningGrammar]) -> None:
        self.parts: list[tuple[RunningGrammar, int, tuple[int, ...]]] = []  # with the first mask and the draft tokens
        self.masks: Any = None  # int32 [num_masks, words]
        self.num_masks = 0
        self.is_done = False
        self.is_late = False  # a step has waited for it in vain
        self.started = 0.0  # time.monotonic() when its computation began; 0 before
        for running in sequences:
            running.job, running.row = self, self.num_masks
            self.parts.append((running, self.num_masks, running.drafts))
            self.num_masks += 1 + len(running.drafts)


@dataclass(slots=True, eq=False)
class RunningGrammar:
    """The matcher of one running sequence, and its last job."""

    sampling: SamplingSpec
    matcher: LLMatcher | None = None  # None until the grammar is compiled
    num_consumed: int = 0  # generated tokens that the matcher has seen
    job: MaskJob | None = None
    row: int = 0  # of the job's masks: the first of this sequence
    end: int = 0  # the masks are those after the first `end` tokens of the context, and after each draft token
    drafts: tuple[int, ...] = ()
    error: str | None = None  # why there are no masks
    distrust: int = 1  # masks that it must compute apart, in time, before it is computed together with others
    num_late: int = 0
    is_beam: bool = False
    may_force: bool = True  # its forced tokens are looked for, in the step's thread

    def has_masks(self, end: int, drafts: tuple[int, ...]) -> bool:
        """Return whether its job, done or not, is for the first `end` tokens of the context and these draft tokens."""
        return self.job is not None and self.end == end and self.drafts[: len(drafts)] == drafts

    def check_limit(self) -> None:
        """Note an error if the masks take so long that they may never come."""
        job = self.job
        if job is not None and not job.is_done and job.started and time.monotonic() - job.started > LIMIT_S:
            self.error = f"structured_outputs: the tokens that may follow were not known after {LIMIT_S:.0f} s"

    def note_late(self) -> None:
        """Compute the next masks apart: a step has waited for the last ones in vain."""
        if self.matcher is not None:  # else its grammar is being compiled, which says nothing about its masks
            self.distrust = DISTRUST << self.num_late
            self.num_late = min(self.num_late + 1, MAX_DOUBLINGS)

    def stays_apart(self) -> bool:
        """Note that a token was sampled. Return whether the next mask must be computed apart as well."""
        if self.job is not None and not self.job.is_late:
            self.distrust -= 1
        return self.distrust > 0

    def advance(self, accepted: Sequence[int]) -> list[int]:
        """Take generated tokens. Return the tokens that the grammar forces after them."""
        matcher = self.matcher
        assert matcher is not None, "a token was sampled with its mask"
        for token_id in accepted:
            matcher.consume_token(token_id)
        self.job, self.drafts = None, ()
        self.end += len(accepted)
        self.num_consumed += len(accepted)
        if not self.may_force:
            return []
        forced = matcher.compute_ff_tokens()
        self.may_force = len(forced) <= MAX_FORCED
        return forced[:MAX_FORCED]


class MaskThread:
    """A thread that computes the masks of many sequences with one call of llguidance."""

    def __init__(self, num_cores: int) -> None:
        self.changed = threading.Condition()  # notified when a job is done, in whatever thread
        self.num_words = 0  # of a mask; set with the first grammar
        self._executor = LLExecutor(num_cores)
        self._queue: SimpleQueue[MaskJob | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._job: MaskJob | None = None  # that is computed

    def start(self, sequences: list[RunningGrammar]) -> None:
        """Begin to compute the masks of these sequences, after the jobs that were started before."""
        stuck = self._job
        if stuck is not None and not stuck.is_done and time.monotonic() - stuck.started > LIMIT_S:
            self.close()  # a call of the library cannot be ended: the next jobs get another thread
            self._queue, self._thread = SimpleQueue(), None
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, args=(self._queue,), name="quire-masks", daemon=True)
            self._thread.start()
        self._queue.put(MaskJob(sequences))

    def compute(self, job: MaskJob, prepare: Callable[[], None] | None = None) -> None:
        """Compute a job in the calling thread. It is done then, whatever happens: an error is one of its sequences."""
        job.started = time.monotonic()
        try:
            if prepare is not None:
                prepare()
                job.started = time.monotonic()
            job.masks = self._masks(job)
            for running, _, _ in job.parts:
                if running.matcher is not None and running.matcher.is_error():
                    running.error = f"structured_outputs: {running.matcher.get_error()}"
        except BaseException as error:  # a panic of llguidance too
            is_known = isinstance(error, QuireError)
            if not is_known:
                _log.exception("computing masks failed")
            for running, _, _ in job.parts:
                running.error = str(error) if is_known else f"structured_outputs: {error!r}"
        with self.changed:
            job.is_done = True
            self.changed.notify_all()

    def close(self) -> None:
        """End the thread when what it runs has ended."""
        self._queue.put(None)

    def _masks(self, job: MaskJob) -> Any:
        """Return the masks of a job; llguidance computes them without the GIL.

        Nothing is masked after a draft token that is not allowed: it is not sampled, so what follows is not used.
        """
        masks = np.empty((job.num_masks, self.num_words), np.int32)
        where = (masks.ctypes.data, masks.strides[0], job.num_masks)
        ready = [(running.matcher, row, drafts) for running, row, drafts in job.parts if running.matcher is not None]
        plain = [(matcher, row) for matcher, row, drafts in ready if not drafts]
        if plain:
            self._executor.unsafe_compute_mask_ptr(plain, *where)
        if len(plain) < len(ready):
            drafted = [(matcher, row, list(drafts)) for matcher, row, drafts in ready if drafts]
            for _, row, drafts in drafted:
                masks[row : row + 1 + len(drafts)] = -1
            self._executor.unsafe_compute_mask_ptr_with_draft_token(drafted, *where)
        return masks

    def _run(self, queue: SimpleQueue[MaskJob | None]) -> None:
        while (job := queue.get()) is not None:
            self._job = job
            self.compute(job)


@dataclass(slots=True)
class StepMasks:
    """The masks of one step. The step's thread calls `wait` when the rows are computed, then `advance`."""

    thread: MaskThread
    wait_s: float  # for masks, if other sequences sample in the step
    wait_alone_s: float  # if none does
    sampling: list[tuple[RunningGrammar, ScheduledSequence, int]] = field(default_factory=list)  # and its first sample
    busy: set[int] = field(default_factory=set)  # request ids whose matcher computes masks for other tokens
    others_sample: bool = False  # sequences without a grammar

    def wait(self) -> AllowedTokens:
        """Wait for the masks, but not so long that other sequences notice. What is not ready has no masks."""
        jobs = {running.job for running, sequence, _ in self.sampling if sequence.request_id not in self.busy}
        pending = [job for job in jobs if job is not None and not job.is_done]
        if pending:
            self._wait_for(pending, self.others_sample or len(pending) < len(jobs))
        start: dict[MaskJob | None, int] = {}  # of each job's masks, in those of the step
        masks: list[Any] = []
        first: dict[int, int] = {}
        missing: dict[int, str | None] = {}
        for job in jobs:
            if job is not None and job.is_done and job.masks is not None:
                start[job] = sum(map(len, masks))
                masks.append(job.masks)
        for running, sequence, _ in self.sampling:
            if running.job not in start:
                running.check_limit()
            if running.error is not None or running.job not in start or sequence.request_id in self.busy:
                missing[sequence.request_id] = running.error
            else:
                first[sequence.request_id] = start[running.job] + running.row
        return AllowedTokens(masks[0] if len(masks) == 1 else np.concatenate(masks) if masks else None, first, missing)

    def advance(self, result: StepResult) -> StepResult:
        """Begin to compute the masks after the accepted samples, while the event loop commits these and plans.

        Returns the result with the tokens that each grammar forces next. They may become draft tokens, so the masks of
        such a sequence begin with the next step.
        """
        sampled, forced_at = result.sampled, {}
        together: list[RunningGrammar] = []
        for running, sequence, at in self.sampling:
            token = sampled[at]
            if running.is_beam or token.error is not None or token.is_deferred:
                continue
            if running.distrust and running.stays_apart():
                continue
            accepted = [token.token_id] if sequence.num_samples == 1 else _accepted(sequence, sampled, at)
            forced = running.advance(accepted)
            if forced:
                forced_at[at + len(accepted) - 1] = tuple(forced)
            else:
                together.append(running)
        if together:
            self.thread.start(together)
        if not forced_at:
            return result
        with_forced = [
            token._replace(forced=forced_at[i]) if i in forced_at else token for i, token in enumerate(sampled)
        ]
        return replace(result, sampled=tuple(with_forced))

    def _wait_for(self, pending: list[MaskJob], others_sample: bool) -> None:
        changed, new = self.thread.changed, [job for job in pending if not job.is_late]
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


def _accepted(sequence: ScheduledSequence, sampled: Sequence[SampledToken], at: int) -> list[int]:
    """Return the samples from `at` on up to the first that differs from its draft token, or has no token."""
    accepted: list[int] = []
    drafts = sequence.context[len(sequence.context) - sequence.num_samples + 1 :]
    for token, draft in zip(sampled[at : at + sequence.num_samples], (*drafts, None), strict=True):
        if token.error is not None or token.is_deferred:
            break
        accepted.append(token.token_id)
        if token.token_id != draft:
            break
    return accepted
