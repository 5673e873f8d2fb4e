"""Masks of a step's samples: the jobs that compute them, what waits for these, and the masks of the next step.

Must not import what compiles grammars. One thread at a time uses a matcher: that of its job until the job is done, else
the event loop between steps and the step's thread in a step. If a job may never end, its matchers are given up.
Matchers of one compiled grammar share a lexer with a mutex, for which some calls of llguidance wait with the GIL, and
with it the whole process. So a thread that uses one holds the lock of the compiled grammar.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import structlog
from llguidance import LLExecutor, LLMatcher

from ...scheduler.plan import SampledToken, ScheduledSequence, StepResult
from ..common.errors import QuireError
from ..model.runner import AllowedTokens, SamplingSpec
from .compiled_grammars import CompiledGrammar

DISTRUST = 4  # masks that a sequence computes apart, in time, after it was late; doubled each time
MAX_DOUBLINGS = 8
LIMIT_S = 10.0  # for the masks of one job: some ambiguous grammars never end
ABANDON_S = LIMIT_S / 2  # for those of several sequences, before each begins again, apart
LEXER_ERROR = "lexer error: too many"  # in llguidance's message about limits of what the copies of a matcher share
HOLD_S = 0.0005  # that a job waits for a compiled grammar which another one uses
MAX_FORCED = 64  # tokens; after more, forced tokens are not looked for: a text of 250,000 characters takes a second

_log = structlog.get_logger("quire.engine")


class MaskJob:
    """The computation of masks of some sequences by one thread. Those of one sequence follow each other."""

    __slots__ = ("held", "is_abandoned", "is_done", "is_late", "masks", "num_masks", "parts", "started")

    def __init__(self) -> None:
        self.parts: list[tuple[RunningGrammar, int, tuple[int, ...]]] = []  # with the first mask and the draft tokens
        self.masks: Any = None  # int32 [num_masks, words]
        self.num_masks = 0
        self.is_done = False
        self.is_late = False  # a step has waited for it in vain
        self.is_abandoned = False  # its matchers are lost: the sequences begin again
        self.started = 0.0  # time.monotonic() when its computation began; 0 before
        self.held: list[CompiledGrammar] = []  # that no other job uses meanwhile

    def runs_longer_than(self, limit_s: float) -> bool:
        """Return whether its computation began longer ago and is not done."""
        return not self.is_done and 0 < self.started < time.monotonic() - limit_s

    def add(self, running: RunningGrammar, drafts: tuple[int, ...]) -> None:
        """Add the masks of a sequence after what its matcher has taken by then, and after each draft token."""
        running.job, running.row, running.drafts = self, self.num_masks, drafts
        self.parts.append((running, self.num_masks, drafts))
        self.num_masks += 1 + len(drafts)

    def hold(self, compiled: CompiledGrammar | None, timeout_s: float = HOLD_S) -> bool:
        """Keep other jobs from the copies of a compiled grammar until this one ends. Return False if one has them."""
        assert compiled is not None, "a grammar is compiled before its masks are computed"
        if compiled in self.held:
            return True
        if not compiled.lock.acquire(timeout=timeout_s):
            return False
        self.held.append(compiled)
        return True

    def hold_all(self) -> None:
        """Hold the compiled grammars of all sequences; those with one that is in use begin again with the next step."""
        for part in self.parts.copy():
            if not self.hold(part[0].compiled):
                part[0].note_blocked()
                self.parts.remove(part)

    def release(self) -> None:
        """Let other jobs use what this one holds."""
        while self.held:
            self.held.pop().lock.release()


@dataclass(slots=True, eq=False)
class RunningGrammar:
    """The matcher of one running sequence, and its last job."""

    sampling: SamplingSpec
    matcher: LLMatcher | None = None  # None until the grammar is compiled
    compiled: CompiledGrammar | None = None  # what the matcher is a copy of: it counts while this refers to it
    num_consumed: int = 0  # generated tokens that the matcher has taken
    job: MaskJob | None = None
    row: int = 0  # of the job's masks: the first of this sequence
    end: int = 0  # the masks are those after the first `end` tokens of the context, and after each draft token
    drafts: tuple[int, ...] = ()
    error: str | None = None  # why there are no masks
    distrust: int = 1  # masks that it must compute apart, in time, before it is computed together with others
    num_late: int = 0
    is_beam: bool = False
    may_force: bool = True  # its forced tokens are looked for, in the step's thread
    is_alone: bool = False  # it shares no compiled grammar
    is_worn_out: bool = False  # it must begin again: texts of others took the compiled grammar to a limit, or block it
    blocked_since: float = 0.0  # time.monotonic() since when jobs of others use its compiled grammar; 0: they do not

    def has_masks(self, end: int, drafts: tuple[int, ...]) -> bool:
        """Return whether its job, done or not, is for the first `end` tokens of the context and these draft tokens."""
        return self.job is not None and self.end == end and self.drafts[: len(drafts)] == drafts

    def check_limit(self) -> None:
        """Note an error if the masks take so long that they may never come."""
        if self.job is not None and self.job.runs_longer_than(LIMIT_S):
            self.error = f"structured_outputs: the tokens that may follow were not known after {LIMIT_S:.0f} s"

    def waits(self) -> bool:
        """Return whether a step has waited in vain for its masks, and they are not ready, or will never be."""
        return self.is_worn_out or (self.job is not None and self.job.is_late and not self.job.is_done)

    def begin_again(self) -> RunningGrammar:
        """Return a grammar for the same sequence, without the matcher, that shares nothing with those of others."""
        distrust, num_late = DISTRUST << self.num_late, min(self.num_late + 1, MAX_DOUBLINGS)
        return RunningGrammar(self.sampling, distrust=distrust, num_late=num_late, is_beam=self.is_beam, is_alone=True)

    def note_blocked(self) -> None:
        """Begin the masks again with the next step, since a job of others uses the compiled grammar."""
        now = time.monotonic()
        self.job, self.blocked_since = None, self.blocked_since or now
        self.is_worn_out = now - self.blocked_since > ABANDON_S

    def note_limit(self) -> None:
        """Note an error if the matcher has reached a limit, unless other sequences may have had a part in it."""
        matcher, compiled = self.matcher, self.compiled
        if matcher is None or not matcher.is_error():
            return
        error = matcher.get_error()
        if LEXER_ERROR in error and compiled is not None and compiled.num_users > 1:
            self.is_worn_out = True
        else:
            self.error = f"structured_outputs: {error}"

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

    def first_mask(self) -> bytes | None:
        """Return the next mask if it is known since the grammar was compiled: before the first token."""
        return None if self.compiled is None or self.num_consumed else self.compiled.first_mask

    def take(self, token_ids: Sequence[int]) -> bool:
        """Let the matcher take generated tokens. Return whether the grammar allows them."""
        matcher = self.matcher
        assert matcher is not None, "a grammar is compiled before it takes tokens"
        self.num_consumed += len(token_ids)
        return all(map(matcher.consume_token, token_ids))  # one by one: a call holds the GIL

    def fork(self, parent: RunningGrammar, generated: Sequence[int]) -> None:
        """Go on from the matcher of the beam before the last token, if it is free; else the text is read again."""
        matcher, compiled, job = parent.matcher, parent.compiled, parent.job
        if matcher is None or compiled is None or job is None or not job.is_done:
            return
        if not compiled.lock.acquire(blocking=False):
            return
        self.compiled, self.matcher = compiled, matcher.deep_copy()
        self.matcher.consume_token(generated[-1])
        compiled.lock.release()
        self.num_consumed = len(generated)
        self.distrust = parent.distrust if job.is_late else 0

    def forced(self, limit: int) -> tuple[int, ...]:
        """Return up to `limit` of the tokens that the grammar forces next.

        They are looked for even if none is returned: the mask needs the first, and its job would wait for the GIL.
        """
        if self.matcher is None:
            return ()
        forced = self.matcher.compute_ff_tokens()
        if not forced:
            return ()
        self.may_force = len(forced) <= MAX_FORCED
        return tuple(forced[:limit])


class MaskQueue:
    """Jobs of many sequences, each computed with one call of llguidance: one at a time, in order."""

    def __init__(self, num_cores: int) -> None:
        self.changed = threading.Condition()  # notified when a job is done, in whatever thread
        self.num_words = 0  # of a mask; set with the first grammar
        self._num_cores = num_cores
        self._executor = LLExecutor(num_cores)
        self._lock = threading.Lock()
        self._jobs: deque[MaskJob] = deque()  # the first is being computed

    def run(self, job: MaskJob) -> None:
        """Compute a job in the calling thread, and those that come meanwhile. If one is computed, leave it to it."""
        with self._lock:
            jobs = self._jobs
            jobs.append(job)
            if len(jobs) > 1:
                return
        while True:
            self.compute(jobs[0])
            with self._lock:
                jobs.popleft()
                if not jobs:
                    return

    def abandon_slow(self) -> None:
        """Abandon all jobs if the first takes so long that it may never end: a call of the library cannot be ended."""
        with self._lock:
            if self._jobs and self._jobs[0].runs_longer_than(ABANDON_S):
                for job in self._jobs:
                    job.is_abandoned = True
                self._executor = LLExecutor(self._num_cores)  # jobs wait for the threads of the other one
                slow, self._jobs = self._jobs, deque()
                while len(slow) > 1:  # its thread must compute no other
                    slow.pop()

    def compute(self, job: MaskJob, prepare: Callable[[], None] | None = None) -> None:
        """Compute a job in the calling thread. An error ends its sequence; if it has several, they begin again."""
        job.started = time.monotonic()
        try:
            if prepare is not None:
                prepare()
                job.started = time.monotonic()
            job.hold_all()
            job.masks = self._masks(job)
            for running, _, _ in job.parts:
                running.blocked_since = 0.0
                running.note_limit()
        except BaseException as error:  # a panic of llguidance too
            is_known = isinstance(error, QuireError)
            if not is_known:
                _log.exception("computing masks failed")
            if len(job.parts) > 1:
                job.is_abandoned = True
                job.parts.clear()
                return
            for running, _, _ in job.parts:
                running.error = str(error) if is_known else f"computing the masks failed: {error!r}"
        finally:
            job.release()
        job.parts.clear()  # they refer to the job: matchers of ended sequences would wait for the garbage collector
        with self.changed:
            job.is_done = True
            self.changed.notify_all()

    def _masks(self, job: MaskJob) -> Any:
        """Return the masks of a job; llguidance computes them without the GIL.

        One mask is computed in the calling thread: if it never ends, no other job waits for it. Nothing is masked after
        a draft token that is not allowed: it is not sampled, so what follows is not used.
        """
        masks = np.empty((job.num_masks, self.num_words), np.int32)
        where = (masks.ctypes.data, masks.strides[0], job.num_masks)
        ready = []
        for running, row, drafts in job.parts:
            first = None if drafts else running.first_mask()
            if first is not None:
                masks[row] = np.frombuffer(first, np.int32, self.num_words)
            elif running.matcher is not None:
                ready.append((running.matcher, row, drafts))
        plain = [(matcher, row) for matcher, row, drafts in ready if not drafts]
        if len(plain) == len(ready) == 1:
            ((matcher, row),) = plain
            matcher.unsafe_compute_mask_ptr(masks[row].ctypes.data, masks.strides[0])
        elif plain:
            self._executor.unsafe_compute_mask_ptr(plain, *where)
        if len(plain) < len(ready):
            drafted = [(matcher, row, list(drafts)) for matcher, row, drafts in ready if drafts]
            for _, row, tokens in drafted:
                masks[row : row + 1 + len(tokens)] = -1
            self._executor.unsafe_compute_mask_ptr_with_draft_token(drafted, *where)
        return masks


@dataclass(slots=True)
class StepMasks:
    """The masks of one step. Its thread calls `wait` when the rows are computed, then `advance` and `compute_next`."""

    queue: MaskQueue
    wait_s: float  # for masks, if other sequences sample in the step
    wait_alone_s: float  # if none does
    sampling: list[tuple[RunningGrammar, ScheduledSequence, int]] = field(default_factory=list)  # and its first sample
    busy: set[int] = field(default_factory=set)  # request ids whose matcher computes masks for other tokens
    others_sample: bool = False  # sequences without a grammar
    next: MaskJob = field(default_factory=MaskJob)  # the masks after the samples

    def wait(self) -> AllowedTokens:
        """Wait for the masks, but not so long that other sequences notice. What is not ready has no masks."""
        jobs = {running.job for running, sequence, _ in self.sampling if sequence.request_id not in self.busy}
        pending = [job for job in jobs if job is not None and not job.is_done]
        if pending:
            self._wait_for(pending, self.others_sample or len(pending) < len(jobs))
        masks: list[Any] = []
        offsets: dict[MaskJob | None, int] = {}  # of each job's masks, in those of the step
        num_masks = 0
        for job in jobs:
            if job is not None and job.is_done and job.masks is not None:
                offsets[job] = num_masks
                num_masks += job.num_masks
                masks.append(job.masks)
        first: dict[int, int] = {}
        missing: dict[int, str | None] = {}
        for running, sequence, _ in self.sampling:
            offset = offsets.get(running.job)
            if offset is None:
                running.check_limit()
            is_busy = sequence.request_id in self.busy
            if running.error is not None or offset is None or running.is_worn_out or is_busy:
                missing[sequence.request_id] = running.error
            else:
                first[sequence.request_id] = offset + running.row
        return AllowedTokens(masks[0] if len(masks) == 1 else np.concatenate(masks) if masks else None, first, missing)

    def advance(self, result: StepResult, max_forced: int) -> StepResult:
        """Let the matchers take the accepted samples, and prepare the job of the masks after these.

        A matcher whose compiled grammar is in use takes them with the next step: it would wait for it with the GIL.
        Returns the result with up to `max_forced` tokens that each grammar forces next, which may become draft tokens.
        Their masks are computed as well.
        """
        sampled, job = result.sampled, self.next
        deadline, held = time.monotonic() + HOLD_S, None
        forced_at: dict[int, tuple[int, ...]] = {}
        for running, sequence, at in self.sampling:
            token = sampled[at]
            if running.is_beam or token.error is not None or token.is_deferred:
                continue
            if running.distrust and running.stays_apart():
                continue
            if running.compiled is not held:
                if not job.hold(running.compiled, max(0.0, deadline - time.monotonic())):
                    continue
                held = running.compiled
            accepted = (token.token_id,) if sequence.num_samples == 1 else _accepted(sequence, sampled, at)
            running.take(accepted)
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

    def _wait_for(self, pending: list[MaskJob], others_sample: bool) -> None:
        changed, new = self.queue.changed, [job for job in pending if not job.is_late]
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


def _accepted(sequence: ScheduledSequence, sampled: Sequence[SampledToken], at: int) -> Sequence[int]:
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
