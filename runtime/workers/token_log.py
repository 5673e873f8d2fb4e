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

from ...scheduler import Request, RequestUpdate, State
from ..engine import Prefilled
from .engine_link import Account, Update

FRUITLESS_LIVES = 3  # ended from outside before anybody gained a token: then memory may run out of what they compute
MOST_UNBEGUN_LIVES = 2  # more in a row, and being taken on may be what kills
PROOF_TOKENS = 2  # that a suspect must gain: a replay's first comes of a prefill, only the second of a decoding step


@dataclass(slots=True, eq=False)
class Entry:
    """One request, and what its former lives took."""

    request: Request
    sent: bool = False  # to the engine process that lives now
    begun: float | None = None  # when its computation began in this life
    suspect: bool = False  # it was being computed when a process crashed, and has not proved itself since
    num_gained: int = 0  # tokens in this life
    unbegun_lives: int = 0  # in a row, that it was sent to and that ended before its computation began
    lives: int = 0  # that have ended
    seconds_in: list[float] = field(default_factory=lambda: [0.0] * len(State))  # of those lives
    life_began: float = 0.0
    lost_tokens: int = 0  # computed in the life before this one
    cancelled: bool = False  # the engine was told, and has not answered yet


class Buried(NamedTuple):
    """Requests that a new process must not have, gone from the log."""

    quarantined: list[Request]
    cancelled: list[Request]


class TokenLog:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._entries: dict[int, Entry] = {}  # in the order in which they were accepted
        self._unsent: deque[Entry] = deque()
        self._suspects: deque[Entry] = deque()
        self._on_trial: Entry | None = None
        self._has_gained = False  # anybody, a token or an end, in this life
        self._num_fruitless = 0  # lives in a row

    def __len__(self) -> int:
        return len(self._entries)

    def requests(self) -> list[Request]:
        return [entry.request for entry in self._entries.values()]

    def add(self, request: Request) -> None:
        """One that the engine has accepted."""
        now = self._clock()
        self._entries[request.request_id] = Entry(request, sent=True, life_began=now)

    def forget(self, request_id: int) -> bool:
        """Its user gave it up. Whether the engine has it and must be told."""
        entry = self._entries.pop(request_id, None)
        if entry is None:
            return False
        if not entry.sent:
            (self._suspects if entry.suspect else self._unsent).remove(entry)
        self._pass_trial(entry)
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
        late = [request for request in waiting if request.deadline is not None and request.deadline <= now]
        for request in late:
            self.forget(request.request_id)
        return late

    def note_begun(self, begun: Iterable[Prefilled]) -> None:
        now = self._clock()
        for request_id, cached_tokens in begun:
            entry = self._entries.get(request_id)
            if entry is not None and entry.begun is None:
                entry.begun = now
                if not entry.lives:
                    entry.request.cached_tokens = cached_tokens

    def take(self, update: Update) -> RequestUpdate | None:
        """Write an update down, as the scheduler's own would read. None if the request was given up meanwhile."""
        entry = self._entries.get(update.request_id)
        if entry is None:
            return None
        request = entry.request
        if update.tokens:
            if request.first_token_time is None:
                request.first_token_time = self._clock()
            request.token_ids.extend([token.token_id for token in update.tokens])
            self._has_gained = True
            entry.num_gained += len(update.tokens)
            if entry.num_gained >= PROOF_TOKENS:
                self._pass_trial(entry)
        if update.account is not None:
            self._has_gained = True
            del self._entries[update.request_id]
            self._pass_trial(entry)
            _settle(entry, update.account)
        return RequestUpdate(request, update.tokens, update.finish_reason, update.error)

    def bury(self, by_others: bool = False) -> Buried:
        """The process died: everybody is to be sent again, but for those that are returned.

        `by_others`: none of them can have been the cause.
        """
        now = self._clock()
        self._num_fruitless = 0 if self._has_gained or not by_others else self._num_fruitless + 1
        self._has_gained = False
        by_others = by_others and self._num_fruitless <= FRUITLESS_LIVES
        self._on_trial = None
        self._unsent.clear()
        self._suspects.clear()
        buried = Buried([], [])
        for request_id, entry in list(self._entries.items()):
            entry.unbegun_lives = entry.unbegun_lives + entry.sent if entry.begun is None else 0
            is_there = entry.begun is not None or (entry.sent and entry.unbegun_lives >= MOST_UNBEGUN_LIVES)
            is_accused = is_there and not by_others
            if entry.cancelled or (entry.suspect and is_accused):
                (buried.cancelled if entry.cancelled else buried.quarantined).append(entry.request)
                del self._entries[request_id]
                self._leave(entry)
                continue
            entry.suspect = entry.suspect or is_accused
            _end_life(entry, now)
            (self._suspects if entry.suspect else self._unsent).append(entry)
        # A beam search gains no token before its end: nobody shall wait for that behind it.
        self._suspects = deque(sorted(self._suspects, key=lambda entry: entry.request.beam is not None))
        return buried

    @property
    def is_replaying(self) -> bool:
        """Newcomers have to wait: they would be computed beside a suspect."""
        return bool(self._on_trial or self._suspects or self._unsent)

    def next_to_send(self) -> list[Request]:
        """Whom the engine may have now; all at once when no suspect is left."""
        if self._on_trial is not None:
            return []
        if self._suspects:
            self._on_trial = self._suspects.popleft()
            return [self._send(self._on_trial)]
        return [self._send(self._unsent.popleft()) for _ in range(len(self._unsent))]

    def _send(self, entry: Entry) -> Request:
        now = self._clock()
        entry.seconds_in[State.PREEMPTED] += now - entry.life_began
        entry.life_began = now
        entry.sent = True
        return entry.request

    def _leave(self, entry: Entry) -> None:
        """It ends without an account: where its time went, as far as we know."""
        entry.request.recomputed_tokens = entry.lost_tokens
        _end_life(entry, self._clock())
        entry.request.seconds_in = entry.seconds_in

    def _pass_trial(self, entry: Entry) -> None:
        entry.suspect = False
        if entry is self._on_trial:
            self._on_trial = None


def _end_life(entry: Entry, now: float) -> None:
    """What the dead process can no longer say about where the time went."""
    first_token = entry.request.first_token_time
    phases: tuple[tuple[State, float | None], ...]
    if entry.lives:
        phases = ((State.PREEMPTED, entry.begun), (State.DECODE, now))
    else:
        phases = ((State.WAITING, entry.begun), (State.PREFILL, first_token), (State.DECODE, now))
    since = entry.life_began
    for state, until in phases:
        until = now if until is None else until
        entry.seconds_in[state] += until - since
        since = until
    entry.lost_tokens = 0 if first_token is None else len(entry.request.token_ids) - 1
    entry.lives += 1
    entry.life_began = now
    entry.sent = False
    entry.begun = None
    entry.num_gained = 0


def _settle(entry: Entry, account: Account) -> None:
    """The request's counters, over all its lives: waiting for a new process, and in it, is a stall."""
    request, in_last = entry.request, list(account.seconds_in)
    request.recomputed_tokens = account.recomputed_tokens
    request.hypotheses = list(account.hypotheses)
    if not entry.lives:
        request.seconds_in = in_last
        request.cached_tokens = account.cached_tokens
        return
    request.recomputed_tokens += max(0, entry.lost_tokens - account.cached_tokens)
    in_last[State.PREEMPTED] += in_last[State.WAITING]
    in_last[State.WAITING] = 0.0
    request.seconds_in = [before + last for before, last in zip(entry.seconds_in, in_last, strict=True)]
