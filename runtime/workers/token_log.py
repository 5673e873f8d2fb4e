"""Every accepted request, with its tokens so far, so that the next engine process can continue where one exited.

Pure: it must not import processes or sockets. A request leaves the log when it ends.

**After a crash** the requests that were being computed are suspects: a request's tokens do not depend on others, so the
cause of the crash occurs again at the same token. Suspects are replayed one at a time. The next one is sent when the
one before has gained the token of its prefill and one of a decoding step, or has ended; all other requests wait. If the
process crashes again, only the isolated request was computed without gaining tokens: it alone is quarantined. After a
process was killed from outside no request is a suspect and all are replayed together, unless that happens several times
before any request gains a token.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from ...scheduler import FinalCounters, QueuedRequest, Request, RequestUpdate, State
from ..engine import Prefilled

MAX_UNPRODUCTIVE_EXITS = 3  # consecutive external exits before any request gained a token; more count as crashes
MAX_UNBEGUN_EXITS = 2  # consecutive exits with a request that was never computed; then it becomes a suspect
MAX_LOST_HOSTS = 3  # consecutive hosts or engine processes lost while computing one request, before it gained tokens
MAX_UNBEGUN_HOSTS = 16  # consecutive lost hosts that never computed their request: all hosts may fall silent at once
MIN_GAINED_TOKENS = 2  # tokens that clear a suspect: the replay's prefill yields the first, decoding the second


@dataclass(slots=True, eq=False)
class LoggedRequest:
    """A request, with the work of the current process and of earlier ones (incarnations)."""

    request: QueuedRequest
    incarnation_began: float  # time when the current process got the request, or when the last one exited
    is_sent: bool = False  # the current process has it
    is_cancelled: bool = False  # a CancelRequest was sent; the current process has not reported the end yet
    begun_at: float | None = None  # time when the current process began to compute it
    num_gained: int = 0  # tokens from the current process
    crash_suspect: bool = False  # a process crashed while it computed the request, which has gained no tokens since
    num_unbegun_exits: int = 0  # see MAX_UNBEGUN_EXITS, and for hosts MAX_UNBEGUN_HOSTS
    num_lost_hosts: int = 0  # see MAX_LOST_HOSTS
    num_incarnations: int = 0  # earlier processes
    seconds_in: list[float] = field(default_factory=lambda: [0.0] * len(State))  # seconds in earlier processes
    cached_tokens: int = 0  # found in the prefix cache when the first process began to compute it
    lost_tokens: int = 0  # tokens whose keys and values were lost with the last process
    generated: list[int] = field(init=False, repr=False)  # output tokens so far
    first_token_time: float | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.generated = [*self.request.generated] if isinstance(self.request, Request) else []

    def known_counters(self) -> FinalCounters:
        """Return the known counters of a request without a final report."""
        return FinalCounters(tuple(self.seconds_in), self.cached_tokens)


class ClosedRequest(NamedTuple):
    """A request that has left the log before its process reported an end."""

    request_id: int
    was_sent: bool  # the process has it
    counters: FinalCounters  # counters known to the log


class EndedRequests(NamedTuple):
    """Requests that must not be replayed."""

    quarantined: list[ClosedRequest]
    cancelled: list[ClosedRequest]


class TokenLog:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._entries: dict[int, LoggedRequest] = {}  # id -> request, in the order of acceptance
        self._unsent: deque[LoggedRequest] = deque()
        self._suspects: deque[LoggedRequest] = deque()  # unsent as well
        self._isolated: LoggedRequest | None = None  # the suspect that the process has
        self._has_gained = False  # whether any request gained a token or ended in the current process
        self._num_unproductive = 0  # see MAX_UNPRODUCTIVE_EXITS

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, request: QueuedRequest) -> None:
        """Add a request that the process has accepted."""
        self._entries[request.request_id] = LoggedRequest(request, self._clock(), is_sent=True)

    def adopt(self, entry: LoggedRequest) -> None:
        """Add a request that another log gave up, or another machine; it is sent as a replay."""
        self._entries[entry.request.request_id] = entry
        self._unsent.append(entry)

    def give_up_unsent(self) -> list[LoggedRequest]:
        """Remove and return unsent requests, except crash suspects and requests at the lost-host limit."""
        given_up = [entry for entry in self._unsent if entry.num_lost_hosts < MAX_LOST_HOSTS]
        self._unsent = deque([entry for entry in self._unsent if entry.num_lost_hosts >= MAX_LOST_HOSTS])
        for entry in given_up:
            del self._entries[entry.request.request_id]
        return given_up

    def sent(self, request_id: int) -> LoggedRequest | None:
        """Return a request that the process has; None for another one."""
        entry = self._entries.get(request_id)
        return entry if entry is not None and entry.is_sent else None

    def take_back(self, request_ids: Iterable[int]) -> list[int]:
        """Mark the requests as unsent, because their host has no engine process. Return the ids that it has to drop.

        A request that would have lost MAX_LOST_HOSTS stays there.
        """
        taken = []
        for request_id in request_ids:
            entry = self.sent(request_id)
            if entry is None or entry.is_cancelled or entry.num_lost_hosts + 1 >= MAX_LOST_HOSTS:
                continue
            entry.num_lost_hosts += 1
            _end_incarnation(entry, self._clock())
            self._unsent.append(entry)
            taken.append(request_id)
        return taken

    def give_up(self, request_id: int) -> LoggedRequest | None:
        """Remove and return a request that its process cannot continue; None if it has no such request."""
        entry = self.sent(request_id)
        if entry is not None:
            del self._entries[request_id]
            _end_incarnation(entry, self._clock())
        return entry

    def forget(self, request_id: int) -> ClosedRequest | None:
        """Remove and return a request; None for an unknown one."""
        entry = self._entries.pop(request_id, None)
        if entry is None:
            return None
        if not entry.is_sent:
            (self._suspects if entry.crash_suspect else self._unsent).remove(entry)
        self._clear_suspicion(entry)
        return self._close(entry)

    def forget_all(self) -> list[ClosedRequest]:
        """Remove and return every request."""
        return self._forget_each(list(self._entries))

    def cancel(self, request_id: int) -> bool:
        """Note that the process is to end a request. Return False if it does not have the request."""
        entry = self.sent(request_id)
        if entry is None:
            return False
        entry.is_cancelled = True
        return True

    def expire(self) -> list[ClosedRequest]:
        """Remove and return the requests that no process has and whose deadline has passed."""
        now = self._clock()
        late = [
            entry.request.request_id
            for entry in self._entries.values()
            if not entry.is_sent and (deadline := entry.request.spec.deadline) is not None and deadline <= now
        ]
        return self._forget_each(late)

    def note_begun(self, begun: Iterable[Prefilled]) -> None:
        """Record requests that the process is about to compute for the first time."""
        now = self._clock()
        for request_id, cached_tokens in begun:
            entry = self.sent(request_id)
            if entry is not None and entry.begun_at is None:
                entry.begun_at = now
                if not entry.num_incarnations:
                    entry.cached_tokens = cached_tokens

    def record(self, update: RequestUpdate) -> RequestUpdate | None:
        """Record the tokens and the end of a request. Return None if the process does not have it.

        Else return the update, at the end with the counters of all processes.
        """
        entry = self._entries.get(update.request_id)
        if entry is None or not entry.is_sent:
            return None
        tokens = update.tokens
        if tokens:
            if entry.first_token_time is None:
                entry.first_token_time = self._clock()
            entry.generated += [token.token_id for token in tokens]
            self._has_gained = True
            entry.num_gained += len(tokens)
            if entry.num_gained >= MIN_GAINED_TOKENS:
                entry.num_lost_hosts = 0
                if entry.crash_suspect:
                    self._clear_suspicion(entry)
        if update.counters is None:
            return update
        self._has_gained = True
        del self._entries[update.request_id]
        self._clear_suspicion(entry)
        return update._replace(counters=_total_counters(entry, update.counters))

    def on_process_exit(self, from_outside: bool = False) -> EndedRequests:
        """Prepare every request to be replayed, except the returned ones.

        `from_outside`: the process was killed or stopped by another one.
        """
        now = self._clock()
        self._num_unproductive = self._num_unproductive + 1 if from_outside and not self._has_gained else 0
        is_crash = not from_outside or self._num_unproductive > MAX_UNPRODUCTIVE_EXITS
        self._has_gained = False
        self._isolated = None
        self._unsent.clear()
        self._suspects.clear()
        ended = EndedRequests([], [])
        for request_id, entry in list(self._entries.items()):
            entry.num_unbegun_exits = entry.num_unbegun_exits + entry.is_sent if entry.begun_at is None else 0
            was_taken_on = entry.is_sent and entry.num_unbegun_exits >= MAX_UNBEGUN_EXITS
            may_be_cause = is_crash and (entry.begun_at is not None or was_taken_on)
            if entry.is_cancelled or (entry.crash_suspect and may_be_cause):
                del self._entries[request_id]
                (ended.cancelled if entry.is_cancelled else ended.quarantined).append(self._close(entry))
                continue
            entry.crash_suspect = entry.crash_suspect or may_be_cause
            entry.num_lost_hosts += entry.is_sent
            _end_incarnation(entry, now)
            (self._suspects if entry.crash_suspect else self._unsent).append(entry)
        # A beam search gains no token before its end: it goes last, so that no other suspect waits for that.
        self._suspects = deque(sorted(self._suspects, key=_is_beam_search))
        return ended

    def on_host_lost(self, is_blameless: bool) -> EndedRequests:
        """Prepare every request to be replayed at another host, except the returned ones.

        The cause among the requests is unknown, and a host isolates its own suspects. A request that loses
        MAX_LOST_HOSTS, or MAX_UNBEGUN_HOSTS before they computed it, is quarantined. `is_blameless`: the host had
        announced its end.
        """
        now = self._clock()
        self._unsent.clear()
        ended = EndedRequests([], [])
        for request_id, entry in list(self._entries.items()):
            has_begun = entry.begun_at is not None
            is_lost = entry.is_sent and not is_blameless
            entry.num_lost_hosts += is_lost and has_begun
            entry.num_unbegun_exits = 0 if has_begun else entry.num_unbegun_exits + is_lost
            is_quarantined = entry.num_lost_hosts >= MAX_LOST_HOSTS or entry.num_unbegun_exits >= MAX_UNBEGUN_HOSTS
            if entry.is_cancelled or is_quarantined:
                del self._entries[request_id]
                (ended.cancelled if entry.is_cancelled else ended.quarantined).append(self._close(entry))
                continue
            _end_incarnation(entry, now)
            self._unsent.append(entry)
        return ended

    @property
    def unsent_ids(self) -> list[int]:
        """Unsent requests that are not crash suspects."""
        return [entry.request.request_id for entry in self._unsent]

    @property
    def is_replaying(self) -> bool:
        """Whether new requests have to wait, because they would be computed together with a suspect."""
        return bool(self._isolated or self._suspects or self._unsent)

    def next_to_send(self) -> list[LoggedRequest]:
        """Return the requests that the process may have now: the next suspect alone, or all when none is left."""
        if self._isolated is not None:
            return []
        if self._suspects:
            self._isolated = self._suspects.popleft()
            return [self._send(self._isolated)]
        return [self._send(self._unsent.popleft()) for _ in range(len(self._unsent))]

    def _send(self, entry: LoggedRequest) -> LoggedRequest:
        now = self._clock()
        entry.seconds_in[State.PREEMPTED] += now - entry.incarnation_began
        entry.incarnation_began = now
        entry.is_sent = True
        return entry

    def _forget_each(self, request_ids: Iterable[int]) -> list[ClosedRequest]:
        return [closed for request_id in request_ids if (closed := self.forget(request_id)) is not None]

    def _close(self, entry: LoggedRequest) -> ClosedRequest:
        """Return a request that ends without final counters."""
        was_sent = entry.is_sent
        recomputed_tokens = entry.lost_tokens  # earlier loss only: tokens of this process were not recomputed
        _end_incarnation(entry, self._clock())
        counters = entry.known_counters()._replace(recomputed_tokens=recomputed_tokens)
        return ClosedRequest(entry.request.request_id, was_sent, counters)

    def _clear_suspicion(self, entry: LoggedRequest) -> None:
        entry.crash_suspect = False
        if entry is self._isolated:
            self._isolated = None


def _is_beam_search(entry: LoggedRequest) -> bool:
    return isinstance(entry.request, Request) and entry.request.beam is not None


def _end_incarnation(entry: LoggedRequest, now: float) -> None:
    """Add up the seconds that the lost process can no longer report."""
    request = entry.request
    first_token_time = entry.first_token_time
    phases: tuple[tuple[State, float | None], ...]  # each with its end
    if entry.num_incarnations:
        phases = ((State.PREEMPTED, entry.begun_at), (State.DECODE, now))
    else:
        phases = ((State.WAITING, entry.begun_at), (State.PREFILL, first_token_time), (State.DECODE, now))
    since = entry.incarnation_began
    for state, end in phases:
        until = now if end is None else end
        entry.seconds_in[state] += until - since
        since = until
    if isinstance(request, Request) and first_token_time is not None:
        entry.lost_tokens = request.num_prompt_tokens + len(entry.generated) - 1
    entry.num_incarnations += 1
    entry.incarnation_began = now
    entry.is_sent = False
    entry.begun_at = None
    entry.num_gained = 0


def _total_counters(entry: LoggedRequest, last: FinalCounters) -> FinalCounters:
    """Return a request's counters over all incarnations. Waiting for a later process, or in it, counts as a stall."""
    if not entry.num_incarnations:
        return last
    former = list(entry.seconds_in)
    this = list(last.seconds_in)
    this[State.PREEMPTED] += this[State.WAITING]
    this[State.WAITING] = 0.0
    return FinalCounters(
        tuple([before + now for before, now in zip(former, this, strict=True)]),
        entry.cached_tokens,
        last.recomputed_tokens + max(0, entry.lost_tokens - last.cached_tokens),
        last.hypotheses,
    )
