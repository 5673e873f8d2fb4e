"""An OpenTelemetry collector for tests: a small HTTP server that keeps the spans which it receives."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

PATH = "/v1/traces"


class Collector:
    """The spans received so far, as protobuf messages."""

    def __init__(self) -> None:
        self.url = ""  # address of the server, without a path
        self.paths: list[str] = []
        self.spans: list[Any] = []
        self.resources: list[dict[str, Any]] = []

    def receive(self, path: str, body: bytes) -> None:
        self.paths.append(path)
        for resource_spans in ExportTraceServiceRequest.FromString(body).resource_spans:
            self.resources.append(attributes(resource_spans.resource))
            for scope_spans in resource_spans.scope_spans:
                self.spans.extend(scope_spans.spans)

    def requests(self) -> list[Any]:
        """Return the spans of requests: the ones that no span of this server contains, in the order of their ends."""
        own = {span.span_id for span in self.spans}
        return [span for span in self.spans if span.parent_span_id not in own]

    def phases(self, request: Any) -> dict[str, int]:
        """Return the nanoseconds of each child of a request's span, each of which begins as the one before ends."""
        children = [span for span in self.spans if span.parent_span_id == request.span_id]
        at = request.start_time_unix_nano
        for child in children:
            assert child.start_time_unix_nano == at
            assert child.trace_id == request.trace_id
            at = child.end_time_unix_nano
        return {child.name: child.end_time_unix_nano - child.start_time_unix_nano for child in children}


def attributes(message: Any) -> dict[str, Any]:
    """Return the attributes of a span, an event or a resource."""
    return {each.key: _value(each.value) for each in message.attributes}


def duration(span: Any) -> int:
    nanoseconds: int = span.end_time_unix_nano - span.start_time_unix_nano
    return nanoseconds


@contextmanager
def collecting() -> Iterator[Collector]:
    """Run a collector on a free port."""
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            collector.receive(self.path, self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    collector.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield collector
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    return [_value(each) for each in value.array_value.values] if kind == "array_value" else getattr(value, kind)
