"""`ReplayStore`: logs that outlive their connections, and the memory that they take.

A running request lives while a connection reads it or may resume it, or while it is stored; an ended request while it
may be resumed, is stored or its key is known. Must not import frames or sockets.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NamedTuple

from ...common.errors import Cancelled, InvalidRequest, Overloaded, QuireError, QuotaExceeded, RequestNotFound
from ...common.server_config import ServerConfig
from ...common.tasks import end_tasks
from ...engine.facade import GenerateRequest
from ..monitoring import CancelCause
from ..tenancy.tenants import Tenant
from .indexes import IdempotencyIndex, ResumeIndex, StoredIndex, ToStore
from .live_requests import LiveRequests
from .output_log import ENTRY_BYTES, LogReader, OutputLog, StoredEntry, bytes_to_reserve


class TenantLogs:
    """The kept logs of one tenant."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self.droppable: dict[OutputLog, int] = {}  # bytes freed by dropping each log, least recently used first


class Keeping(NamedTuple):
    """The reasons for keeping a request's output: its idempotency key, resumption, or storage."""

    key: str | None
    is_resumable: bool
    stored: ToStore | None = None
    answer_fields: bytes = b""  # decide the bytes of the answer besides the request


class ReplayStore:
    """The kept logs of one server. Implements `output_log.Retention`.

    A tenant's logs take at most its share of `max_kept_bytes`. A running request counts with the maximum size of its
    output, so that it can always be kept. To make room for a new request, ended requests of the same tenant without a
    reader are dropped, least recently used first; their idempotency keys are then answered with an error. A request
    without room is refused.
    """

    keeps = True

    def __init__(self, requests: LiveRequests, config: ServerConfig, num_tenants: Callable[[], int]) -> None:
        self.resume_index = ResumeIndex(config.resume_timeout_ms / 1000, self.on_change)
        self.idempotency_index = IdempotencyIndex(config.idempotency_window_ms / 1000, self.on_change)
        self.stored_index = StoredIndex(config.store_window_ms / 1000, self.on_change)
        self._requests = requests
        self._max_bytes = config.max_kept_bytes
        self._num_tenants = num_tenants
        self._logs: dict[OutputLog, int] = {}  # log -> bytes counted for it
        self._tenants: dict[str, TenantLogs] = {}  # tenants with kept logs
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def num_bytes(self) -> int:
        return sum(kept.num_bytes for kept in self._tenants.values())

    @property
    def logs(self) -> list[OutputLog]:
        return list(self._logs)

    @property
    def num_running(self) -> int:
        return len(self._tasks)

    def find(self, tenant: Tenant, request_id: int, request: GenerateRequest, keeping: Keeping) -> OutputLog | None:
        """Return the log of the earlier request with this idempotency key, or None.

        The caller must read it immediately. Raises InvalidRequest if that request was different or is not stored as
        requested, Overloaded or QuotaExceeded without room for a reader or a resume entry, or the refusal of the
        tenant's rate.
        """
        if keeping.key is None:
            return None
        log = self.idempotency_index.find((tenant.name, keeping.key), request, keeping.answer_fields)
        if log is None:
            return None
        if keeping.stored is not None and log.stored_entry is None:
            raise InvalidRequest("the output of this idempotency key's request is not stored; take a fresh key")
        with self._requests.reporting_refusals():
            log.check_readers()
            droppable = self._check_room(tenant.name, ENTRY_BYTES if keeping.is_resumable else 0, keep=log)
        self._requests.replay(tenant, request_id)
        self._drop_outputs(droppable)
        return log

    def open(self, tenant: Tenant, request_id: int, request: GenerateRequest, keeping: Keeping) -> OutputLog:
        """Submit a new request, and return its log. The caller must read it immediately.

        Raises Overloaded or QuotaExceeded when the tenant's share has no room, or a refusal of `LiveRequests`.
        """
        key = keeping.key
        stored = keeping.stored
        num_bytes = bytes_to_reserve(request.sampling_params, self._requests.most_tokens(request))
        entry_bytes = ENTRY_BYTES if keeping.is_resumable else 0
        entry_bytes += 0 if stored is None else ENTRY_BYTES + len(stored.fields)
        with self._requests.reporting_refusals():
            droppable = self._check_room(tenant.name, num_bytes + entry_bytes)
        log = OutputLog(self._requests.submit(tenant, request_id, request), self, tenant.name, num_bytes)
        self._drop_outputs(droppable)
        self._logs[log] = 0
        self._tenants.setdefault(tenant.name, TenantLogs())
        self._tasks.add(log.task)
        log.task.add_done_callback(self._tasks.discard)
        if key is not None:
            self.idempotency_index.add((tenant.name, key), request, keeping.answer_fields, log)
        if stored is not None:
            self.stored_index.add(log, stored)
        return log

    def delete(self, entry: StoredEntry) -> None:
        """Forget a stored request and its idempotency key, and cancel it if it runs."""
        log = entry.log
        if not log.has_ended:
            log.request.cancel("client")
        if log.idempotency_entry is not None:
            self.idempotency_index.remove(log.idempotency_entry)
        self.stored_index.remove(entry)

    def fail(self, error: QuireError) -> None:
        """End every running request with `error`."""
        for log in self.logs:
            if not log.has_ended:
                log.fail(error)
                log.request.cancel("shutdown")

    async def close(self) -> None:
        """Forget everything and end every task."""
        for log in self.logs:
            self._remove_entries(log)
        await end_tasks(self._tasks, "resumable and stored requests")

    # output_log.Retention

    def on_change(self, log: OutputLog, cause: CancelCause = "disconnect") -> None:
        """Cancel the request without references, stop counting the log that cannot be found, and count its bytes."""
        if not log.has_ended and not log.num_references:
            log.request.cancel(cause)
        if log not in self._logs:
            return
        is_used = not log.has_ended or bool(log.readers)
        is_findable = log.resume_entries or log.idempotency_entry is not None or log.stored_entry is not None
        if not (is_used or is_findable):
            self._stop_counting(log)
            return
        kept = self._tenants[log.tenant]
        grown = log.num_bytes - self._logs[log]
        self._logs[log] += grown
        kept.num_bytes += grown
        if not is_used and (freed := log.num_bytes - log.bytes_after_drop):
            kept.droppable[log] = freed
        else:
            kept.droppable.pop(log, None)
        if grown > 0 and not log.has_ended:
            self._enforce_share(log, kept)

    def on_end(self, log: OutputLog) -> None:
        if log.idempotency_entry is not None:
            self.idempotency_index.on_end(log.idempotency_entry)
        if log.stored_entry is not None:
            self.stored_index.on_end(log.stored_entry)
        self.on_change(log)

    def on_cancelled(self, reader: LogReader, cause: CancelCause) -> None:
        log = reader.log
        if (entry := self.resume_index.entry_of(reader)) is not None:
            self.resume_index.remove(entry)
        if log.num_references > 1:
            reader.stop(Cancelled("the client cancelled; others go on with this stream"))
        elif not log.has_ended:
            log.request.cancel(cause)

    def on_reader_ended(self, reader: LogReader, cause: CancelCause) -> None:
        if (entry := self.resume_index.entry_of(reader)) is not None:
            self.resume_index.detach(entry)
        self.on_change(reader.log, cause)

    # Memory

    @property
    def _share(self) -> int:
        """The bytes that one tenant may keep."""
        return self._max_bytes // self._num_tenants()

    def _check_room(self, tenant: str, num_bytes: int, keep: OutputLog | None = None) -> list[OutputLog]:
        """Return the logs to drop, never `keep`, so that the tenant can keep `num_bytes` more.

        Raises Overloaded or QuotaExceeded if dropping logs is not enough.
        """
        share = self._share
        kept = self._tenants.get(tenant) or TenantLogs()
        if kept.num_bytes + num_bytes <= share:
            return []
        limit = f"a tenant's share of `max_kept_bytes` is {share} bytes"
        if num_bytes > share:
            raise QuotaExceeded(
                f"a request that may generate this much takes up to {num_bytes} bytes to be resumable, stored or to "
                f"have an idempotency key, and {limit}; lower max_tokens, n or logprobs, or ask for none of these"
            )
        dropped: list[OutputLog] = []
        missing = kept.num_bytes + num_bytes - share
        for log, freed in kept.droppable.items():
            if log is not keep:
                dropped.append(log)
                missing -= freed
            if missing <= 0:
                return dropped
        raise Overloaded(
            f"the resumable and stored requests and the idempotency keys of this tenant hold {kept.num_bytes} bytes, "
            f"and {limit}; send this request without them, or retry later"
        )

    def _enforce_share(self, grown: OutputLog, kept: TenantLogs) -> None:
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

    def _drop_outputs(self, logs: list[OutputLog]) -> None:
        """Drop the output of ended requests without a reader. Their keys remain, so that a retry does not run again."""
        for log in logs:
            if log.idempotency_entry is None:
                self._remove_entries(log)
                continue
            log.drop_output(
                RequestNotFound(
                    "the request with this idempotency key has run, but its output was dropped to keep newer requests "
                    "of this tenant; take a fresh key to run it again"
                )
            )
            for entry in list(log.resume_entries):
                self.resume_index.remove(entry)
            if log.stored_entry is not None:
                self.stored_index.remove(log.stored_entry)
            self.on_change(log)

    def _remove_entries(self, log: OutputLog) -> None:
        """Remove the log from the indexes; its readers continue."""
        self._stop_counting(log)
        for entry in list(log.resume_entries):
            self.resume_index.remove(entry)
        if log.idempotency_entry is not None:
            self.idempotency_index.remove(log.idempotency_entry)
        if log.stored_entry is not None:
            self.stored_index.remove(log.stored_entry)
        self.on_change(log)

    def _stop_counting(self, log: OutputLog) -> None:
        kept = self._tenants[log.tenant]
        kept.num_bytes -= self._logs.pop(log)
        kept.droppable.pop(log, None)
        if not kept.num_bytes:
            del self._tenants[log.tenant]
