"""Output that outlives its connection: resumable requests by session and id, stored ones, and idempotency keys.

A running request lives while a connection reads it or may resume it, or while it is stored; an ended one while it may
be resumed, is stored or its key is known. Must not import frames or sockets.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import Callable

import msgspec

from ...common.errors import Cancelled, InvalidRequest, Overloaded, QuireError, QuotaExceeded, RequestNotFound
from ...common.server_config import ServerConfig
from ...common.tasks import end_tasks
from ...engine.facade import GenerateRequest
from ..monitoring import CancelCause
from ..tenancy.tenants import Tenant
from .live_requests import LiveRequests
from .replay_buffer import (
    ENTRY_BYTES,
    BufferReader,
    IdempotencyEntry,
    IdempotencyKey,
    ReplayBuffer,
    ResumeEntry,
    Session,
    StoredEntry,
    Subscriber,
    bytes_to_reserve,
)
from .stored_index import StoredIndex, ToStore

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
    def num_awaited(self) -> int:
        """Requests whose client was lost before the end and may yet resume."""
        entries = (entry for session in self._sessions.values() for entry in session.values())
        return sum(entry.was_cut and entry.subscriber is None for entry in entries)

    def session_name(self, tenant: str, wanted: str | None) -> str:
        """Return `wanted` if this tenant can resume a request there, else the name of a new session."""
        if wanted is not None and (tenant, wanted) in self._sessions:
            return wanted
        return secrets.token_urlsafe(SESSION_BYTES)

    def add(self, session: Session, request_id: int, subscriber: BufferReader) -> None:
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
                "there is nothing to resume under this id: it is unknown, expired, dropped to keep newer requests of "
                "this tenant, or of another tenant"
            )
        return entry

    def entry_of(self, subscriber: BufferReader) -> ResumeEntry | None:
        """Return the entry whose present reader `subscriber` is."""
        return next((entry for entry in subscriber.buffer.resume_entries if entry.subscriber is subscriber), None)

    def attach(self, entry: ResumeEntry, subscriber: BufferReader) -> None:
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

    def find(self, key: IdempotencyKey, request: GenerateRequest, answer_fields: bytes) -> ReplayBuffer | None:
        """Return what answers `request`. Raises InvalidRequest when the key was used for another answer."""
        entry = self._entries.get(key)
        if entry is None or entry.buffer.request.is_cancelled:
            return None
        if entry.request_digest != _digest(request, answer_fields):
            raise InvalidRequest("this idempotency key was used for another request; take a fresh key")
        return entry.buffer

    def add(self, key: IdempotencyKey, request: GenerateRequest, answer_fields: bytes, buffer: ReplayBuffer) -> None:
        if (cancelled := self._entries.get(key)) is not None:
            self.remove(cancelled)
        self._entries[key] = buffer.idempotency_entry = IdempotencyEntry(key, _digest(request, answer_fields), buffer)

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


class KeptOutput:
    """The kept output of one tenant."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self.droppable: dict[ReplayBuffer, int] = {}  # bytes freed by dropping each buffer, least recently used first


class ReplayStore:
    """The replay buffers of one server. Implements `replay_buffer.Owner`.

    A tenant's buffers take at most its share of `max_kept_bytes`. A running request counts with the most that it may
    come to hold, so that its promise can be kept. To make room for a new request, ended requests of the same tenant
    without a reader are dropped, the longest unused first; their idempotency keys are then answered with an error. A
    request for which there is no room is refused.
    """

    def __init__(self, requests: LiveRequests, config: ServerConfig, num_tenants: Callable[[], int]) -> None:
        self.resume_index = ResumeIndex(config.resume_timeout_ms / 1000, self.on_change)
        self.idempotency_index = IdempotencyIndex(config.idempotency_window_ms / 1000, self.on_change)
        self.stored_index = StoredIndex(config.store_window_ms / 1000, self.on_change)
        self._requests = requests
        self._max_bytes = config.max_kept_bytes
        self._num_tenants = num_tenants
        self._buffers: dict[ReplayBuffer, int] = {}  # with the bytes that are counted for each
        self._tenants: dict[str, KeptOutput] = {}  # of those that keep something
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def num_bytes(self) -> int:
        return sum(kept.num_bytes for kept in self._tenants.values())

    @property
    def buffers(self) -> list[ReplayBuffer]:
        return list(self._buffers)

    @property
    def num_running(self) -> int:
        return len(self._tasks)

    def open(
        self,
        tenant: Tenant,
        request_id: int,
        request: GenerateRequest,
        key: str | None,
        *,
        resumable: bool,
        stored: ToStore | None = None,
        answer_fields: bytes = b"",
    ) -> ReplayBuffer:
        """Return the buffer of a new request, or of the one that had this idempotency key before.

        `answer_fields` decide the bytes of the answer besides the request. A new request with `stored` is stored. The
        caller must subscribe immediately. Raises InvalidRequest when the key's request was another one or is not stored
        as asked, Overloaded or QuotaExceeded when the tenant's share has no room, or a refusal of `LiveRequests`.
        """
        buffer = None if key is None else self.idempotency_index.find((tenant.name, key), request, answer_fields)
        entry_bytes = ENTRY_BYTES if resumable else 0
        if buffer is not None and stored is not None and buffer.stored_entry is None:
            raise InvalidRequest("the output of this idempotency key's request is not stored; take a fresh key")
        if buffer is not None:
            with self._requests.reporting_refusals():
                droppable = self._check_room(tenant.name, entry_bytes, keep=buffer)
            self._requests.replay(tenant, request_id)
            self._drop_outputs(droppable)
            return buffer
        num_bytes = bytes_to_reserve(request.sampling_params, self._requests.most_tokens(request))
        entry_bytes += 0 if stored is None else ENTRY_BYTES + len(stored.fields)
        with self._requests.reporting_refusals():
            droppable = self._check_room(tenant.name, num_bytes + entry_bytes)
        buffer = ReplayBuffer(self._requests.submit(tenant, request_id, request), self, tenant.name, num_bytes)
        self._drop_outputs(droppable)
        self._buffers[buffer] = 0
        self._tenants.setdefault(tenant.name, KeptOutput())
        self._tasks.add(buffer.task)
        buffer.task.add_done_callback(self._tasks.discard)
        if key is not None:
            self.idempotency_index.add((tenant.name, key), request, answer_fields, buffer)
        if stored is not None:
            self.stored_index.add(buffer, stored)
        return buffer

    def delete(self, entry: StoredEntry) -> None:
        """Forget a stored request and its idempotency key, and cancel it if it runs."""
        buffer = entry.buffer
        if not buffer.has_ended:
            buffer.request.cancel("client")
        if buffer.idempotency_entry is not None:
            self.idempotency_index.remove(buffer.idempotency_entry)
        self.stored_index.remove(entry)

    def fail(self, error: QuireError) -> None:
        """End every running request with `error`."""
        for buffer in self.buffers:
            if not buffer.has_ended:
                buffer.fail(error)
                buffer.request.cancel("shutdown")

    async def close(self) -> None:
        """Forget everything and end every task."""
        for buffer in self.buffers:
            self._remove_entries(buffer)
        await end_tasks(self._tasks, "resumable and stored requests")

    # replay_buffer.Owner

    def on_change(self, buffer: ReplayBuffer, cause: CancelCause = "disconnect") -> None:
        """Cancel the request without references, stop counting the buffer that cannot be found, and count its bytes."""
        if not buffer.has_ended and not buffer.num_references:
            buffer.request.cancel(cause)
        if buffer not in self._buffers:
            return
        is_used = not buffer.has_ended or bool(buffer.subscribers)
        is_findable = buffer.resume_entries or buffer.idempotency_entry is not None or buffer.stored_entry is not None
        if not (is_used or is_findable):
            self._stop_counting(buffer)
            return
        kept = self._tenants[buffer.tenant]
        grown = buffer.num_bytes - self._buffers[buffer]
        self._buffers[buffer] += grown
        kept.num_bytes += grown
        if not is_used and (freed := buffer.num_bytes - buffer.bytes_after_drop):
            kept.droppable[buffer] = freed
        else:
            kept.droppable.pop(buffer, None)
        if grown > 0 and not buffer.has_ended:
            self._enforce_share(buffer, kept)

    def on_end(self, buffer: ReplayBuffer) -> None:
        if buffer.idempotency_entry is not None:
            self.idempotency_index.on_end(buffer.idempotency_entry)
        if buffer.stored_entry is not None:
            self.stored_index.on_end(buffer.stored_entry)
        self.on_change(buffer)

    def on_cancelled(self, subscriber: Subscriber, cause: CancelCause) -> None:
        buffer = subscriber.buffer
        if (entry := self.resume_index.entry_of(subscriber)) is not None:
            self.resume_index.remove(entry)
        if buffer.num_references > 1:
            subscriber.stop(Cancelled("the client cancelled; others go on with this stream"))
        elif not buffer.has_ended:
            buffer.request.cancel(cause)

    def on_subscriber_ended(self, subscriber: BufferReader, cause: CancelCause) -> None:
        if (entry := self.resume_index.entry_of(subscriber)) is not None:
            self.resume_index.detach(entry)
        self.on_change(subscriber.buffer, cause)

    # Memory

    @property
    def _share(self) -> int:
        """The bytes that one tenant may keep."""
        return self._max_bytes // self._num_tenants()

    def _check_room(self, tenant: str, num_bytes: int, keep: ReplayBuffer | None = None) -> list[ReplayBuffer]:
        """Return the buffers that the tenant must lose to keep `num_bytes` more; `keep` is not among them.

        Raises Overloaded or QuotaExceeded if there is too little to lose.
        """
        share, kept = self._share, self._tenants.get(tenant) or KeptOutput()
        if kept.num_bytes + num_bytes <= share:
            return []
        limit = f"a tenant's share of `max_kept_bytes` is {share} bytes"
        if num_bytes > share:
            raise QuotaExceeded(
                f"a request that may generate this much takes up to {num_bytes} bytes to be resumable, stored or to "
                f"have an idempotency key, and {limit}; lower max_tokens, n or logprobs, or ask for none of these"
            )
        dropped: list[ReplayBuffer] = []
        missing = kept.num_bytes + num_bytes - share
        for buffer, freed in kept.droppable.items():
            if buffer is not keep:
                dropped.append(buffer)
                missing -= freed
            if missing <= 0:
                return dropped
        raise Overloaded(
            f"the resumable and stored requests and the idempotency keys of this tenant hold {kept.num_bytes} bytes, "
            f"and {limit}; send this request without them, or retry later"
        )

    def _enforce_share(self, grown: ReplayBuffer, kept: KeptOutput) -> None:
        """Keep the tenant within its share although `grown` is larger than its reservation."""
        while kept.num_bytes > self._share and kept.droppable:
            self._drop_outputs([next(iter(kept.droppable))])
        if kept.num_bytes > self._share:
            grown.fail(
                Overloaded(
                    f"the text of this request is unusually long: with it, this tenant's resumable requests hold more "
                    f"than {self._share} bytes, its share of `max_kept_bytes`; send it without `resumable` and key"
                )
            )
            grown.request.cancel("slow_reader")

    def _drop_outputs(self, buffers: list[ReplayBuffer]) -> None:
        """Drop the output of ended requests without a reader. Their keys remain, so that a retry does not run twice."""
        for buffer in buffers:
            if buffer.idempotency_entry is None:
                self._remove_entries(buffer)
                continue
            buffer.drop_output(
                RequestNotFound(
                    "the request with this idempotency key has run, but its output was dropped to keep newer requests "
                    "of this tenant; take a fresh key to run it again"
                )
            )
            for entry in list(buffer.resume_entries):
                self.resume_index.remove(entry)
            if buffer.stored_entry is not None:
                self.stored_index.remove(buffer.stored_entry)
            self.on_change(buffer)

    def _remove_entries(self, buffer: ReplayBuffer) -> None:
        """Remove the buffer from both indexes; its subscribers continue."""
        self._stop_counting(buffer)
        for entry in list(buffer.resume_entries):
            self.resume_index.remove(entry)
        if buffer.idempotency_entry is not None:
            self.idempotency_index.remove(buffer.idempotency_entry)
        if buffer.stored_entry is not None:
            self.stored_index.remove(buffer.stored_entry)
        self.on_change(buffer)

    def _stop_counting(self, buffer: ReplayBuffer) -> None:
        kept = self._tenants[buffer.tenant]
        kept.num_bytes -= self._buffers.pop(buffer)
        kept.droppable.pop(buffer, None)
        if not kept.num_bytes:
            del self._tenants[buffer.tenant]


def _digest(request: GenerateRequest, answer_fields: bytes) -> bytes:
    """Return a hash of the fields that decide the answer; a prompt may be long, and is not kept."""
    outcome = msgspec.structs.replace(request, priority=0, deadline_ms=None, pin_ms=None)
    return hashlib.sha256(msgspec.msgpack.encode(outcome) + answer_fields).digest()
