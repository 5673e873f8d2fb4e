"""The indexes that find a kept log: of requests that may be resumed, of idempotency keys, and of stored requests.

Must not import frames, sockets or `resume`.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from ...common.errors import Cancelled, InvalidRequest, RequestNotFound
from ...engine.facade import GenerateRequest
from .output_log import IdempotencyEntry, IdempotencyKey, LogReader, OutputLog, ResumeEntry, Session, StoredEntry

SESSION_BYTES = 18  # random bytes: a session's name is the only secret of RESUME

OnChange = Callable[[OutputLog], None]


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
        """Requests whose client was lost before the end and may still resume."""
        entries = (entry for session in self._sessions.values() for entry in session.values())
        return sum(entry.was_cut and entry.reader is None for entry in entries)

    def session_name(self, tenant: str, wanted: str | None) -> str:
        """Return `wanted` if the tenant can resume a request of this session, else the name of a new session."""
        if wanted is not None and (tenant, wanted) in self._sessions:
            return wanted
        return secrets.token_urlsafe(SESSION_BYTES)

    def add(self, session: Session, request_id: int, reader: LogReader) -> None:
        """Make the reader's request resumable; it replaces an earlier request with the same id."""
        if (earlier := self._sessions.get(session, {}).get(request_id)) is not None:
            self.remove(earlier)
        entry = ResumeEntry(session, request_id, reader.log, reader)
        self._sessions.setdefault(session, {})[request_id] = entry
        entry.log.resume_entries.add(entry)
        self._on_change(entry.log)

    def find(self, session: Session, request_id: int) -> ResumeEntry:
        """Return the entry to resume. Raises RequestNotFound without one."""
        entry = self._sessions.get(session, {}).get(request_id)
        if entry is None:
            raise RequestNotFound(
                "there is nothing to resume under this id: it is unknown, expired, dropped to keep newer requests of "
                "this tenant, or of another tenant"
            )
        return entry

    def entry_of(self, reader: LogReader) -> ResumeEntry | None:
        """Return the entry whose present reader `reader` is."""
        return next((entry for entry in reader.log.resume_entries if entry.reader is reader), None)

    def attach(self, entry: ResumeEntry, reader: LogReader) -> None:
        """Pass the request to `reader`, and take it from its present connection."""
        if entry.reader is not None:
            entry.reader.stop(Cancelled("this request was resumed on another connection"))
        if entry.expiry is not None:
            entry.expiry.cancel()
        entry.reader = reader
        entry.expiry = None

    def detach(self, entry: ResumeEntry) -> None:
        """Wait for a client for the resume timeout, now that the reader has ended."""
        assert entry.reader is not None, "attached before"
        entry.was_cut = entry.reader.was_cut
        entry.reader = None
        entry.expiry = asyncio.get_running_loop().call_later(self._timeout_s, self.remove, entry)

    def remove(self, entry: ResumeEntry) -> None:
        if entry.expiry is not None:
            entry.expiry.cancel()
        entry.log.resume_entries.discard(entry)
        session = self._sessions[entry.session]
        del session[entry.request_id]
        if not session:
            del self._sessions[entry.session]
        self._on_change(entry.log)


class IdempotencyIndex:
    """Finds the earlier request with an idempotency key, while it runs and for a time after it has finished."""

    def __init__(self, window_s: float, on_change: OnChange) -> None:
        self._window_s = window_s
        self._on_change = on_change
        self._entries: dict[IdempotencyKey, IdempotencyEntry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, key: IdempotencyKey, request: GenerateRequest, answer_fields: bytes) -> OutputLog | None:
        """Return the entry that answers `request`. Raises InvalidRequest if its key was used for another answer."""
        entry = self._entries.get(key)
        if entry is None or entry.log.request.is_cancelled:
            return None
        if entry.request_digest != _digest(request, answer_fields):
            raise InvalidRequest("this idempotency key was used for another request; take a fresh key")
        return entry.log

    def add(self, key: IdempotencyKey, request: GenerateRequest, answer_fields: bytes, log: OutputLog) -> None:
        if (cancelled := self._entries.get(key)) is not None:
            self.remove(cancelled)
        self._entries[key] = log.idempotency_entry = IdempotencyEntry(key, _digest(request, answer_fields), log)

    def on_end(self, entry: IdempotencyEntry) -> None:
        """Remember a finished request for the window. After another end, a retry is a new attempt."""
        if entry.log.finish_reason in ("stop", "length"):
            entry.expiry = asyncio.get_running_loop().call_later(self._window_s, self.remove, entry)
        else:
            self.remove(entry)

    def remove(self, entry: IdempotencyEntry) -> None:
        if entry.expiry is not None:
            entry.expiry.cancel()
        entry.log.idempotency_entry = None
        del self._entries[entry.key]
        self._on_change(entry.log)


class ToStore(NamedTuple):
    """The data to store of a request besides its output."""

    id_prefix: str  # prefix of its id, which the name of its output completes
    fields: bytes  # JSON


class StoredIndex:
    """Finds a stored request by its tenant and id, while it runs and for a time after its end."""

    def __init__(self, window_s: float, on_change: OnChange) -> None:
        self._window_s = window_s
        self._on_change = on_change
        self._entries: dict[tuple[str, str], StoredEntry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, tenant: str, stored_id: str) -> StoredEntry:
        """Return a tenant's stored request. Raises RequestNotFound without one."""
        entry = self._entries.get((tenant, stored_id))
        if entry is None:
            raise RequestNotFound(
                "nothing is stored under this id: it is unknown, expired, deleted, dropped to keep newer requests of "
                "this tenant, was not sent with `store: true`, or is of another tenant"
            )
        return entry

    def add(self, log: OutputLog, stored: ToStore) -> None:
        """Store the log's request."""
        entry = StoredEntry((log.tenant, stored.id_prefix + log.name), stored.fields, log)
        self._entries[entry.key] = log.stored_entry = entry
        self._on_change(log)

    def on_end(self, entry: StoredEntry) -> None:
        """Keep an ended request for the window."""
        entry.expiry = asyncio.get_running_loop().call_later(self._window_s, self.remove, entry)

    def remove(self, entry: StoredEntry) -> None:
        """Forget the request, and cancel it if it runs without a reader."""
        if entry.expiry is not None:
            entry.expiry.cancel()
        entry.log.stored_entry = None
        del self._entries[entry.key]
        self._on_change(entry.log)


def _digest(request: GenerateRequest, answer_fields: bytes) -> bytes:
    """Return a hash of the fields that decide the answer; a prompt may be long, and is not kept."""
    outcome = msgspec.structs.replace(request, priority=0, deadline_ms=None, pin_ms=None)
    return hashlib.sha256(msgspec.msgpack.encode(outcome) + answer_fields).digest()
