"""The token log: every live request with all its tokens so far, so that a new engine process can go on with it.

Pure: it must not know processes, sockets or clocks other than its own. One invariant: a request in the log is in the
engine, or will be sent to it, and leaves the log with its end.

**After a crash** those that were being computed are suspects: promise 1 makes whatever killed the process happen again
at the same token. So they go back one at a time, each only after the one before it has proved itself: it gained the
tokens of a prefill and of a decoding step, or ended. The rest waits until all are through. If the process crashes
again, only one request was computed that had not proved itself since, the one on trial: it is quarantined, and nobody
else is harmed. Where the process was killed from outside, nobody is suspected, and all go back at once; unless that
happens again and again before anybody gained anything.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from ...scheduler import FinalCounters, Request, RequestUpdate, State
from ..engine import Prefilled

MAX_UNPRODUCTIVE_EXITS = 3  # from outside, in a row, before any request gains a token: then all are suspects
MAX_UNBEGUN_EXITS = 2  # more in a row, and being taken on may be what kills
PROOF_TOKENS = 2  # that a suspect must gain: a replay's first comes of a prefill, only the second of a decoding step


@dataclass(slots=True, eq=False)
class Entry:
    """One request, and what its former lives took."""

    request: Request
    sent: bool = False  # to the engine process that lives now
    begun: float | None = None  # when its computation began in this life
    crash_suspect: bool = False  # it was being computed when a process crashed, and has not proved itself since
    num_gained: int = 0  # tokens in this life
    unbegun_incarnations: int = 0  # in a row, that it was sent to and that ended before its computation began
    incarnations: int = 0  # that have ended
    seconds_in: list[float] = field(default_factory=lambda: [0.0] * len(State))  # of those lives
    incarnation_began: float = 0.0
    lost_tokens: int = 0  # computed in the life before this one
    cancelled: bool = False  # the engine was told, and has not answered yet


class EndedRequests(NamedTuple):
    """Requests that a new process must not have, gone from the log."""

    quarantined: list[Request]
    cancelled: list[Request]


class TokenLog:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._entries: dict[int, Entry] = {}  # in the order in which they were accepted
        self._unsent: deque[Entry] = deque()
        self._suspects: deque[Entry] = deque()
        self._isolated: Entry | None = None
        self._has_gained = False  # anybody, a token or an end, in this life
        self._num_unproductive = 0  # lives in a row

    def __len__(self) -> int:
        return len(self._entries)

    def requests(self) -> list[Request]:
        return [entry.request for entry in self._entries.values()]

    def add(self, request: Request) -> None:
        """One that the engine has accepted."""
        now = self._clock()
        self._entries[request.request_id] = Entry(request, sent=True, incarnation_began=now)

    def forget(self, request_id: int) -> bool:
        """Its user gave it up. Whether the engine has it and must be told."""
        entry = self._entries.pop(request_id, None)
        if entry is None:
            return False
        if not entry.sent:
            (self._suspects if entry.crash_suspect else self._unsent).remove(entry)
        self._clear_suspicion(entry)
        sent = entry.sent
        self._leave(entry)
        return sent

    def cancel(self, request_id: int) -> Request | bool:
        """Its user gave it up and waits for its end: the request, if that is now; else whether to tell the engine."""
        entry = self._entries.get(request_id)
        if entry is None:
            return False
        if entry.sent:
            entry.cancelled = True
            return True
        self.forget(request_id)
        return entry.request

    def expire(self) -> list[Request]:
        """Those whose deadline passed while no engine has them, gone from the log."""
        now = self._clock()
        waiting = [entry.request for entry in self._entries.values() if not entry.sent]
        late = [request for request in waiting if request.spec.deadline is not None and request.spec.deadline <= now]
        for request in late:
            self.forget(request.request_id)
        return late

    def note_begun(self, begun: Iterable[Prefilled]) -> None:
        now = self._clock()
        for request_id, cached_tokens in begun:
            entry = self._entries.get(request_id)
            if entry is not None and entry.begun is None:
                entry.begun = now
                if not entry.incarnations:
                    entry.request.cached_tokens = cached_tokens

    def take(self, update: RequestUpdate) -> bool:
        """Write an update down in its request. Return whether there is one: it may have been given up meanwhile."""
        entry = self._entries.get(update.request_id)
        if entry is None:
            return False
        request = entry.request
        if update.tokens:
            if request.first_token_time is None:
                request.first_token_time = self._clock()
            request.token_ids.extend([token.token_id for token in update.tokens])
            self._has_gained = True
            entry.num_gained += len(update.tokens)
            if entry.num_gained >= PROOF_TOKENS:
                self._clear_suspicion(entry)
        if update.counters is not None:
            self._has_gained = True
            del self._entries[update.request_id]
            self._clear_suspicion(entry)
            _settle(entry, update.counters)
        return True

    def on_process_exit(self, by_others: bool = False) -> EndedRequests:
        """The process died: everybody is to be sent again, but for those that are returned.

        `by_others`: none of them can have been the cause.
        """
        now = self._clock()
        self._num_unproductive = 0 if self._has_gained or not by_others else self._num_unproductive + 1
        self._has_gained = False
        by_others = by_others and self._num_unproductive <= MAX_UNPRODUCTIVE_EXITS
        self._isolated = None
        self._unsent.clear()
        self._suspects.clear()
        ended = EndedRequests([], [])
        for request_id, entry in list(self._entries.items()):
            entry.unbegun_incarnations = entry.unbegun_incarnations + entry.sent if entry.begun is None else 0
            is_there = entry.begun is not None or (entry.sent and entry.unbegun_incarnations >= MAX_UNBEGUN_EXITS)
            is_suspect = is_there and not by_others
            if entry.cancelled or (entry.crash_suspect and is_suspect):
                (ended.cancelled if entry.cancelled else ended.quarantined).append(entry.request)
                del self._entries[request_id]
                self._leave(entry)
                continue
            entry.crash_suspect = entry.crash_suspect or is_suspect
            _end_incarnation(entry, now)
            (self._suspects if entry.crash_suspect else self._unsent).append(entry)
        # A beam search gains no token before its end: nobody shall wait for that behind it.
        self._suspects = deque(sorted(self._suspects, key=lambda entry: entry.request.beam is not None))
        return ended

    @property
    def is_replaying(self) -> bool:
        """Newcomers have to wait: they would be computed beside a suspect."""
        return bool(self._isolated or self._suspects or self._unsent)

    def next_to_send(self) -> list[Request]:
        """Whom the engine may have now; all at once when no suspect is left."""
        if self._isolated is not None:
            return []
        if self._suspects:
            self._isolated = self._suspects.popleft()
            return [self._send(self._isolated)]
        return [self._send(self._unsent.popleft()) for _ in range(len(self._unsent))]

    def _send(self, entry: Entry) -> Request:
        now = self._clock()
        entry.seconds_in[State.PREEMPTED] += now - entry.incarnation_began
        entry.incarnation_began = now
        entry.sent = True
        return entry.request

    def _leave(self, entry: Entry) -> None:
        """It ends without final counters: where its time went, as far as we know."""
        entry.request.recomputed_tokens = entry.lost_tokens
        _end_incarnation(entry, self._clock())
        entry.request.seconds_in = entry.seconds_in

    def _clear_suspicion(self, entry: Entry) -> None:
        entry.crash_suspect = False
        if entry is self._isolated:
            self._isolated = None


def _end_incarnation(entry: Entry, now: float) -> None:
    """What the dead process can no longer say about where the time went."""
    first_token = entry.request.first_token_time
    phases: tuple[tuple[State, float | None], ...]
    if entry.incarnations:
        phases = ((State.PREEMPTED, entry.begun), (State.DECODE, now))
    else:
        phases = ((State.WAITING, entry.begun), (State.PREFILL, first_token), (State.DECODE, now))
    since = entry.incarnation_began
    for state, until in phases:
        until = now if until is None else until
        entry.seconds_in[state] += until - since
        since = until
    entry.lost_tokens = 0 if first_token is None else len(entry.request.token_ids) - 1
    entry.incarnations += 1
    entry.incarnation_began = now
    entry.sent = False
    entry.begun = None
    entry.num_gained = 0


def _settle(entry: Entry, counters: FinalCounters) -> None:
    """The request's counters, over all its lives: waiting for a new process, and in it, is a stall."""
    request, in_last = entry.request, list(counters.seconds_in)
    request.recomputed_tokens = counters.recomputed_tokens
    request.hypotheses = list(counters.hypotheses)
    if not entry.incarnations:
        request.seconds_in = in_last
        request.cached_tokens = counters.cached_tokens
        return
    request.recomputed_tokens += max(0, entry.lost_tokens - counters.cached_tokens)
    in_last[State.PREEMPTED] += in_last[State.WAITING]
    in_last[State.WAITING] = 0.0
    request.seconds_in = [before + last for before, last in zip(entry.seconds_in, in_last, strict=True)]
