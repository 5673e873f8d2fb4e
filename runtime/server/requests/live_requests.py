"""Every request that this server has in the engine: counted for its tenant, listed for the status page, cancellable.

Must not import frames or sockets.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import copy_context
from itertools import islice
from typing import Protocol, TypeVar

from msgspec import structs
from structlog.contextvars import bind_contextvars

from ...common.errors import Overloaded, QuireError, QuotaExceeded
from ...common.types import OutputChunk
from ...engine.facade import EmbedRequest, GenerateRequest, Generation
from ..models.catalog import ModelCatalog
from ..monitoring import (
    CancelCause,
    PrometheusObserver,
    RequestState,
    RequestStatus,
    RequestTrace,
    SilentTracer,
    Tracer,
)
from ..tenancy.tenant_bytes import EqualShares
from ..tenancy.tenants import Tenant
from .live_embedding import LiveEmbedding
from .request_log import RequestLog

R = TypeVar("R", GenerateRequest, EmbedRequest)
T = TypeVar("T")

FEWER = "send fewer prompts in one request"


class LiveRequests:
    """The live requests of one server, oldest first."""

    def __init__(
        self,
        models: ModelCatalog,
        observer: PrometheusObserver,
        texts: EqualShares,
        tracer: Tracer | None = None,
    ) -> None:
        """`texts` limits the prompts that are being tokenized."""
        self.texts = texts
        self._models = models
        self._observer = observer
        self._tracer = tracer or SilentTracer()
        self._all: dict[LiveRequest | LiveEmbedding, None] = {}
        self.log = RequestLog(observer)

    def __len__(self) -> int:
        return len(self._all)

    def check_fit(self, tenant: Tenant, requests: Sequence[GenerateRequest]) -> None:
        """Raise QuotaExceeded if the tenant may never have these requests together, Overloaded if it may not now.

        `submit` may still refuse one of them: only the largest burst of the rate and of the texts is compared here.
        """
        if len(requests) == 1:
            return
        with self.reporting_refusals():
            _check_limits(tenant, len(requests))
            num_bytes = sum(request.text_bytes() for request in requests)
            texts = self.texts.of(tenant.name)
            if num_bytes > texts.limit:
                raise QuotaExceeded(f"these prompts take {num_bytes} bytes, and {texts.describe_limit()}; {FEWER}")

    def submit(self, tenant: Tenant, request_id: int, request: GenerateRequest) -> LiveRequest:
        """Count the request for `tenant` and submit it.

        Raises the refusal of `TenantBytes.reserve`, `Tenant.enter` or the engine; nothing is counted then.
        """
        trace = self._tracer.begin(request)
        if trace.trace_id:
            request = structs.replace(request, trace_id=trace.trace_id)
        submission, release_text = self._enter(tenant, request, self._models.engine(request.model).submit, trace)
        live = LiveRequest(submission, release_text, tenant, request_id, self._observer, self.log, self._all.pop, trace)
        self._all[live] = None
        return live

    def embed(self, tenant: Tenant, request_id: int, request: EmbedRequest) -> LiveEmbedding:
        """Count the request for `tenant` and submit it; its texts count until its end. Raises as `submit`."""
        trace = self._tracer.begin(request)
        submission, release_text = self._enter(tenant, request, self._models.engine(request.model).embed, trace)
        live = LiveEmbedding(
            submission, release_text, tenant, request_id, self._observer, self.log, self._all.pop, trace
        )
        self._all[live] = None
        return live

    def _enter(
        self, tenant: Tenant, request: R, submit: Callable[[R], Awaitable[T]], trace: RequestTrace
    ) -> tuple[Awaitable[T], Callable[[], None]]:
        """Count the request and its text for `tenant`. Return the submission, and a function that releases the text."""
        try:
            with self.reporting_refusals():
                release_text = self.texts.of(tenant.name).reserve(request.text_bytes())
                try:
                    tenant.enter()
                except QuireError:
                    release_text()
                    raise
            try:
                return submit(request), release_text
            except BaseException:
                release_text()
                tenant.leave()
                raise
        except QuireError as error:
            trace.fail(error.code)
            raise

    def replay(self, tenant: Tenant, request_id: int) -> None:
        """Count a request that an earlier one answers. Raises the refusal of `Tenant.charge_rate`."""
        with self.reporting_refusals():
            tenant.charge_rate()
        self.log.replayed(tenant.name, request_id)

    def oldest(self, limit: int) -> list[RequestStatus]:
        return [live.status() for live in islice(self._all, limit)]

    def most_tokens(self, request: GenerateRequest) -> int:
        """Return the most tokens of all the request's outputs together."""
        info = self._models.engine(request.model).info
        params = request.sampling_params
        num_outputs = min(max(params.n, 0), info.max_num_seqs)
        return num_outputs * min(max(params.max_tokens, 0), info.max_model_len)

    @contextmanager
    def reporting_refusals(self) -> Iterator[None]:
        """Report a refusal raised within as a rejection, and raise it again. The engine reports its own refusals."""
        try:
            yield
        except QuireError as error:
            self._observer.on_rejected(error)
            raise


def _check_limits(tenant: Tenant, num_requests: int) -> None:
    """Raise QuotaExceeded or Overloaded if the tenant may not send that many requests at once."""
    limits = tenant.limits
    num_live = tenant.totals.live
    most = limits.max_concurrent_requests
    burst = limits.burst or limits.requests_per_minute
    what = f"{num_requests} prompts are as many requests, and this tenant may"
    if most is not None and num_requests > most:
        raise QuotaExceeded(f"{what} have {most} at a time; {FEWER}")
    if limits.requests_per_minute is not None and burst is not None and num_requests > burst:
        raise QuotaExceeded(f"{what} send {burst} at once; {FEWER}")
    if most is not None and num_live + num_requests > most:
        raise Overloaded(f"{what} have {most} at a time, of which {num_live} are live")


class Reader(Protocol):
    """The receiver of a request's chunks."""

    generated: int  # tokens of all outputs that it has received


class LiveRequest:
    """A request from its submission to `end`. It can be cancelled before the engine has accepted it.

    Its reader awaits `submission` once, notes the answer, has the chunks delivered, and calls `end` once, with the last
    chunk or the error that ended the request. The end is logged with the context variables of the request's submission.
    """

    def __init__(
        self,
        submission: Awaitable[Generation],
        release_text: Callable[[], None],
        tenant: Tenant,
        request_id: int,
        observer: PrometheusObserver,
        log: RequestLog,
        on_end: Callable[[LiveRequest], object],
        trace: RequestTrace,
    ) -> None:
        self.reader: Reader | None = None
        self.prefill_watchers: set[Callable[[int, int], None]] = set()  # called with computed and prompt tokens
        self.is_cancelled = False
        self.submission: Awaitable[Generation] | None = submission  # None: the engine's stream has ended
        self._release_text = release_text  # once the prompt is tokenized
        self._tenant = tenant
        self.request_id = request_id
        self._observer = observer
        self._log = log
        self._on_end = on_end
        self._trace = trace
        self._context = copy_context()
        if trace.trace_id:
            self._context.run(bind_contextvars, trace_id=trace.trace_id)
        self._refusal: tuple[str, int | None] | None = None  # code, retry_after_ms
        self._cause: CancelCause | None = None
        self._started = time.monotonic()
        self._generation: Generation | None = None
        self._prompt_tokens: int | None = None
        self._prefilled: int | None = None

    def note_accepted(self, generation: Generation) -> None:
        """Take the engine's stream: the engine has accepted the request."""
        self._release_text()
        self._trace.accept()
        self._generation = generation
        self._prompt_tokens = len(generation.prompt_token_ids)
        generation.watch_prefill(self._note_prefill)
        if self.is_cancelled:
            generation.cancel()

    def note_refused(self, error: Exception) -> None:
        """Note the engine's refusal, or an error of its own."""
        self._release_text()
        if isinstance(error, QuireError):
            self._refusal = error.code, error.retry_after_ms

    def cancel(self, cause: CancelCause) -> None:
        """Cancel in the engine. Idempotent: the first cause is counted."""
        if self.is_cancelled:
            return
        self.is_cancelled = True
        self._cause = cause
        self._observer.on_cancelled(cause)
        if self._generation is not None:
            self._generation.cancel()

    def forget_generation(self) -> None:
        """Release the engine's stream, which holds the prompt: it has ended."""
        self._generation = self.submission = None

    def end(self, outcome: OutputChunk | QuireError | None) -> None:
        """Stop counting and listing the request, and release the engine's stream."""
        self._release_text()
        self._context.run(self._log_end, outcome)
        self.reader = None
        self.forget_generation()
        self._tenant.leave(outcome.usage if isinstance(outcome, OutputChunk) else None)
        self._on_end(self)

    def status(self) -> RequestStatus:
        generated = 0 if self.reader is None else self.reader.generated
        state: RequestState = "queued"
        if generated:
            state = "decode"
        elif self._prefilled is not None:
            state = "prefill"
        return RequestStatus(
            tenant=self._tenant.name,
            request_id=str(self.request_id),
            age_s=time.monotonic() - self._started,
            state=state,
            prompt_tokens=self._prompt_tokens,
            prefilled=self._prompt_tokens if generated else self._prefilled,
            generated=generated,
        )

    def _log_end(self, outcome: OutputChunk | QuireError | None) -> None:
        if self._refusal is not None:
            self._log.refused(self._tenant.name, self.request_id, *self._refusal)
            self._trace.fail(self._refusal[0])
        elif isinstance(outcome, OutputChunk) and not (
            self._cause == "shutdown" and outcome.finish_reason == "cancelled"
        ):
            self._log.ended(self.request_id, outcome)
            if outcome.usage is not None:
                self._trace.finish(outcome.usage, outcome.finish_reason)
        else:
            code = outcome.code if isinstance(outcome, QuireError) else None
            generated = 0 if self.reader is None else self.reader.generated
            self._log.failed(self.request_id, code, self._cause, generated)
            self._trace.fail(code or self._cause)

    def _note_prefill(self, computed_tokens: int) -> None:
        self._prefilled = computed_tokens
        if self._prompt_tokens is not None:
            for watcher in self.prefill_watchers:
                watcher(computed_tokens, self._prompt_tokens)
