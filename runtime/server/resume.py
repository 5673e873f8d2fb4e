"""What outlives its connection: resumable requests, by session and id, and the outcomes of idempotency keys.

A running request lives while a connection reads it or may resume it; an ended one while it may be resumed or its key is
known. Must not import frames or sockets.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import Callable

import msgspec

from ..common.config import ServerConfig
from ..common.errors import Cancelled, InvalidRequest, QuireError, RequestNotFound
from ..engine.facade import GenerateRequest
from .live_requests import LiveRequests
from .monitoring import CancelCause
from .replay_buffer import IdempotencyEntry, IdempotencyKey, ReplayBuffer, ResumeEntry, Session, Subscriber
from .tenants import Tenant

SESSION_BYTES = 18  # of randomness: a session's name is all that RESUME needs to know

OnChange = Callable[[ReplayBuffer], None]


class ResumeIndex:
    """Finds a request that may be resumed by its session and id."""

    def __init__(self, timeout_s: float, on_change: OnChange) -> None:
        self._timeout_s = timeout_s
        self._on_change = on_change
        self._sessions: dict[Session, dict[int, ResumeEntry]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._sessions.values()))

    @property
    def awaits_a_client(self) -> bool:
        """Whether a client that was lost before the end may yet resume."""
        entries = (entry for session in self._sessions.values() for entry in session.values())
        return any(entry.was_cut and entry.subscriber is None for entry in entries)

    def session_name(self, tenant: str, wanted: str | None) -> str:
        """Return `wanted` if this tenant can resume a request there, else the name of a new session."""
        if wanted is not None and (tenant, wanted) in self._sessions:
            return wanted
        return secrets.token_urlsafe(SESSION_BYTES)

    def add(self, session: Session, request_id: int, subscriber: Subscriber) -> None:
        """Make the subscriber's request resumable; it replaces an earlier request with the same id."""
        if (earlier := self._sessions.get(session, {}).get(request_id)) is not None:
            self.remove(earlier)
        entry = ResumeEntry(session, request_id, subscriber.buffer, subscriber)
        self._sessions.setdefault(session, {})[request_id] = entry
        entry.buffer.resume_entries.add(entry)
        self._on_change(entry.buffer)

    def find(self, session: Session, request_id: int) -> ResumeEntry:
        """Raise RequestNotFound when there is nothing to resume."""
        entry = self._sessions.get(session, {}).get(request_id)
        if entry is None:
            raise RequestNotFound(
                "there is nothing to resume under this id: it is unknown, expired or of another tenant"
            )
        return entry

    def entry_of(self, subscriber: Subscriber) -> ResumeEntry | None:
        """Return the entry whose present reader `subscriber` is."""
        return next((entry for entry in subscriber.buffer.resume_entries if entry.subscriber is subscriber), None)

    def attach(self, entry: ResumeEntry, subscriber: Subscriber) -> None:
        """Hand the request to `subscriber`; the connection that reads it now loses it."""
        if entry.subscriber is not None:
            entry.subscriber.stop(Cancelled("this request was resumed on another connection"))
        if entry.expiry is not None:
            entry.expiry.cancel()
        entry.subscriber, entry.expiry = subscriber, None

    def detach(self, entry: ResumeEntry) -> None:
        """Wait for a client for the resume timeout, now that the subscriber has ended."""
        assert entry.subscriber is not None, "attached before"
        entry.was_cut, entry.subscriber = entry.subscriber.was_cut, None
        entry.expiry = asyncio.get_running_loop().call_later(self._timeout_s, self.remove, entry)

    def remove(self, entry: ResumeEntry) -> None:
        if entry.expiry is not None:
            entry.expiry.cancel()
        entry.buffer.resume_entries.discard(entry)
        session = self._sessions[entry.session]
        del session[entry.request_id]
        if not session:
            del self._sessions[entry.session]
        self._on_change(entry.buffer)


class IdempotencyIndex:
    """Finds the request that had an idempotency key before, while it runs and for a time after it has finished."""

    def __init__(self, window_s: float, on_change: OnChange) -> None:
        self._window_s = window_s
        self._on_change = on_change
        self._entries: dict[IdempotencyKey, IdempotencyEntry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, key: IdempotencyKey, request: GenerateRequest) -> ReplayBuffer | None:
        """Return what answers `request`. Raises InvalidRequest when the key was used for another request."""
        entry = self._entries.get(key)
        if entry is None or entry.buffer.request.is_cancelled:
            return None
        if entry.request_digest != _digest(request):
            raise InvalidRequest("this idempotency key was used for another request; take a fresh key")
        return entry.buffer

    def add(self, key: IdempotencyKey, request: GenerateRequest, buffer: ReplayBuffer) -> None:
        if (cancelled := self._entries.get(key)) is not None:
            self.remove(cancelled)
        self._entries[key] = buffer.idempotency_entry = IdempotencyEntry(key, _digest(request), buffer)

    def on_end(self, entry: IdempotencyEntry) -> None:
        """Remember a finished request for the window. After anything else, a retry is a new attempt."""
        if entry.buffer.finish_reason in ("stop", "length"):
            entry.expiry = asyncio.get_running_loop().call_later(self._window_s, self.remove, entry)
        else:
            self.remove(entry)

    def remove(self, entry: IdempotencyEntry) -> None:
        if entry.expiry is not None:
            entry.expiry.cancel()
        entry.buffer.idempotency_entry = None
        del self._entries[entry.key]
        self._on_change(entry.buffer)


class ReplayStore:
    """The replay buffers of one server. Implements `replay_buffer.Owner`.

    Together they take at most `max_kept_bytes`. Above the limit, ended buffers without readers are dropped, least
    recently used first; then the buffer that is growing: its subscribers go on, and no other can join.
    """

    def __init__(self, requests: LiveRequests, config: ServerConfig) -> None:
        self.resume_index = ResumeIndex(config.resume_timeout_ms / 1000, self.on_change)
        self.idempotency_index = IdempotencyIndex(config.idempotency_window_ms / 1000, self.on_change)
        self.num_bytes = 0
        self._requests = requests
        self._max_bytes = config.max_kept_bytes
        self._buffers: dict[ReplayBuffer, int] = {}  # with the bytes that are counted for each
        self._unused: dict[ReplayBuffer, None] = {}  # ended and without subscribers, the longest unused first
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def buffers(self) -> list[ReplayBuffer]:
        return list(self._buffers)

    @property
    def is_busy(self) -> bool:
        """Whether a request runs, or a client that was lost before the end may yet resume."""
        return bool(self._tasks) or self.resume_index.awaits_a_client

    def open(self, tenant: Tenant, request_id: int, request: GenerateRequest, key: str | None) -> ReplayBuffer:
        """Return the buffer of a new request, or of the one that had this idempotency key before.

        The caller must subscribe immediately. Raises InvalidRequest when the key's request was another one, or a
        refusal of `LiveRequests`.
        """
        if key is None:
            return self._submit(tenant, request_id, request)
        buffer = self.idempotency_index.find((tenant.name, key), request)
        if buffer is not None:
            self._requests.replay(tenant)
            return buffer
        buffer = self._submit(tenant, request_id, request)
        self.idempotency_index.add((tenant.name, key), request, buffer)
        return buffer

    def fail(self, error: QuireError) -> None:
        """End every running request with `error`."""
        for buffer in self.buffers:
            if not buffer.has_ended:
                buffer.request.cancel("shutdown")
                buffer.fail(error)

    async def close(self) -> None:
        """Forget everything and end every task."""
        for buffer in self.buffers:
            self._give_up(buffer)
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    # replay_buffer.Owner

    def on_change(self, buffer: ReplayBuffer, cause: CancelCause = "disconnect") -> None:
        """Cancel the request without references, release the buffer that cannot be found, and count its bytes."""
        if not buffer.has_ended and not buffer.num_references:
            buffer.request.cancel(cause)
        if buffer not in self._buffers:
            return
        if not buffer.has_ended or buffer.subscribers:
            self._unused.pop(buffer, None)
        elif buffer.resume_entries or buffer.idempotency_entry is not None:
            self._unused[buffer] = None
        else:
            self._release(buffer)
            return
        self.num_bytes += buffer.num_bytes - self._buffers[buffer]
        self._buffers[buffer] = buffer.num_bytes
        self._limit(buffer)

    def on_end(self, buffer: ReplayBuffer) -> None:
        if buffer.idempotency_entry is not None:
            self.idempotency_index.on_end(buffer.idempotency_entry)
        self.on_change(buffer)

    def on_cancelled(self, subscriber: Subscriber, cause: CancelCause) -> None:
        buffer = subscriber.buffer
        if (entry := self.resume_index.entry_of(subscriber)) is not None:
            self.resume_index.remove(entry)
        if buffer.num_references > 1:
            subscriber.stop(Cancelled("the client cancelled; others go on with this stream"))
        elif not buffer.has_ended:
            buffer.request.cancel(cause)

    def on_subscriber_ended(self, subscriber: Subscriber, cause: CancelCause) -> None:
        if (entry := self.resume_index.entry_of(subscriber)) is not None:
            self.resume_index.detach(entry)
        self.on_change(subscriber.buffer, cause)

    # Memory

    def _submit(self, tenant: Tenant, request_id: int, request: GenerateRequest) -> ReplayBuffer:
        buffer = ReplayBuffer(self._requests.submit(tenant, request_id, request), self)
        self._buffers[buffer] = 0
        self._tasks.add(buffer.task)
        buffer.task.add_done_callback(self._tasks.discard)
        return buffer

    def _limit(self, grown: ReplayBuffer) -> None:
        while self.num_bytes > self._max_bytes and self._unused:
            self._give_up(next(iter(self._unused)))
        if self.num_bytes > self._max_bytes and grown in self._buffers:
            self._give_up(grown)

    def _give_up(self, buffer: ReplayBuffer) -> None:
        """Let no one find the buffer any more; its subscribers go on."""
        self._release(buffer)
        for entry in list(buffer.resume_entries):
            self.resume_index.remove(entry)
        if buffer.idempotency_entry is not None:
            self.idempotency_index.remove(buffer.idempotency_entry)
        buffer.drop_read_chunks()
        self.on_change(buffer)

    def _release(self, buffer: ReplayBuffer) -> None:
        self.num_bytes -= self._buffers.pop(buffer)
        self._unused.pop(buffer, None)


def _digest(request: GenerateRequest) -> bytes:
    """Return a hash of what decides the outcome; a prompt may be long, and is not kept."""
    return hashlib.sha256(msgspec.msgpack.encode((request.prompt, request.messages, request.sampling_params))).digest()
