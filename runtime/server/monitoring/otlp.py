"""`OTLPTracer`: sends the spans of requests to a collector, with OpenTelemetry's SDK over OTLP.

A request is one span with the attributes of OpenTelemetry's conventions for generative AI. Its children are the phases
of `traces.phases`. A thread of the SDK sends ended spans in batches, and drops spans while its queue is full. Only
`open_tracer` imports this module, because the SDK is an extra.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Mapping, Sequence

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from ...common.types import Usage
from ...engine.facade import EmbedRequest, GenerateRequest
from .traces import RequestTrace, TracePhase, caller, phases

SERVICE = "quire"
EXPORT_TIMEOUT_S = 5  # time for the collector to take a batch
LAST_BATCH_TIMEOUT_S = 2.0  # time for the last batch when the server closes
UNKNOWN_ERROR = "_OTHER"  # OpenTelemetry's name of an error without a code
MAX_INT = (1 << 63) - 1  # largest integer of an attribute

Attributes = Mapping[str, str | int | float | Sequence[str]]

_propagator = TraceContextTextMapPropagator()


class OTLPTracer:
    """The tracer of a server. `OTEL_*` variables set headers, sampling and attributes of the resource."""

    def __init__(self, endpoint: str, model: str, version: str) -> None:
        own = Resource.create({"service.name": SERVICE, "service.version": version})
        exporter = OTLPSpanExporter(endpoint=endpoint, timeout=EXPORT_TIMEOUT_S)
        self._provider = TracerProvider(resource=own.merge(OTELResourceDetector().detect()), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer(SERVICE, version)
        self._model = model

    def begin(self, request: GenerateRequest | EmbedRequest) -> RequestTrace:
        """See `Tracer.begin`."""
        operation = _operation(request)
        model = request.model or self._model
        if isinstance(request, GenerateRequest):
            model = request.lora or model
        began_ns = time.time_ns()
        span = self._tracer.start_span(
            f"{operation} {model}",
            context=_propagator.extract(caller(), Context()),
            kind=SpanKind.SERVER,
            attributes={
                "gen_ai.operation.name": operation,
                "gen_ai.provider.name": SERVICE,
                "gen_ai.request.model": model,
                "gen_ai.response.model": model,
                **({"quire.tenant": request.tenant} if request.tenant else {}),
                **_parameters(request),
            },
            start_time=began_ns,
        )
        return OTLPRequestTrace(self, span, began_ns, "deliver" if isinstance(request, GenerateRequest) else "encode")

    def record_phases(self, span: Span, began_ns: int, parts: Sequence[TracePhase]) -> None:
        """Record the phases of a request as children of its span, one after the other."""
        context = set_span_in_context(span, Context())
        at_ns = began_ns
        for name, duration_ns in parts:
            child = self._tracer.start_span(name, context, start_time=at_ns)
            at_ns += duration_ns
            child.end(at_ns)

    async def close(self) -> None:
        """See `Tracer.close`. A collector that does not answer delays the end by `LAST_BATCH_TIMEOUT_S` at most."""
        loop = asyncio.get_running_loop()
        sent = loop.create_future()

        def shut_down() -> None:
            self._provider.shutdown()
            with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
                loop.call_soon_threadsafe(sent.cancel)

        threading.Thread(target=shut_down, name="quire-traces", daemon=True).start()
        await asyncio.wait([sent], timeout=LAST_BATCH_TIMEOUT_S)


class OTLPRequestTrace:
    """The trace of one request. `rest` names the phase after the phases that the engine reports."""

    def __init__(self, tracer: OTLPTracer, span: Span, began_ns: int, rest: str) -> None:
        self._tracer = tracer
        self._span = span
        self._began_ns = began_ns
        self._began = time.monotonic_ns()
        self._rest = rest
        self._prepared_ns = 0  # time from the submission to the queue
        self.trace_id = f"{span.get_span_context().trace_id:032x}" if span.is_recording() else ""

    def accept(self) -> None:
        """See `RequestTrace.accept`."""
        self._prepared_ns = time.monotonic_ns() - self._began

    def finish(self, usage: Usage, finish_reason: str | None) -> None:
        """See `RequestTrace.finish`."""
        if finish_reason is not None:
            self._span.set_attribute("gen_ai.response.finish_reasons", (finish_reason,))
        self._span.set_attributes(
            {
                "gen_ai.usage.input_tokens": usage.prompt_tokens,
                "gen_ai.usage.output_tokens": usage.completion_tokens,
                "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
            }
        )
        if usage.reasoning_tokens is not None:
            self._span.set_attribute("gen_ai.usage.reasoning.output_tokens", usage.reasoning_tokens)
        self._end(usage)

    def fail(self, code: str | None) -> None:
        """See `RequestTrace.fail`."""
        self._span.set_attribute("error.type", code or UNKNOWN_ERROR)
        self._span.set_status(StatusCode.ERROR, code)
        self._end(None)

    def _end(self, usage: Usage | None) -> None:
        """Record the phases and end the span."""
        if not self._span.is_recording():
            return
        total_ns = time.monotonic_ns() - self._began
        if self._prepared_ns:
            parts = phases(total_ns, self._prepared_ns, usage, self._rest)
            self._tracer.record_phases(self._span, self._began_ns, parts)
        end_ns = self._began_ns + total_ns
        for name, attributes in _detours(usage):
            self._span.add_event(name, attributes, end_ns)
        self._span.end(end_ns)


def _detours(usage: Usage | None) -> list[tuple[str, Attributes]]:
    """Return the events that explain the time of a slow request: work found, lost and repeated."""
    if usage is None:
        return []
    found: list[tuple[str, Attributes]] = []
    if usage.cached_tokens:
        found.append(("quire.prefix_cache_hit", {"quire.cached_tokens": usage.cached_tokens}))
    if usage.stall_ms or usage.recomputed_tokens:
        lost: Attributes = {"quire.stall_ms": usage.stall_ms, "quire.recomputed_tokens": usage.recomputed_tokens}
        found.append(("quire.preempted", lost))
    return found


def _operation(request: GenerateRequest | EmbedRequest) -> str:
    if isinstance(request, GenerateRequest):
        return "text_completion" if request.messages is None else "chat"
    if request.classify:
        return "classify"
    return "embeddings" if request.query is None else "rerank"


def _parameters(request: GenerateRequest | EmbedRequest) -> Attributes:
    """Return the sampling parameters. The engine has not checked them: an integer may be too long for an attribute."""
    if not isinstance(request, GenerateRequest):
        return {}
    params = request.sampling_params
    integers = {
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.top_k": params.top_k,
        "gen_ai.request.choice.count": params.n,
    }
    return {
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        **{name: value for name, value in integers.items() if abs(value) <= MAX_INT},
    }
