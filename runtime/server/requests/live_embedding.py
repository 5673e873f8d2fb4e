"""`LiveEmbedding`: one request to embed or score texts, from its submission to its end. Must not import frames."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextvars import copy_context
from typing import Any, TypeVar

from structlog.contextvars import bind_contextvars

from ....scheduler import AdmissionEstimate
from ...common.errors import Cancelled, QuireError
from ...common.types import Usage
from ...engine.facade import EmbeddedTexts, Embeddings
from ..monitoring import CancelCause, PrometheusObserver, RequestStatus, RequestTrace
from ..tenancy.tenants import Tenant
from .request_log import RequestLog

T = TypeVar("T")


class LiveEmbedding:
    """A request that is counted for its tenant and listed for the status page.

    Iterate `chunks` once, even to end it.
    """

    def __init__(
        self,
        submission: Awaitable[Embeddings],
        release_text: Callable[[], None],
        tenant: Tenant,
        request_id: int,
        observer: PrometheusObserver,
        log: RequestLog,
        on_end: Callable[[LiveEmbedding], object],
        trace: RequestTrace,
    ) -> None:
        self.prompt_tokens = 0  # tokens of the texts that were read
        self.on_accepted: Callable[[AdmissionEstimate], object] = lambda admission: None
        self._submission: Awaitable[Embeddings] | None = submission
        self._release_text = release_text
        self._tenant = tenant
        self._request_id = request_id
        self._observer = observer
        self._log = log
        self._on_end = on_end
        self._trace = trace
        self._context = copy_context()
        if trace.trace_id:
            self._context.run(bind_contextvars, trace_id=trace.trace_id)
        self._cause: CancelCause | None = None
        self._waiting: asyncio.Future[Any] | None = None  # future that `chunks` waits for
        self._started = time.monotonic()
        self._is_accepted = False

    @property
    def usage(self) -> Usage:
        """The tokens of the texts that were read."""
        return Usage(prompt_tokens=self.prompt_tokens, completion_tokens=0)

    async def chunks(self) -> AsyncGenerator[EmbeddedTexts, None]:
        """Yield the values in the order of the texts. Raises the engine's refusal or error, or Cancelled."""
        stream: Embeddings | None = None
        failure: QuireError | None = None
        usage: Usage | None = None
        try:
            assert self._submission is not None, "iterated once"
            submission = self._submission
            self._submission = None
            stream = await self._wait(submission)
            del submission  # the submission holds the texts
            self._is_accepted = True
            self._trace.accept()
            self.on_accepted(stream.admission)
            async with contextlib.aclosing(aiter(stream)) as chunks:
                while (chunk := await self._wait(anext(chunks, None))) is not None:
                    self.prompt_tokens += chunk.prompt_tokens
                    yield chunk
            usage = self.usage
        except QuireError as error:
            failure = error
            raise
        finally:
            if stream is not None:
                stream.cancel()
            self._end(failure, usage)

    def close(self) -> None:
        """End a request whose chunks were never read. Idempotent."""
        submission = self._submission
        self._submission = None
        if submission is not None:
            asyncio.ensure_future(submission).cancel()
            self._end(None, None)

    def cancel(self, cause: CancelCause) -> None:
        """End soon: the values are not wanted. Idempotent: the first cause is counted."""
        if self._cause is None:
            self._cause = cause
            self._observer.on_cancelled(cause)
            if self._waiting is not None:
                self._waiting.cancel()

    def status(self) -> RequestStatus:
        return RequestStatus(
            tenant=self._tenant.name,
            request_id=str(self._request_id),
            age_s=time.monotonic() - self._started,
            state="prefill" if self._is_accepted else "queued",
            prompt_tokens=None,
            prefilled=self.prompt_tokens,
            generated=0,
        )

    def _end(self, failure: QuireError | None, usage: Usage | None) -> None:
        """Stop counting and listing the request."""
        self._release_text()
        self._tenant.leave(usage)
        self._on_end(self)
        self._context.run(self._log_end, failure, usage)

    async def _wait(self, awaitable: Awaitable[T]) -> T:
        """Wait for the engine. Raises Cancelled once `cancel` is called."""
        future: asyncio.Future[T] = asyncio.ensure_future(awaitable)
        self._waiting = future
        if self._cause is not None:
            future.cancel()
        try:
            return await future
        except asyncio.CancelledError:
            if self._cause is None:
                raise
            raise Cancelled("the request was cancelled") from None
        finally:
            self._waiting = None

    def _log_end(self, failure: QuireError | None, usage: Usage | None) -> None:
        code = None if failure is None else failure.code
        if failure is not None and not self._is_accepted and self._cause is None:
            self._log.refused(self._tenant.name, self._request_id, failure.code, failure.retry_after_ms)
        elif usage is not None:
            self._log.embedded(self._request_id, usage.prompt_tokens)
        else:
            self._log.failed(self._request_id, code, self._cause, 0)
        if usage is not None:
            self._trace.finish(usage, None)
        else:
            self._trace.fail(code or self._cause)
