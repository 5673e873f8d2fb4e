"""`RequestLog`: one log line and one count for each request, when it ends or is refused.

A line has numbers and codes, never text from clients or messages of errors, which may quote it. The subject of a line
comes from `structlog.contextvars`, which a task inherits from the task that creates it: a connection's task binds
`connection=new_id()` at its start and `tenant` once it is known; `request=new_id()` is bound while a frame is handled
that starts a request or asks for one. `client_id` is the id that the client gave the request.
"""

from __future__ import annotations

import logging

import structlog

from ...common.errors import GenerationFailed, QuireError, Unavailable
from ...common.logs import BoundedLog
from ...common.types import OutputChunk
from ..monitoring import CancelCause, PrometheusObserver

SHUTDOWN_CODE = Unavailable.code  # code of requests that the server cut as it shut down, in the log and for the client
MAX_FREE_LINES = 1000  # lines per interval: refusals, resumptions and replays cost the client nothing
FREE_INTERVAL_S = 10.0

_log = structlog.get_logger("quire.server")


class RequestLog:
    """Events of requests.

    Each request has one line `ended`, `failed` or `refused`; `resumed` and `replayed` concern a further reader.
    """

    def __init__(self, observer: PrometheusObserver) -> None:
        self._observer = observer
        self._tenant_logs: dict[str, BoundedLog] = {}  # refusals, resumptions and replays

    def refused(self, tenant: str, client_id: int, code: str, retry_after_ms: int | None = None) -> None:
        """Record a request that was refused before it ran."""
        self._observer.on_refused(tenant, code)
        self._write(tenant, "request refused", client_id=client_id, code=code, retry_after_ms=retry_after_ms)

    def ended(self, client_id: int, last: OutputChunk) -> None:
        """Record a request that ran until its last chunk."""
        assert last.usage is not None, "the last chunk has it"
        usage = last.usage
        _log.info(
            "request ended",
            client_id=client_id,
            finish_reason=last.finish_reason,
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            completion_tokens=usage.completion_tokens,
            queue_ms=round(usage.queue_ms, 1),
            prefill_ms=round(usage.prefill_ms, 1),
            decode_ms=round(usage.decode_ms, 1),
            stall_ms=round(usage.stall_ms, 1),
        )

    def embedded(self, client_id: int, prompt_tokens: int) -> None:
        """Record a request to embed or score whose values were all read."""
        _log.info("request ended", client_id=client_id, finish_reason="stop", prompt_tokens=prompt_tokens)

    def failed(self, client_id: int, code: str | None, cause: CancelCause | None, generated: int) -> None:
        """Record a request that ended without a last chunk: by an error, or because the server stopped reading it."""
        code = SHUTDOWN_CODE if cause == "shutdown" else code
        _log.info("request failed", client_id=client_id, code=code, cause=cause, completion_tokens=generated)

    def resumed(self, tenant: str, client_id: int, next_index: int) -> None:
        """Record that another connection continues to read."""
        self._observer.resumed_streams.value += 1
        self._write(tenant, "stream resumed", client_id=client_id, next_index=next_index)

    def replayed(self, tenant: str, client_id: int) -> None:
        """Record that an earlier request answers this one, which has the same idempotency key."""
        self._observer.idempotent_replays.value += 1
        self._write(tenant, "request answered by an earlier one", client_id=client_id)

    def _write(self, tenant: str, event: str, **fields: object) -> None:
        """Write a line that the tenant's clients can cause at no cost, at a bounded rate."""
        log = self._tenant_logs.get(tenant)
        if log is None:
            log = self._tenant_logs[tenant] = BoundedLog(_log, MAX_FREE_LINES, FREE_INTERVAL_S)
        log.write(logging.INFO, event, **fields)


def quire_error(error: Exception, what: str = "request", **fields: object) -> QuireError:
    """Return `error` in the form for clients. Any exception except a QuireError is a bug, and logged with `fields`."""
    if isinstance(error, QuireError):
        return error
    _log.error(f"{what} failed", exc_info=error, **fields)
    return GenerationFailed(f"an internal error ended this {what}; see the server's log")
