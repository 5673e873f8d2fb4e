"""What outlives its connection: resumable requests, by session and id, and the outcomes of idempotency keys.

It must not know frames or sockets. One invariant: a running stream lives while somebody follows it or may still resume
it, an ended one while it may be resumed or its key is known, and what is kept takes at most `max_kept_bytes`.

Over that limit the ended streams that nobody follows go first, longest unused first, then the one that grows is kept no
longer: its followers go on, nobody else can join.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from ..common.config import ServerConfig
from ..common.errors import InvalidRequest, QuireError, RequestNotFound
from ..engine.facade import GenerateRequest
from .live import LiveRequest, LiveRequests
from .monitoring import CancelCause
from .replay_buffer import ReplayBuffer, Subscriber
from .tenants import Tenant

CLAIM_BYTES = 1024  # of a request's id that may be resumed: measured, with a session of its own
SESSION_BYTES = 18  # of randomness: its name is all that RESUME needs to know

_Session = tuple[str, str]  # tenant, name
_Key = tuple[str, str]  # tenant, idempotency key


@dataclass(eq=False, slots=True)
class _ResumeEntry:
    """That a request may be resumed."""

    session: _Session
    request_id: int
    stream: ReplayBuffer
    follower: Subscriber | None
    expiry: asyncio.TimerHandle | None = None  # while nobody follows
    was_cut: bool = False  # its client was lost before the end


@dataclass(eq=False, slots=True)
class _IdempotencyEntry:
    """What a key stands for."""

    key: _Key
    request_digest: bytes
    stream: ReplayBuffer
    expiry: asyncio.TimerHandle | None = None  # once it has ended


@dataclass(eq=False, slots=True)
class _Reasons:
    """Why a stream is kept."""

    claims: set[_ResumeEntry] = field(default_factory=set)
    outcome: _IdempotencyEntry | None = None


class ResumeIndex:
    """Of one server."""

    def __init__(self, requests: LiveRequests, config: ServerConfig) -> None:
        self._requests = requests
        self._resume_timeout_s = config.resume_timeout_ms / 1000
        self._key_window_s = config.idempotency_window_ms / 1000
        self._max_bytes = config.max_kept_bytes
        self._num_bytes = 0
        self._streams: dict[ReplayBuffer, _Reasons] = {}
        self._unused: dict[ReplayBuffer, None] = {}  # ended and followed by nobody, longest so first
        self._sessions: dict[_Session, dict[int, _ResumeEntry]] = {}
        self._outcomes: dict[_Key, _IdempotencyEntry] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def tasks(self) -> set[asyncio.Task[None]]:
        """Of the streams that still run."""
        return set(self._tasks)

    @property
    def is_awaited(self) -> bool:
        """Whether somebody who has not seen the end may yet come back for it."""
        claims = (claim for reasons in self._streams.values() for claim in reasons.claims)
        return any(claim.was_cut and claim.follower is None for claim in claims)

    def session(self, tenant: str, wanted: str | None) -> str:
        """The name of a connection's session: the one wanted, if this tenant has something to resume there."""
        if wanted is not None and (tenant, wanted) in self._sessions:
            return wanted
        return secrets.token_urlsafe(SESSION_BYTES)

    def begin(
        self,
        tenant: Tenant,
        request_id: int,
        request: GenerateRequest,
        *,
        session: str | None,
        idempotency_key: str | None,
    ) -> Subscriber:
        """Follow a new request, or the one that had this key before. `session`: where it may be resumed.

        Raises InvalidRequest when the key's request was another one, and what `LiveRequests.submit` raises, or
        `LiveRequests.count_replay`.
        """
        stream = None
        if idempotency_key is not None:
            stream = self._known((tenant.name, idempotency_key), request)
            if stream is not None:
                self._requests.count_replay(tenant)
        if stream is None:
            stream = self._keep(self._requests.submit(tenant, request_id, request))
            if idempotency_key is not None:
                self._remember((tenant.name, idempotency_key), request, stream)
        follower = stream.follow()
        self._unused.pop(stream, None)
        if session is not None:
            self._claim((tenant.name, session), request_id, follower)
        self._limit(follower.stream)
        return follower

    def resume(self, tenant: str, session: str, request_id: int, next_index: int) -> Subscriber:
        """Follow from after `next_index` tokens; whoever followed under this id before is stopped.

        Raises RequestNotFound, or InvalidRequest for an index at which no chunk ended.
        """
        claim = self._sessions.get((tenant, session), {}).get(request_id)
        if claim is None:
            raise RequestNotFound("nothing to resume under this id: unknown, over for too long, or somebody else's")
        follower = claim.stream.follow(next_index)
        self._unused.pop(claim.stream, None)
        if claim.follower is not None:
            claim.follower.stop("this request was resumed on another connection")
        if claim.expiry is not None:
            claim.expiry.cancel()
        claim.follower, claim.expiry = follower, None
        return follower

    def fail(self, error: QuireError) -> None:
        """End all that still runs with `error`."""
        for stream in list(self._streams):
            if not stream.has_ended:
                stream.live.cancel("shutdown")
                stream.fail(error)

    async def close(self) -> None:
        """Let go of everything."""
        for stream in list(self._streams):
            self._give_up(stream)
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    # Keeping

    def _keep(self, live: LiveRequest) -> ReplayBuffer:
        stream = ReplayBuffer(live, self)
        self._streams[stream] = _Reasons()
        self._num_bytes += stream.num_bytes
        self._tasks.add(stream.task)
        stream.task.add_done_callback(self._tasks.discard)
        return stream

    def _claim(self, session: _Session, request_id: int, follower: Subscriber) -> None:
        """An id used again: its earlier request can be resumed no more."""
        if (earlier := self._sessions.get(session, {}).get(request_id)) is not None:
            self._expire(earlier)
        claim = _ResumeEntry(session, request_id, follower.stream, follower)
        self._streams[follower.stream].claims.add(claim)
        self._count(follower.stream, CLAIM_BYTES)
        self._sessions.setdefault(session, {})[request_id] = claim

    def _known(self, key: _Key, request: GenerateRequest) -> ReplayBuffer | None:
        outcome = self._outcomes.get(key)
        if outcome is None or outcome.stream.live.is_cancelled:
            return None
        if outcome.request_digest != _digest(request):
            raise InvalidRequest("this idempotency key was used for another request; take a fresh key")
        return outcome.stream

    def _remember(self, key: _Key, request: GenerateRequest, stream: ReplayBuffer) -> None:
        if (cancelled := self._outcomes.get(key)) is not None:
            self._forget(cancelled)
        outcome = self._outcomes[key] = _IdempotencyEntry(key, _digest(request), stream)
        self._streams[stream].outcome = outcome

    # What streams tell their keeper

    def on_growth(self, stream: ReplayBuffer, num_bytes: int) -> None:
        if stream in self._streams:
            self._count(stream, num_bytes)
            self._limit(stream)

    def on_end(self, stream: ReplayBuffer) -> None:
        """Only what finished is an outcome; after anything else, a retry is a new attempt."""
        reasons = self._streams.get(stream, _Reasons())
        if (outcome := reasons.outcome) is not None:
            if stream.finish_reason in ("stop", "length"):
                outcome.expiry = _later(self._key_window_s, self._forget, outcome)
            else:
                self._forget(outcome)
        self._settle(stream)

    def on_cancelled(self, follower: Subscriber, cause: CancelCause) -> None:
        stream = follower.stream
        if (claim := self._claim_of(follower)) is not None:
            self._drop(claim)
        if len(stream.followers) > 1 or self._claims(stream):
            follower.stop("the client cancelled; others go on with this stream")
        elif not stream.has_ended:
            stream.live.cancel(cause)

    def on_left(self, follower: Subscriber, cause: CancelCause) -> None:
        stream = follower.stream
        if (claim := self._claim_of(follower)) is not None:
            claim.follower, claim.was_cut = None, follower.was_cut
            claim.expiry = _later(self._resume_timeout_s, self._expire, claim)
        self._settle(stream, cause)

    # Letting go

    def _limit(self, grown: ReplayBuffer) -> None:
        while self._num_bytes > self._max_bytes and self._unused:
            self._give_up(next(iter(self._unused)))
        if self._num_bytes > self._max_bytes:
            self._give_up(grown)

    def _settle(self, stream: ReplayBuffer, cause: CancelCause = "disconnect") -> None:
        """Cancel what nobody waits for, and let go of what nobody can ask for."""
        if stream.followers:
            return
        if not stream.has_ended:
            if not self._claims(stream):
                stream.live.cancel(cause)  # its end comes here again
        elif (reasons := self._streams.get(stream)) is not None:
            if reasons.claims or reasons.outcome is not None:
                self._unused[stream] = None
            else:
                self._release(stream)

    def _give_up(self, stream: ReplayBuffer) -> None:
        """Nobody can ask for it any more; who follows it goes on."""
        reasons = self._streams[stream]
        for claim in list(reasons.claims):
            self._drop(claim)
        if reasons.outcome is not None:
            self._forget(reasons.outcome)
        self._release(stream)
        stream.forget()
        self._settle(stream)

    def _release(self, stream: ReplayBuffer) -> None:
        if self._streams.pop(stream, None) is not None:
            self._num_bytes -= stream.num_bytes
            self._unused.pop(stream, None)

    def _expire(self, claim: _ResumeEntry) -> None:
        self._drop(claim)
        self._settle(claim.stream)

    def _drop(self, claim: _ResumeEntry) -> None:
        if claim.expiry is not None:
            claim.expiry.cancel()
        self._streams[claim.stream].claims.discard(claim)
        self._count(claim.stream, -CLAIM_BYTES)
        claims = self._sessions[claim.session]
        del claims[claim.request_id]
        if not claims:
            del self._sessions[claim.session]

    def _forget(self, outcome: _IdempotencyEntry) -> None:
        if outcome.expiry is not None:
            outcome.expiry.cancel()
        del self._outcomes[outcome.key]
        self._streams[outcome.stream].outcome = None
        self._settle(outcome.stream)

    def _count(self, stream: ReplayBuffer, num_bytes: int) -> None:
        stream.num_bytes += num_bytes
        self._num_bytes += num_bytes

    def _claims(self, stream: ReplayBuffer) -> set[_ResumeEntry]:
        reasons = self._streams.get(stream)
        return set() if reasons is None else reasons.claims

    def _claim_of(self, follower: Subscriber) -> _ResumeEntry | None:
        return next((claim for claim in self._claims(follower.stream) if claim.follower is follower), None)


def _digest(request: GenerateRequest) -> bytes:
    """Of what decides a request's outcome; its prompt may be long, and is not kept."""
    return hashlib.sha256(msgspec.msgpack.encode((request.prompt, request.messages, request.sampling_params))).digest()


def _later(delay_s: float, callback: Callable[..., None], *arguments: object) -> asyncio.TimerHandle:
    return asyncio.get_running_loop().call_later(delay_s, callback, *arguments)
