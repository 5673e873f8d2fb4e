"""Jobs that compute masks: the matchers of running sequences, and the queue of jobs that many sequences share.

Must not import the compilation of grammars. One thread at a time uses a matcher: its job's thread until the job is
done, otherwise the event loop between steps and the step's thread in a step. If a job may never end, its matchers are
abandoned. Matchers of one compiled grammar share a lexer with a mutex, for which some calls of llguidance wait with the
GIL, and with it the whole process. So a thread that uses one holds the lock of the compiled grammar.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import structlog
from llguidance import LLExecutor, LLMatcher

from ...common.errors import QuireError
from ...model.runner import SamplingSpec
from ..error_mapping import grammar_fault
from .compiled_grammars import CompiledGrammar

ISOLATED_MASKS = 4  # masks that a sequence computes in separate jobs after its masks were late; doubled each time
MAX_DOUBLINGS = 8  # doublings of ISOLATED_MASKS
LIMIT_S = 10.0  # limit for the masks of one job: some ambiguous grammars never end
ABANDON_S = LIMIT_S / 2  # limit for a shared job; then each of its sequences restarts in a separate job
# Parts of llguidance's messages about limits; the first limit depends on a sequence's text alone.
ITEMS_ERROR = "items; max is"
LEXER_ERROR = "lexer error: too many"
TOKENS_PER_MASK = 16  # tokens that a matcher replays between two masks
HOLD_S = 0.0005  # wait of a job for a compiled grammar that another job uses
MAX_FORCED = 64  # most forced tokens: looking for a text of 250,000 characters takes a second

_log = structlog.get_logger("quire.engine")


class MaskJob:
    """The computation of masks of some sequences by one thread. The masks of one sequence are consecutive."""

    __slots__ = ("held", "is_abandoned", "is_done", "is_late", "masks", "num_masks", "parts", "started")

    def __init__(self) -> None:
        self.parts: list[tuple[RunningGrammar, int, tuple[int, ...]]] = []  # grammar, its first mask, its draft tokens
        self.masks: Any = None  # int32 [num_masks, words]
        self.num_masks = 0
        self.is_done = False
        self.is_late = False  # the masks missed their step
        self.is_abandoned = False  # the matchers are lost: their sequences restart
        self.started = 0.0  # time.monotonic() when its computation began; 0 before
        self.held: list[CompiledGrammar] = []  # grammars whose locks the job holds

    def note_progress(self) -> None:
        """Restart the job's clock."""
        self.started = time.monotonic()

    def runs_longer_than(self, limit_s: float) -> bool:
        """Return whether the computation began more than `limit_s` ago and is not done."""
        return not self.is_done and 0 < self.started < time.monotonic() - limit_s

    def add(self, running: RunningGrammar, drafts: tuple[int, ...]) -> None:
        """Add the masks of a sequence after the tokens that its matcher has taken, and after each draft token."""
        running.job, running.row, running.drafts = self, self.num_masks, drafts
        self.parts.append((running, self.num_masks, drafts))
        self.num_masks += 1 + len(drafts)

    def hold(self, compiled: CompiledGrammar | None, timeout_s: float = HOLD_S) -> bool:
        """Lock a compiled grammar until `release`. Return False if another job holds it for longer than `timeout_s`."""
        assert compiled is not None, "a grammar is compiled before its masks are computed"
        if compiled in self.held:
            return True
        if not compiled.lock.acquire(timeout=timeout_s):
            return False
        self.held.append(compiled)
        return True

    def hold_all(self) -> None:
        """Lock the compiled grammars of all sequences, and remove each sequence whose grammar another job holds."""
        for part in self.parts.copy():
            if not self.hold(part[0].compiled):
                part[0].note_blocked()
                self.parts.remove(part)

    def release(self) -> None:
        """Unlock all compiled grammars that the job holds."""
        while self.held:
            self.held.pop().lock.release()


@dataclass(slots=True, eq=False)
class RunningGrammar:
    """The matcher of one running sequence, and its last job."""

    sampling: SamplingSpec
    matcher: LLMatcher | None = None  # None until the grammar is compiled
    compiled: CompiledGrammar | None = None  # source of the matcher's copy: this reference makes it count as used
    num_consumed: int = 0  # generated tokens that the matcher has taken
    job: MaskJob | None = None
    row: int = 0  # first mask of this sequence among the job's masks
    end: int = 0  # the masks follow the first `end` tokens of the context and each draft token
    drafts: tuple[int, ...] = ()
    error: str | None = None  # reason why there are no masks
    isolated_masks_left: int = 1  # masks to compute in separate jobs before the sequence joins the shared job again
    num_late: int = 0  # number of times that the masks missed their step, up to MAX_DOUBLINGS
    is_beam: bool = False
    may_force: bool = True  # the step's thread looks for forced tokens
    is_alone: bool = False  # the sequence shares no compiled grammar
    needs_restart: bool = False  # the matcher must be rebuilt: other sequences exhausted or blocked the grammar
    blocked_since: float = 0.0  # time.monotonic() since which other jobs use the compiled grammar; 0: none

    def has_masks(self, end: int, drafts: tuple[int, ...]) -> bool:
        """Return whether the job, done or not, is for the first `end` tokens of the context and these draft tokens."""
        return self.job is not None and self.end == end and self.drafts[: len(drafts)] == drafts

    def check_limit(self) -> None:
        """Note an error if the masks exceed their time limit."""
        if self.job is not None and self.job.runs_longer_than(LIMIT_S):
            self.error = f"structured_outputs: the tokens that may follow were not known after {LIMIT_S:.0f} s"

    def is_overdue(self) -> bool:
        """Return whether the masks missed their step and are still not computed, or the matcher needs a restart."""
        return self.needs_restart or (self.job is not None and self.job.is_late and not self.job.is_done)

    def restarted(self) -> RunningGrammar:
        """Return a grammar for the same sequence without a matcher or a compiled grammar of other sequences."""
        return RunningGrammar(
            self.sampling,
            isolated_masks_left=ISOLATED_MASKS << self.num_late,
            num_late=min(self.num_late + 1, MAX_DOUBLINGS),
            is_beam=self.is_beam,
            is_alone=True,
        )

    def note_blocked(self) -> None:
        """Discard the job, so that the next step submits a new one: another job uses the compiled grammar."""
        now = time.monotonic()
        self.job = None
        self.blocked_since = self.blocked_since or now
        self.needs_restart = now - self.blocked_since > ABANDON_S

    def note_limit(self) -> None:
        """Note an error if the matcher has reached a limit, or a restart if that was a limit of its lexer.

        A lexer's limits count everything that the lexer has read: other sequences, and tokens without masks. The lexer
        of a restarted grammar reads this sequence alone, with all masks, so its errors depend on the sequence only.
        """
        matcher = self.matcher
        if matcher is None or not matcher.is_error():
            return
        error = matcher.get_error()
        if ITEMS_ERROR in error or self.is_alone:
            self.error = grammar_fault(error)
        else:
            self.needs_restart = True

    def note_late(self) -> None:
        """Isolate the next masks: the last ones missed their step."""
        if self.matcher is not None:  # None: the grammar is still being compiled
            self.isolated_masks_left = ISOLATED_MASKS << self.num_late
            self.num_late = min(self.num_late + 1, MAX_DOUBLINGS)

    def stays_isolated(self) -> bool:
        """Count a mask that was used. Return whether the next mask needs a separate job as well."""
        if self.job is not None and not self.job.is_late:
            self.isolated_masks_left -= 1
        return self.isolated_masks_left > 0

    def first_mask(self) -> bytes | None:
        """Return the next mask if it is known since the grammar was compiled: before the first token."""
        return None if self.compiled is None or self.num_consumed else self.compiled.first_mask

    def accept(self, token_ids: Sequence[int]) -> bool:
        """Advance the matcher over generated tokens. Return whether the grammar allows them."""
        matcher = self.matcher
        assert matcher is not None, "a grammar is compiled before it accepts tokens"
        self.num_consumed += len(token_ids)
        return all(map(matcher.consume_token, token_ids))  # one token per call, because a call holds the GIL

    def replay(self, token_ids: Sequence[int], note_progress: Callable[[], None]) -> bool:
        """Advance the matcher over tokens that were generated before. Return whether the grammar allows them.

        The library makes a limited number of expressions with each mask and the tokens after it. When they are used up,
        a lexer rejects tokens that the grammar allows. A lexer of one sequence computes all masks, as generation did.
        """
        matcher = self.matcher
        assert matcher is not None, "a grammar is compiled before it accepts tokens"
        for index, token_id in enumerate(token_ids):
            if self.is_alone or index % TOKENS_PER_MASK == 0:
                matcher.compute_bitmask()
                note_progress()
                if matcher.is_error():
                    return True  # `note_limit` finds the limit
            if not self.accept((token_id,)):
                return False
        return True

    def fork(self, parent: RunningGrammar, generated: Sequence[int]) -> None:
        """Copy the matcher of the beam before the last token. Does nothing while a job uses that matcher."""
        matcher, compiled, job = parent.matcher, parent.compiled, parent.job
        if matcher is None or compiled is None or job is None or not job.is_done:
            return
        if not compiled.lock.acquire(blocking=False):
            return
        self.compiled, self.matcher = compiled, matcher.deep_copy()
        self.matcher.consume_token(generated[-1])
        compiled.lock.release()
        self.num_consumed = len(generated)
        self.isolated_masks_left = parent.isolated_masks_left if job.is_late else 0

    def forced(self, limit: int) -> tuple[int, ...]:
        """Return up to `limit` of the tokens that the grammar forces next.

        The tokens are computed even for limit 0: the mask needs the first one, and its job would wait for the GIL.
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
        self.changed = threading.Condition()  # notified when a job is done in any thread
        self.num_words = 0  # words of a mask; set with the first grammar
        self._num_cores = num_cores
        self._executor = LLExecutor(num_cores)
        self._lock = threading.Lock()
        self._jobs: deque[MaskJob] = deque()  # the first is being computed

    def run(self, job: MaskJob) -> None:
        """Compute `job` and all jobs queued meanwhile in this thread.

        If another thread is computing, only queue `job`.
        """
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
        """Abandon all jobs if the first exceeds its time limit: a call of the library cannot be interrupted."""
        with self._lock:
            if self._jobs and self._jobs[0].runs_longer_than(ABANDON_S):
                for job in self._jobs:
                    job.is_abandoned = True
                self._executor = LLExecutor(self._num_cores)  # jobs would wait for the old threads
                slow, self._jobs = self._jobs, deque()
                while len(slow) > 1:  # the job's thread must not compute another job
                    slow.pop()

    def compute(self, job: MaskJob, prepare: Callable[[], None] | None = None) -> None:
        """Compute a job in this thread. After an error its only sequence ends, or its several sequences restart."""
        job.note_progress()
        try:
            if prepare is not None:
                prepare()
                job.note_progress()
            job.hold_all()
            job.masks = self._masks(job)
            for running, _, _ in job.parts:
                running.blocked_since = 0.0
                running.note_limit()
        except BaseException as error:  # includes panics of llguidance
            is_known = isinstance(error, QuireError)
            if not is_known:
                _log.error("computing masks failed", error=_shown(error))
            if len(job.parts) > 1:
                job.is_abandoned = True
                job.parts.clear()
                return
            for running, _, _ in job.parts:
                running.error = str(error) if is_known else f"computing the masks failed: {_shown(error)}"
        finally:
            job.release()
        job.parts.clear()  # parts refer to the job: matchers of ended sequences would wait for the garbage collector
        with self.changed:
            job.is_done = True
            self.changed.notify_all()

    def _masks(self, job: MaskJob) -> Any:
        """Return the masks of a job; llguidance computes them without the GIL.

        A single mask is computed in the calling thread: if it never ends, no other job waits for it. After a draft
        token that is not allowed, nothing is masked: the token is not sampled, so later samples are not used.
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


def _shown(error: BaseException) -> str:
    """Return the first line of an error; llguidance's errors have its state and a backtrace on further lines."""
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]:.300}"
