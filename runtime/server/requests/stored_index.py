"""`StoredIndex`: requests that are kept whether or not a connection reads them, until they are deleted or expire.

Must not import frames, sockets or `resume`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NamedTuple

from ...common.errors import RequestNotFound
from .replay_buffer import ReplayBuffer, StoredEntry


class ToStore(NamedTuple):
    """The data to store of a request besides its output."""

    id_prefix: str  # of its id, which the name of its output completes
    fields: bytes  # JSON


class StoredIndex:
    """Finds a stored request by its tenant and id, while it runs and for a time after its end."""

    def __init__(self, window_s: float, on_change: Callable[[ReplayBuffer], None]) -> None:
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

    def add(self, buffer: ReplayBuffer, stored: ToStore) -> None:
        """Store the buffer's request."""
        entry = StoredEntry((buffer.tenant, stored.id_prefix + buffer.name), stored.fields, buffer)
        self._entries[entry.key] = buffer.stored_entry = entry
        self._on_change(buffer)

    def on_end(self, entry: StoredEntry) -> None:
        """Keep an ended request for the window."""
        entry.expiry = asyncio.get_running_loop().call_later(self._window_s, self.remove, entry)

    def remove(self, entry: StoredEntry) -> None:
        """Forget the request; it is cancelled if it runs and no connection reads it."""
        if entry.expiry is not None:
            entry.expiry.cancel()
        entry.buffer.stored_entry = None
        del self._entries[entry.key]
        self._on_change(entry.buffer)
